"""The front door: gRPC in, checked requests to target replicas, answers and errors out."""
