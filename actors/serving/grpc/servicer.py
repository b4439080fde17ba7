"""The front door: a Serve deployment that speaks ``outrider.v1.GenerationService`` and ``grpc.health.v1.Health`` to
clients, and to target replicas through their handle.

It checks, translates and forwards, one message a round, and holds no policy about tokens. Every error leaves with a
status code, one sentence and details for programs; what the sentence leaves out is in the log, under the request id.
``outrider.actors.serve_seam.grpc_proxy`` mounts it on Serve's proxies.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import asdict, replace
from typing import Any

from google.protobuf import json_format
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from outrider.actors.observability.exposition import merge
from outrider.actors.observability.metrics import METRICS, Scaling
from outrider.actors.replica_calls import (
    Broadcast,
    GenerationRequest,
    ReplicaLoad,
    ReplicaReply,
    RequestError,
    RequestIdInUse,
    RoundOutput,
    sign,
)
from outrider.actors.request_checks import check_request_id
from outrider.actors.serving.access.guard import CALLER, key_of_caller
from outrider.actors.serving.access.owners import cache_salt, may_learn_from, tenant_of
from outrider.actors.serving.access.process import guard_ingress
from outrider.actors.serving.admission import Admission
from outrider.actors.serving.capacity import Capacity
from outrider.actors.serving.draining import DRAIN, DrainCalls
from outrider.actors.serving.failures import REQUEST_ID_METADATA, leave_out_what_is_told
from outrider.actors.serving.grpc.calls import HandleCalls, answering
from outrider.actors.serving.grpc.health import HealthCalls
from outrider.actors.serving.grpc.responses import (
    Answers,
    load_metadata,
    model_info_message,
    server_info_message,
    stream_message,
)
from outrider.actors.serving.grpc.validation import (
    GenerationMessage,
    ServedModel,
    check_model,
    to_generation_request,
    to_token_ids,
    to_tokenize_request,
)
from outrider.actors.serving.running import RunningRequests, retried
from outrider.actors.serving.scaling_board import Teller
from outrider.actors.serving.shared_poll import SharedPoll
from outrider.actors.serving.waiting import WaitingRoom
from outrider.actors.serving.ways_out import way_out
from outrider.cluster.limits import LimitsConfig
from outrider.cluster.lora_config import LoraConfig
from outrider.v1 import generation_pb2 as pb

ABORT_TIMEOUT_S = 2.0


class Ingress(HandleCalls, HealthCalls, DrainCalls):
    """Serve calls the method named like the RPC. The target handle must offer

    - ``generate(GenerationRequest)``: streams RoundOutput, each answer's last one with finish_reason. Raises
      RequestError for a request it refuses, RequestIdInUse, TimeoutError when its deadline passed, SamplingFailed when
      no next token can be chosen, ConnectionError when its engine is gone;
    - ``status()``: GetServerStatusResponse as a nested dict with the proto's field names; model may be left out;
    - ``model_info()``, ``tokenize(TokenizeRequest)``, ``detokenize(ids, skip_special_tokens)``;
    - ``revert_drafter(version)``: the number under which it serves then. Raises RequestError;
    - ``abort(request_id, caller)``: whether it had the request of that caller (None: of anybody), and
      ``check_health()``, both by ``signed_reply``.
    """

    def __init__(
        self,
        target: DeploymentHandle,
        served_model_name: str,
        num_speculative_tokens: int,
        *,
        broadcast: Broadcast,
        max_retries: int = 1,
        capacity: Capacity | None = None,
        keys_file: str | None = None,
        isolates_tenants: bool = False,
        limits: LimitsConfig | None = None,
        is_stopping: Callable[[], bool] = bool,
        autoscaled: bool = False,
        num_ingresses: int = 1,
        lora: LoraConfig | None = None,
        waiting: WaitingRoom | None = None,
    ) -> None:
        """num_speculative_tokens: K, 0 without a drafter. max_retries: how often a request is sent again whose replica
        is lost before there is any output. capacity: requests that targets and queue hold together, which proxies
        are told; None: unknown. broadcast: asks all replicas. limits None: the defaults. keys_file: whose keys
        calls need; None: none. isolates_tenants: caches are a key's own. is_stopping: whether Serve takes this
        replica down. autoscaled: what was refused is to be told, on the event loop that this is made on.
        num_ingresses: replicas of this deployment, which share limits out. lora: the target's adapters. waiting:
        for whom no node has room; None: not known. Raises ConfigError for a file of keys that cannot be used.
        """
        leave_out_what_is_told()
        DRAIN.watch(is_stopping)
        guard_ingress(keys_file, num_ingresses)
        self._target, self._broadcast = target, broadcast
        self._generate = target.generate.options(stream=True)
        self._limits = limits or LimitsConfig()
        self._lora = lora
        self._served = ServedModel(
            served_model_name,
            num_speculative_tokens,
            self._limits,
            () if lora is None else lora.fixed_names,
        )
        self._admission = Admission(self._limits, num_ingresses)
        self._num_ingresses = num_ingresses
        self._health_poll = SharedPoll(self._ask_health)
        self._status_poll = SharedPoll(self._ask_status)
        self._max_retries = max_retries
        self._capacity = capacity
        self._running = RunningRequests()
        self._isolates_tenants = isolates_tenants
        self._started_unix_s = time.time()
        self._telling = asyncio.get_running_loop().create_task(_teller().run()) if autoscaled else None
        self._waiting, self._looking = waiting, None
        if waiting is not None:
            METRICS.waiting = waiting.by_deployment
            self._looking = asyncio.get_running_loop().create_task(waiting.run())

    async def Generate(self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext) -> pb.GenerateResponse:
        request_id = _request_id(request)
        with answering(grpc_context, "Generate", request_id) as span:
            checked = self._check(request, request_id, grpc_context, span.headers)
            answers = Answers(request_id, checked.num_answers)
            load = None
            async with aclosing(self._rounds(checked)) as rounds:
                async for output in rounds:
                    answers.add(output)
                    load = output.load or load
            grpc_context.set_trailing_metadata(self._trailing(request_id, load))
            return answers.response()

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        request_id = _request_id(request)
        with answering(grpc_context, "GenerateStream", request_id) as span:
            checked = self._check(request, request_id, grpc_context, span.headers)
            grpc_context.set_trailing_metadata(self._trailing(request_id))
            async with aclosing(self._rounds(checked)) as rounds:
                async for output in rounds:
                    if output.load is not None:
                        grpc_context.set_trailing_metadata(self._trailing(request_id, output.load))
                    yield stream_message(request_id, output)

    async def AbortRequest(
        self, request: pb.AbortRequestRequest, grpc_context: RayServegRPCContext
    ) -> pb.AbortRequestResponse:
        """Of a key's own requests, or of anybody's for a key that may do everything. The target's own end comes first,
        as it counts what was done. What has not reached a target, or sits at one that does not answer, is ended by the
        ingress that holds it."""
        with answering(grpc_context, "AbortRequest"):
            check_request_id(request.request_id)
            asks = CALLER.get()
            caller = None if asks is None or asks.is_admin else tenant_of(asks)
            heard = True
            for ask in (self._abort_at_targets, self._abort_at_ingresses):
                aborted, all_heard = await ask(request.request_id, caller)
                if aborted:
                    return pb.AbortRequestResponse(aborted=True)
                heard = heard and all_heard
            if not heard:
                raise ConnectionError("not every replica answered")
            return pb.AbortRequestResponse(aborted=False)

    async def _abort_at_targets(self, request_id: str, caller: int | None) -> tuple[bool, bool]:
        """Whether one had the request, and whether all of them answered."""
        try:
            replies = await self._broadcast(self._target, "abort", request_id, caller, timeout_s=ABORT_TIMEOUT_S)
        except (DeploymentUnavailableError, ConnectionError):
            return False, False
        return any(reply.value for reply in replies), all(reply.ok for reply in replies)

    async def _abort_at_ingresses(self, request_id: str, caller: int | None) -> tuple[bool, bool]:
        """Likewise; this one first."""
        if await self.abort_here(request_id, caller):
            return True, True
        replies = await self._ask_ingresses("abort_here", request_id, caller)
        return any(reply.value for reply in replies), all(reply.ok for reply in replies)

    async def _ask_ingresses(self, method: str, *args: Any) -> list[ReplicaReply]:
        """All of them, where there are others: what this one has to say is known."""
        handle, own = _this_deployment(), _this_replica()
        return await self._broadcast(handle, method, *args, timeout_s=ABORT_TIMEOUT_S, beside=own)

    async def abort_here(self, request_id: str, caller: int | None) -> bool:
        """End a request of caller's, None: of whoever's, that this ingress replica holds. Returns whether it does."""
        return self._running.abort(request_id, caller)

    async def metrics_text(self) -> str:
        """What this ingress replica counts."""
        return METRICS.text()

    async def all_metrics_text(self) -> str:
        """Likewise, and where there are several, what each of them does that answers, with a label that says which."""
        own = METRICS.text()
        if self._num_ingresses == 1:
            return own
        replies = []
        with suppress(DeploymentUnavailableError, ConnectionError):  # they are not known, in time
            replies = await self._ask_ingresses("metrics_text")
        texts = {reply.replica_id: reply.value for reply in replies if reply.ok and reply.replica_id is not None}
        return merge(dict(sorted({**texts, _this_replica(): own}.items())), "ingress")

    async def signed_reply(self, method: str, args: tuple[Any, ...]) -> ReplicaReply:
        """See serve_seam.broadcast."""
        return await sign(self, _this_replica(), method, args)

    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: RayServegRPCContext) -> pb.TokenizeResponse:
        with answering(grpc_context, "Tokenize"):
            check_model(request, self._served)
            tokens = await self._answer(self._target.tokenize.remote(to_tokenize_request(request, self._limits)))
            return pb.TokenizeResponse(
                token_ids=tokens.token_ids,
                count=len(tokens.token_ids),
                max_model_len=tokens.max_model_len,
                token_strs=tokens.token_strs,
            )

    async def Detokenize(
        self, request: pb.DetokenizeRequest, grpc_context: RayServegRPCContext
    ) -> pb.DetokenizeResponse:
        with answering(grpc_context, "Detokenize"):
            check_model(request, self._served)
            ids = to_token_ids(request, self._limits)
            text = await self._answer(self._target.detokenize.remote(ids, request.skip_special_tokens))
            return pb.DetokenizeResponse(text=text)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, grpc_context: RayServegRPCContext
    ) -> pb.GetModelInfoResponse:
        with answering(grpc_context, "GetModelInfo"):
            info = await self._answer(self._target.model_info.remote())
            grpc_context.set_trailing_metadata(self._capacity_metadata)
            return model_info_message(self._served.name, info)

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, grpc_context: RayServegRPCContext
    ) -> pb.GetServerInfoResponse:
        with answering(grpc_context, "GetServerInfo"):
            grpc_context.set_trailing_metadata(self._capacity_metadata)
            return server_info_message(self._started_unix_s)

    async def GetServerStatus(
        self, request: pb.GetServerStatusRequest, grpc_context: RayServegRPCContext
    ) -> pb.GetServerStatusResponse:
        with answering(grpc_context, "GetServerStatus"):
            waiting = [] if self._waiting is None else self._waiting.now()
            try:
                status = await self._status_poll()
            except (ConnectionError, DeploymentUnavailableError):
                if not waiting:
                    raise
                status = {}  # nobody can answer, and this says why
            response = json_format.ParseDict(status, pb.GetServerStatusResponse(), ignore_unknown_fields=False)
            response.model = self._served.name
            response.waiting.extend(pb.Waiting(**asdict(each)) for each in waiting)
            grpc_context.set_trailing_metadata(self._capacity_metadata)
            return response

    async def RevertDrafter(
        self, request: pb.RevertDrafterRequest, grpc_context: RayServegRPCContext
    ) -> pb.RevertDrafterResponse:
        """At one replica: its drafter's trainer is that of all."""
        with answering(grpc_context, "RevertDrafter"):
            if not request.HasField("version"):
                raise RequestError("version", "is missing", "send the number of a version that GetServerStatus lists")
            serving = await self._answer(self._target.revert_drafter.remote(request.version))
            return pb.RevertDrafterResponse(serving=serving)

    async def _ask_status(self) -> dict[str, Any]:
        return await self._answer(self._target.status.remote())

    async def _answer(self, call: Any) -> Any:
        """To a call of a target replica. Raises ConnectionError when there is none in time."""
        seconds = self._limits.control_timeout_s
        try:
            async with asyncio.timeout(seconds):
                return await call
        except TimeoutError:
            call.cancel()
            raise ConnectionError(f"no target replica answered within {seconds:g} s") from None

    def _trailing(self, request_id: str, load: ReplicaLoad | None = None) -> list[tuple[str, str | bytes]]:
        return [(REQUEST_ID_METADATA, request_id), *self._capacity_metadata, *load_metadata(load)]

    def _check(
        self,
        request: GenerationMessage,
        request_id: str,
        grpc_context: RayServegRPCContext,
        trace_headers: dict[str, str],
    ) -> GenerationRequest:
        checked = to_generation_request(request, self._served, request_id=request_id)
        asks = CALLER.get()
        caller = tenant_of(asks)
        tenant = caller if self._isolates_tenants else 0
        return replace(
            checked,
            caller=caller,
            tenant=tenant,
            cache_salt=cache_salt(tenant, checked.cache_salt),
            learns=may_learn_from(asks),
            trace_headers=trace_headers,
        )

    async def _rounds(self, request: GenerationRequest) -> AsyncGenerator[RoundOutput, None]:
        """The target's outputs.

        However this ends early (client gone, deadline, error on our side), the target's generator is cancelled: that
        is what makes its engine abort the request. The deadline is watched here too, since a request may spend it
        waiting for a replica.
        """
        if request in self._running:
            raise RequestIdInUse(request.request_id)

        def send(avoid: tuple[str, ...]) -> Any:
            return self._generate.remote(replace(request, avoid_replicas=avoid, way_out=way_out()))

        outputs = retried(send, max_retries=self._max_retries, request_id=request.request_id)
        caller, prompt_counted = CALLER.get(), False
        with self._admission.hold(request, key_of_caller()), self._running.hold(request) as running:
            async with aclosing(outputs):
                while (output := await running.next(outputs)) is not None:
                    running.note(output)
                    if caller is not None:
                        prompt = output.usage.prompt_tokens if output.usage and not prompt_counted else 0
                        prompt_counted = prompt_counted or output.usage is not None
                        caller.used(prompt, len(output.token_ids))
                    yield output
            if running.aborted:
                for output in running.aborted_outputs():
                    yield output
            elif running.unfinished:
                raise RuntimeError(
                    f"the target's stream ended without a finish reason for answers {running.unfinished}"
                )


def _request_id(request: GenerationMessage) -> str:
    return request.request_id if request.HasField("request_id") else uuid.uuid4().hex


def _teller() -> Teller:
    """Of this replica."""

    def hear(scaling: Scaling | None) -> None:
        METRICS.scaling = scaling

    context = serve.get_replica_context()
    return Teller(context.app_name, context.replica_id.unique_id, lambda: METRICS.num_refused_generations, hear)


def _this_deployment() -> DeploymentHandle:
    context = serve.get_replica_context()
    return serve.get_deployment_handle(context.deployment, context.app_name)


def _this_replica() -> str:
    return serve.get_replica_context().replica_id.unique_id
