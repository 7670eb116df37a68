"""What forktree costs, measured: `make bench`. Every figure says its clock, its accelerator and how often."""
