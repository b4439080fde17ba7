"""The RPCs of ``grpc.health.v1.Health``: how the target replicas are, which is what matters to clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from grpc_health.v1 import health_pb2
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from actors.ingress.answering import answering
from actors.ingress.errors import UnknownService
from actors.routing.broadcast import broadcast
from outrider.v1 import generation_pb2 as pb

HEALTH_PERIOD_S = 1.0

HEALTH_SERVICES = ("", pb.DESCRIPTOR.services_by_name["GenerationService"].full_name)
"""Whose health can be asked for."""


class HealthCalls:
    """A base of the ingress deployment."""

    _target: DeploymentHandle
    _capacity_metadata: list[tuple[str, str]]

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> health_pb2.HealthCheckResponse:
        with answering(grpc_context, "Check"):
            if request.service not in HEALTH_SERVICES:
                raise UnknownService(request.service)
            grpc_context.set_trailing_metadata(self._capacity_metadata)
            return health_pb2.HealthCheckResponse(status=await self._health())

    async def List(
        self, request: health_pb2.HealthListRequest, grpc_context: RayServegRPCContext
    ) -> health_pb2.HealthListResponse:
        with answering(grpc_context, "List"):
            health = health_pb2.HealthCheckResponse(status=await self._health())
            return health_pb2.HealthListResponse(statuses=dict.fromkeys(HEALTH_SERVICES, health))

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """A service that is not known stays so: the stream says it once and goes on."""
        with answering(grpc_context, "Watch"):
            last = None
            while True:
                known = request.service in HEALTH_SERVICES
                status = await self._health() if known else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                if status != last:
                    yield health_pb2.HealthCheckResponse(status=status)
                last = status
                await asyncio.sleep(HEALTH_PERIOD_S)

    async def _health(self) -> int:
        """Serving, as long as one target replica runs that does not say it is broken. One that says nothing may be
        busy: Serve's own checks of it, which wait longer, decide whether it runs."""
        try:
            replies = await broadcast(self._target, "check_health", timeout_s=HEALTH_PERIOD_S)
        except (DeploymentUnavailableError, ConnectionError):
            return health_pb2.HealthCheckResponse.NOT_SERVING
        well = any(reply.ok or reply.replica_id is None for reply in replies)
        return health_pb2.HealthCheckResponse.SERVING if well else health_pb2.HealthCheckResponse.NOT_SERVING
