"""``grpc.health.v1.Health`` on the ingress: how the target replicas are is what matters to clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from grpc_health.v1 import health_pb2
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from outrider.actors.replica_calls import Broadcast
from outrider.actors.serving.capacity import Capacity
from outrider.actors.serving.draining import DRAIN
from outrider.actors.serving.failures import UnknownService
from outrider.actors.serving.gate import CAPACITY_METADATA
from outrider.actors.serving.grpc.calls import answering
from outrider.actors.serving.shared_poll import SharedPoll
from outrider.v1 import generation_pb2 as pb

HEALTH_PERIOD_S = 1.0

LIVENESS, READINESS = "liveness", "readiness"
"""Whether the server runs at all, and whether it can serve now. Only the first is a reason to start it anew."""

HEALTH_SERVICES = ("", pb.DESCRIPTOR.services_by_name["GenerationService"].full_name, READINESS, LIVENESS)
"""Whose health can be asked for. The first two are asked for readiness."""


class HealthCalls:
    """A base of the ingress deployment."""

    _target: DeploymentHandle
    _broadcast: Broadcast
    _health_poll: SharedPoll[int]
    _capacity: Capacity | None

    @property
    def _capacity_metadata(self) -> list[tuple[str, str]]:
        return [] if self._capacity is None else [(CAPACITY_METADATA, str(self._capacity.now(self._target)))]

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> health_pb2.HealthCheckResponse:
        with answering(grpc_context, "Check"):
            if request.service not in HEALTH_SERVICES:
                raise UnknownService(request.service)
            grpc_context.set_trailing_metadata(self._capacity_metadata)
            return health_pb2.HealthCheckResponse(status=await self._health(request.service))

    async def List(
        self, request: health_pb2.HealthListRequest, grpc_context: RayServegRPCContext
    ) -> health_pb2.HealthListResponse:
        with answering(grpc_context, "List"):
            health = health_pb2.HealthCheckResponse(status=await self._health())
            statuses = dict.fromkeys(HEALTH_SERVICES, health)
            statuses[LIVENESS] = health_pb2.HealthCheckResponse(status=await self._health(LIVENESS))
            return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """A service that is not known stays so: the stream says it once and goes on. It ends with the server."""
        with answering(grpc_context, "Watch"):
            last = None
            while True:
                service = request.service
                known = service in HEALTH_SERVICES
                status = await self._health(service) if known else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                if status != last:
                    yield health_pb2.HealthCheckResponse(status=status)
                last = status
                if DRAIN.ends_watches:
                    return
                await asyncio.sleep(HEALTH_PERIOD_S)

    async def _health(self, service: str = "") -> int:
        """Of liveness this answer is the proof."""
        if service == LIVENESS:
            return health_pb2.HealthCheckResponse.SERVING
        if DRAIN.begun:
            return health_pb2.HealthCheckResponse.NOT_SERVING
        return await self._health_poll()

    async def _ask_health(self) -> int:
        """Serving, as long as one target replica runs that does not say it is broken. One that says nothing may be
        busy: Serve's own checks of it, which wait longer, decide whether it runs."""
        try:
            replies = await self._broadcast(self._target, "check_health", timeout_s=HEALTH_PERIOD_S)
        except (DeploymentUnavailableError, ConnectionError):
            return health_pb2.HealthCheckResponse.NOT_SERVING
        well = any(reply.ok or reply.replica_id is None for reply in replies)
        return health_pb2.HealthCheckResponse.SERVING if well else health_pb2.HealthCheckResponse.NOT_SERVING
