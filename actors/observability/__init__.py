"""What an operator sees of a deployment: metrics, traces, logs."""
