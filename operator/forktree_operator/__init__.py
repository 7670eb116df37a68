"""The operator: decides where sessions and forks run, and what a lost node means for them.

It starts nothing itself. Its one write to an object that is to run is the node's name; the agent of that
node sees the object in the same moment and does the rest.
"""
