"""What operator and agents tell Prometheus: one table of all metrics, and how a program serves its own."""
