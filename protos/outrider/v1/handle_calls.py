"""What the two sides of a call through a DeploymentHandle share: its RPCs, and how one fails.

The ingress (outrider.actors.serving.grpc.calls) raises what outrider.OutriderHandle catches.
"""

from __future__ import annotations

from grpc_health.v1 import health_pb2

from outrider.v1 import generation_pb2 as pb

RPCS = {
    rpc.name: rpc
    for service in (
        pb.DESCRIPTOR.services_by_name["GenerationService"],
        health_pb2.DESCRIPTOR.services_by_name["Health"],
    )
    for rpc in service.methods
}
"""Everything that can be called, by name."""


class CallFailed(Exception):
    """A call through a handle that failed: what gRPC would have sent at its end.

    code: number of the gRPC status.
    """

    def __init__(self, code: int, details: str) -> None:
        super().__init__(code, details)
        self.code, self.details = code, details

    def __str__(self) -> str:
        return f"status {self.code}: {self.details}"
