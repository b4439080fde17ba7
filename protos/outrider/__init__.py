"""The public gRPC API of Outrider: ``outrider.v1``."""
