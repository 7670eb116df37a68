"""What the chart runs once, each as a Job or a test pod: around an uninstall, and to try an install.

They say on standard output what they do, since that is all that whoever waits for them can read.
"""
