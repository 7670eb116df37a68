"""`forktree`, also `kubectl forktree`: sessions and their trees on the command line, by the SDK alone."""
