"""The jailed half: layers of files nobody vouches for become one read-only file system.

It runs as a process of its own and imports nothing of ours but what is in here.
"""
