"""`make demo`: a tree of live forks, grown with kubectl, looked into, and pruned until nothing is left."""
