"""Serves ``grpc.health.v1.Health`` on the ingress. The server is healthy while one target replica can answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import grpc
from grpc_health.v1 import health_pb2
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from outrider.actors.replica_calls import Broadcast
from outrider.actors.serving.failures import Refused
from outrider.actors.serving.grpc.calls import handled_rpc
from outrider.actors.serving.running import RunningRequests
from outrider.actors.serving.shared_poll import SharedPoll
from outrider.v1 import generation_pb2 as pb

HEALTH_PERIOD_S = 1.0

LIVENESS, READINESS = "liveness", "readiness"
"""Services for whether the server runs at all, and whether it can serve now. Only the first calls for a restart."""

HEALTH_SERVICES = ("", pb.DESCRIPTOR.services_by_name["GenerationService"].full_name, READINESS, LIVENESS)
"""Services whose health can be asked for. The first two mean readiness."""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class HealthCalls:
    """Answers the RPCs of Health; the ingress derives from it."""

    _target: DeploymentHandle
    _broadcast: Broadcast
    _running: RunningRequests
    _is_stopping: Callable[[], bool]

    def __init__(self) -> None:
        self._health_poll = SharedPoll(self._ask_health)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> health_pb2.HealthCheckResponse:
        with handled_rpc(grpc_context, "Check"):
            if request.service not in HEALTH_SERVICES:
                raise Refused(
                    grpc.StatusCode.NOT_FOUND, "service: is not served here; leave it out to ask for the server"
                )
            return health_pb2.HealthCheckResponse(status=await self.health(request.service))

    async def List(
        self, request: health_pb2.HealthListRequest, grpc_context: RayServegRPCContext
    ) -> health_pb2.HealthListResponse:
        with handled_rpc(grpc_context, "List"):
            statuses = dict.fromkeys(HEALTH_SERVICES, health_pb2.HealthCheckResponse(status=await self.health()))
            statuses[LIVENESS] = health_pb2.HealthCheckResponse(status=_SERVING)
            return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """Yields the status, and each change of it. Ends when the server or this replica is taken down."""
        with handled_rpc(grpc_context, "Watch"):
            last = None
            while True:
                known = request.service in HEALTH_SERVICES
                status = await self.health(request.service) if known else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                if status != last:
                    yield health_pb2.HealthCheckResponse(status=status)
                last = status
                if self._running.draining or self._is_stopping():
                    return
                await asyncio.sleep(HEALTH_PERIOD_S)

    async def health(self, service: str = "") -> int:
        """Returns the HealthCheckResponse status of one of HEALTH_SERVICES."""
        if service == LIVENESS:
            return _SERVING
        if self._running.draining:
            return _NOT_SERVING
        return await self._health_poll()

    async def _ask_health(self) -> int:
        """Asks the target replicas for their health.

        A replica that does not answer may be busy. Serve's own checks, which wait longer, decide whether it runs.
        """
        try:
            replies = await self._broadcast(self._target, "check_health", timeout_s=HEALTH_PERIOD_S)
        except (DeploymentUnavailableError, ConnectionError):
            return _NOT_SERVING
        return _SERVING if any(reply.ok or reply.is_late for reply in replies) else _NOT_SERVING
