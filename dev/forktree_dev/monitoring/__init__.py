"""What stands on the metrics: their page in the docs, alerts for Prometheus, a dashboard for Grafana."""
