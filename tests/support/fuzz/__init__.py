"""Generate random requests for the gRPC service."""
