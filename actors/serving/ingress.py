"""Implements the ingress, which serves ``outrider.v1.GenerationService``, ``grpc.health.v1.Health`` and HTTP.

It authenticates callers, converts gRPC messages and forwards OpenAI's requests as they are.
Target replicas are called through their handle, whose router picks one (see serve_adapter/request_router.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from google.protobuf import json_format
from prometheus_client.core import Metric
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from outrider.actors.observability.metrics import INGRESS, label
from outrider.actors.replica_calls import (
    Broadcast,
    GenerationRequest,
    ReplicaReply,
    RequestError,
    RoundOutput,
    Usage,
    sign,
)
from outrider.actors.serving.authentication import GRPC_TIMEOUT_HEADER, Authenticator, tenant_salt
from outrider.actors.serving.failures import REQUEST_ID_METADATA, silence_refusal_logs
from outrider.actors.serving.grpc.calls import HandleCalls, InProcessCall, handled_rpc
from outrider.actors.serving.grpc.health import HealthCalls
from outrider.actors.serving.grpc.requests import (
    GenerationMessage,
    ServedModel,
    check_model,
    request_id_of,
    to_generation_request,
    to_tokenize_request,
)
from outrider.actors.serving.grpc.responses import (
    ResponseBuilder,
    model_info_message,
    server_info_message,
    stream_message,
)
from outrider.actors.serving.http.app import build_http_app
from outrider.actors.serving.openai.forward import OpenAIForwarder
from outrider.actors.serving.openai.rollouts import add_rollout_routes
from outrider.actors.serving.registry_client import CONTROL_TIMEOUT_S, ENDS_WITHIN_S
from outrider.actors.serving.running import RunningRequest, RunningRequests
from outrider.actors.serving.shared_poll import SharedPoll
from outrider.cluster.config import OutriderConfig
from outrider.v1 import generation_pb2 as pb


@serve.ingress()
class Ingress(HandleCalls, HealthCalls):
    """Answers each RPC by the method of its name. Serve gives HTTP requests to the app that is built here."""

    def __init__(
        self,
        target: DeploymentHandle,
        config: OutriderConfig,
        *,
        broadcast: Broadcast,
        authenticator: Authenticator,
        is_stopping: Callable[[], bool],
        pool: DeploymentHandle | None,
    ) -> None:
        """Prepares the calls to the Target deployment.

        Args:
            target: The Target deployment.
            config: The whole configuration.
            broadcast: Calls all replicas of a deployment.
            authenticator: Checks callers.
            is_stopping: Whether Serve is taking this replica down.
            pool: The DrafterPool deployment, where there is one.
        """
        HealthCalls.__init__(self)
        silence_refusal_logs()
        self._target, self._config, self._pool = target, config, pool
        self._broadcast, self._authenticator, self._is_stopping = broadcast, authenticator, is_stopping
        self._generate = target.generate.options(stream=True)
        self._served = ServedModel(config.served_model_name, config.num_speculative_tokens, config.serving)
        self._status_poll = SharedPoll(self._ask_status)
        self._running = RunningRequests()
        self._started_unix_s = time.time()
        self._forwarder = OpenAIForwarder(target, self._running, config)

    def __serve_build_asgi_app__(self) -> FastAPI:
        serving = self._config.serving
        deployments = self._target, self._pool, self._broadcast
        app = build_http_app(self, self._authenticator, self._forwarder, *deployments, serving.allowed_origins)
        if self._config.target.takes_new_weights:
            add_rollout_routes(app, self._target, self._broadcast, serving.greatest_timeout_s)
        return app

    async def Generate(self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext) -> pb.GenerateResponse:
        request_id = _named(request)
        with handled_rpc(grpc_context, "Generate", request_id) as trace_headers:
            checked = self._check(request, request_id, grpc_context, trace_headers)
            grpc_context.set_trailing_metadata([(REQUEST_ID_METADATA, request_id)])
            answers = ResponseBuilder(request_id, checked.num_answers)
            async with aclosing(self._rounds(checked)) as rounds:
                async for output in rounds:
                    answers.add(output)
            return answers.response()

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        request_id = _named(request)
        with handled_rpc(grpc_context, "GenerateStream", request_id) as trace_headers:
            checked = self._check(request, request_id, grpc_context, trace_headers)
            grpc_context.set_trailing_metadata([(REQUEST_ID_METADATA, request_id)])
            async with aclosing(self._rounds(checked)) as rounds:
                async for output in rounds:
                    yield stream_message(request_id, output)

    async def AbortRequest(
        self, request: pb.AbortRequestRequest, grpc_context: RayServegRPCContext
    ) -> pb.AbortRequestResponse:
        """Aborts one of the caller's own requests, of either API.

        The target is asked first, because the engine's abort returns the output with its usage. A request that waits
        for a replica is aborted in the ingress that holds it.
        """
        with handled_rpc(grpc_context, "AbortRequest"):
            owner = self._owner(grpc_context)
            request_id_of(request)
            all_answered = True
            for deployment in (self._target, _this_deployment()):
                try:
                    replies = await self._broadcast(
                        deployment, "abort", owner, request.request_id, timeout_s=CONTROL_TIMEOUT_S
                    )
                except (DeploymentUnavailableError, ConnectionError):
                    all_answered = False
                    continue
                if any(reply.value for reply in replies):
                    return pb.AbortRequestResponse(aborted=True)
                all_answered = all_answered and all(reply.ok for reply in replies)
            if not all_answered:
                raise ConnectionError("not every replica answered")
            return pb.AbortRequestResponse(aborted=False)

    async def abort(self, owner: int, request_id: str) -> bool:
        """Ends a request that this ingress replica holds. Returns whether it does."""
        return self._running.abort(owner, request_id)

    async def drain(self) -> int:
        """Refuses new requests from now on. Returns how many are running."""
        self._running.draining = True
        return len(self._running)

    async def metrics(self) -> list[Metric]:
        """Returns what this ingress replica counts."""
        return list(INGRESS.collect())

    async def all_metrics(self) -> list[Metric]:
        """Returns the metrics of all ingress replicas that answer, labelled with the replica."""
        if self._config.serving.num_ingresses == 1:
            return await self.metrics()
        found = {_this_replica(): await self.metrics()}
        with suppress(DeploymentUnavailableError, ConnectionError):
            for reply in await self._broadcast(_this_deployment(), "metrics", timeout_s=CONTROL_TIMEOUT_S):
                if reply.ok and reply.replica_id is not None:
                    found[reply.replica_id] = reply.value
        return [metric for name, metrics in sorted(found.items()) for metric in label(metrics, ingress=name)]

    async def signed_reply(self, method: str, args: tuple[Any, ...]) -> ReplicaReply:
        """See serve_adapter.broadcast."""
        return await sign(self, _this_replica(), method, args)

    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: RayServegRPCContext) -> pb.TokenizeResponse:
        with handled_rpc(grpc_context, "Tokenize"):
            self._owner(grpc_context)
            check_model(request, self._served)
            tokens = await self._answer(self._target.tokenize.remote(to_tokenize_request(request)))
            return pb.TokenizeResponse(
                token_ids=tokens.token_ids,
                count=len(tokens.token_ids),
                max_model_len=tokens.max_model_len,
                token_strs=tokens.token_strs,
            )

    async def Detokenize(
        self, request: pb.DetokenizeRequest, grpc_context: RayServegRPCContext
    ) -> pb.DetokenizeResponse:
        with handled_rpc(grpc_context, "Detokenize"):
            self._owner(grpc_context)
            check_model(request, self._served)
            ids = tuple(request.token_ids)
            text = await self._answer(self._target.detokenize.remote(ids, request.skip_special_tokens))
            return pb.DetokenizeResponse(text=text)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, grpc_context: RayServegRPCContext
    ) -> pb.GetModelInfoResponse:
        with handled_rpc(grpc_context, "GetModelInfo"):
            self._owner(grpc_context)
            info = await self._answer(self._target.model_info.remote())
            return model_info_message(self._served.name, info)

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, grpc_context: RayServegRPCContext
    ) -> pb.GetServerInfoResponse:
        with handled_rpc(grpc_context, "GetServerInfo"):
            self._owner(grpc_context)
            return server_info_message(self._started_unix_s)

    async def GetServerStatus(
        self, request: pb.GetServerStatusRequest, grpc_context: RayServegRPCContext
    ) -> pb.GetServerStatusResponse:
        with handled_rpc(grpc_context, "GetServerStatus"):
            self._owner(grpc_context)
            status = await self._status_poll()
            response = json_format.ParseDict(status, pb.GetServerStatusResponse(), ignore_unknown_fields=False)
            response.model = self._served.name
            return response

    async def RevertDrafter(
        self, request: pb.RevertDrafterRequest, grpc_context: RayServegRPCContext
    ) -> pb.RevertDrafterResponse:
        """Reverts the drafter through one replica, since all drafters share a trainer."""
        with handled_rpc(grpc_context, "RevertDrafter"):
            self._owner(grpc_context)
            if not request.HasField("version"):
                raise RequestError("version", "is missing", "send the number of a version that GetServerStatus lists")
            serving = await self._answer(self._target.revert_drafter.remote(request.version), ENDS_WITHIN_S)
            return pb.RevertDrafterResponse(serving=serving)

    async def _ask_status(self) -> dict[str, Any]:
        status: dict[str, Any] = await self._answer(self._target.status.remote())
        return status

    async def _answer(self, call: Any, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        """Waits for a target replica's answer. Raises ConnectionError when there is none in time."""
        try:
            async with asyncio.timeout(timeout_s):
                return await call
        except TimeoutError:
            call.cancel()
            raise ConnectionError(f"no target replica answered within {timeout_s:g} s") from None

    def _owner(self, grpc_context: RayServegRPCContext) -> int:
        """Returns the caller's number. Raises Refused."""
        if isinstance(grpc_context, InProcessCall):
            return grpc_context.owner
        metadata = {key: value for key, value in grpc_context.invocation_metadata() if isinstance(value, str)}
        return self._authenticator.owner_of(metadata.get, grpc_context.peer().rpartition(":")[0])

    def _check(
        self,
        request: GenerationMessage,
        request_id: str,
        grpc_context: RayServegRPCContext,
        trace_headers: dict[str, str],
    ) -> GenerationRequest:
        owner = self._owner(grpc_context)
        if request.HasField("request_id"):
            request_id_of(request)
        timeout = dict(grpc_context.invocation_metadata()).get(GRPC_TIMEOUT_HEADER)
        grpc_timeout = timeout if isinstance(timeout, str) else None
        checked = to_generation_request(request, self._served, request_id=request_id, grpc_timeout=grpc_timeout)
        tenant = owner if self._config.serving.tenant_isolation else 0
        salt = tenant_salt(tenant, checked.cache_salt) if tenant else checked.cache_salt
        return replace(checked, caller=owner, tenant=tenant, cache_salt=salt, trace_headers=trace_headers)

    async def _rounds(self, request: GenerationRequest) -> AsyncGenerator[RoundOutput, None]:
        """Yields the target's outputs, each answer's last one with a finish reason, an aborted one's too."""

        def send(avoid: tuple[str, ...]) -> Any:
            return self._generate.remote(replace(request, avoid_replicas=avoid))

        ends = _FinishTracker(request.num_answers)
        with self._running.hold(request.caller, request.request_id) as running:
            outputs = running.messages(send, request, max_retries=self._config.serving.most_replicas - 1)
            async with aclosing(outputs):
                async for output in outputs:
                    ends.note(output)
                    yield output
            for output in ends.missing(running):
                yield output


