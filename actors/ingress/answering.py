"""What surrounds every RPC of the ingress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from ray.serve.grpc_util import RayServegRPCContext

from actors.ingress.errors import IN_PROCESS_PEERS, errors_become_status
from actors.observability.metrics import CANCELLED, METRICS
from actors.observability.tracing import RequestSpan, rpc_span


@contextmanager
def answering(grpc_context: RayServegRPCContext, rpc: str, request_id: str | None = None) -> Iterator[RequestSpan]:
    """Around an RPC: errors become its status, how it ended is counted, and a request's is traced."""
    in_process = not isinstance(grpc_context, RayServegRPCContext) or grpc_context.peer() in IN_PROCESS_PEERS
    api = "in_process" if in_process else "grpc"
    code = CANCELLED
    try:
        with (
            METRICS.in_flight(api),
            rpc_span(rpc, grpc_context, request_id) as span,
            errors_become_status(grpc_context, _name(rpc, request_id), request_id),
        ):
            yield span
        code = grpc.StatusCode.OK.name
    except RuntimeError:
        code = (grpc_context.code() or grpc.StatusCode.INTERNAL).name
        raise
    finally:
        METRICS.ended(api, rpc, code)
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED.name:
            METRICS.rejected("queue_full")


def _name(rpc: str, request_id: str | None) -> str:
    return rpc if request_id is None else f"request {request_id}"
