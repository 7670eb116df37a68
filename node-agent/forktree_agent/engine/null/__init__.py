"""Sessions without machines, to measure what everything around machines costs."""