class _FinishTracker:
    """Tracks which answers of a request have finished, and their tokens so far."""

    def __init__(self, num_answers: int) -> None:
        self._tokens = [0] * num_answers
        self._usage = Usage(0, 0)
        self._unfinished = set(range(num_answers))

    def note(self, output: RoundOutput) -> None:
        self._tokens[output.index] += len(output.token_ids)
        self._usage = output.usage or self._usage
        if output.finish_reason is not None:
            self._unfinished.discard(output.index)

    def missing(self, running: RunningRequest) -> list[RoundOutput]:
        """Returns a last output for each unfinished answer of an aborted request; others raise RuntimeError."""
        if self._unfinished and not running.aborted:
            raise RuntimeError(f"the target's stream ended without a finish reason for answers {self._unfinished}")
        return [
            RoundOutput(
                "",
                (),
                "abort",
                usage=Usage(self._usage.prompt_tokens, self._tokens[index], self._usage.cached_tokens),
                index=index,
            )
            for index in sorted(self._unfinished)
        ]


def _named(request: GenerationMessage) -> str:
    """Returns a name of the request for logs and errors; `_check` refuses an id that is not usable."""
    with suppress(RequestError):
        return request_id_of(request)
    return "(unusable id)"


def _this_deployment() -> DeploymentHandle:
    context = serve.get_replica_context()
    return serve.get_deployment_handle(context.deployment, context.app_name)


def _this_replica() -> str:
    return serve.get_replica_context().replica_id.unique_id
