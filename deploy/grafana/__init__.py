"""The Grafana dashboard and Prometheus' alert rules, and the description that the dashboard is made from."""
