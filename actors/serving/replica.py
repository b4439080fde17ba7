"""Implements the target replica: it starts the target's engine and its drafter, and answers calls.

vLLM is imported in the replica only, since processes that deploy this class would wait seconds for it.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import ray
from prometheus_client.core import Metric
from ray import serve

from outrider.actors.drafter.actor import drafter_name, drafter_status, find_actor, has_loaded
from outrider.actors.learning.versions import status_of
from outrider.actors.observability.logs import request_line
from outrider.actors.observability.metrics import ANSWER_WITHIN_S, ReplicaMetrics
from outrider.actors.observability.start_up import StartUp
from outrider.actors.replica_calls import (
    GenerationRequest,
    HttpCall,
    HttpHead,
    ModelInfo,
    ReplicaLost,
    ReplicaReply,
    RequestError,
    RoundOutput,
    TokenizeRequest,
    Tokens,
    sign,
)
from outrider.actors.serve_adapter.replica_log import serve_log_kept
from outrider.actors.serving.actor_calls import result_within
from outrider.actors.serving.co_located import check_co_located
from outrider.actors.serving.failures import Refused, silence_refusal_logs
from outrider.actors.serving.launch import Launch
from outrider.actors.serving.registry_client import CONTROL_TIMEOUT_S, RegistryClient
from outrider.cluster.config import ConfigError, DraftModelConfig, OutriderConfig
from outrider.cluster.drafter_registry import Member, fingerprint
from outrider.cluster.modes import BY_NAME
from outrider.cluster.placement import CorePlan, ReplicaPlacement

if TYPE_CHECKING:
    from outrider.actors.serving.openai.app import OpenAIApp
    from outrider.actors.vllm_adapter.target_engine import TargetEngine

logger = logging.getLogger("ray.serve.outrider.target")

_DRAFTER_TIMEOUT_S = 0.5
_FIRST_LINK_TIMEOUT_S = 60.0

_LINK_STATE_TIMEOUT_S = 1.0
"""Limit of asking for the link's state. An engine in a long step answers late; its last answer stands then."""


class Target:
    """Serves one target replica: starts its engine and drafter, and answers the ingress' calls.

    Construction loads the models: tens of seconds to minutes.

    placement: the bundles of this replica's own placement group; core_plan: CPU only. num_common_tokens: only ids below
    it are drafted; None: all that both models have.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: OutriderConfig,
        placement: ReplicaPlacement,
        core_plan: CorePlan | None,
        num_common_tokens: int | None = None,
    ) -> None:
        self._config, self._core_plan = config, core_plan
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._launch = Launch.of_replica(config, self._replica, placement, core_plan, num_common_tokens)
        start_up = StartUp(logger)
        silence_refusal_logs()
        with serve_log_kept():
            # Seconds of imports, in which the registry's and the drafter's processes start.
            imports = asyncio.create_task(asyncio.to_thread(_import_engine))
            drafter = config.remote_drafter
            owned = drafter_name(self._replica) if drafter is not None and not drafter.pooled else None
            member = Member(self._replica, owned, fingerprint=fingerprint(config))
            self._registry_client = RegistryClient(config.serving.app_name, member)
            self._drafter = self._launch.start_drafter() if owned is not None else None
            await imports
            start_up.done("vllm imported by the replica")
            self._engine = self._start_engine()
            start_up.done("engine core and ranks started, model loaded")
            self._openai = await self._start_openai()
            self._engine.adapters = self._openai.adapters
        self._metrics = self._replica_metrics()
        self._routing_stats = self._stats_for_routing()
        await self._engine.warm_up()
        start_up.done("target warmed up")
        self._engine.watch_steps(config.serving.step_watchdog_s)
        if self._drafter is not None:
            await has_loaded(self._drafter)
            start_up.done("waiting for the drafter")
        if config.drafts_in_rounds:
            await self._engine.call_ranks("open_link")
        if self._drafter is not None:  # one of the pool may come later, and go
            await self._wait_for_link()
            start_up.done("link opened")

    async def check_health(self) -> None:
        """Raises when the engine is dead or stands still: Serve then replaces this replica."""
        await self._engine.check_health()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RoundOutput, None]:
        """See TargetEngine.generate. Raises ReplicaLost when the engine is gone."""
        with request_line(logger, request.request_id):
            if (drafter := self._config.co_located) is not None:
                check_co_located(request, drafter.method, on_gpu=self._core_plan is None)
            try:
                async with aclosing(self._engine.generate(request)) as outputs:
                    async for output in outputs:
                        yield output
            except ConnectionError as error:
                raise ReplicaLost(self._replica, str(error)) from error

    async def http(self, call: HttpCall) -> AsyncGenerator[HttpHead | bytes, None]:
        """Answers a forwarded HTTP request; see OpenAIApp.answer."""
        with request_line(logger, call.request_id) if call.routed is not None else nullcontext():
            async with aclosing(self._openai.answer(call)) as parts:
                async for part in parts:
                    yield part

    async def whole_http(self, call: HttpCall) -> tuple[int, bytes]:
        """Answers a request that every replica gets with status and body; see openai/rollouts.py."""
        return await self._openai.whole_answer(call)

    async def signed_reply(self, method: str, args: tuple[Any, ...]) -> ReplicaReply:
        """See serve_adapter.broadcast."""
        return await sign(self, self._replica, method, args)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Returns this replica's state for the routers. Serve calls it."""
        return await self._routing_stats.collect()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns this replica's load for autoscaling; {} for a dead engine. Serve calls it."""
        try:
            await self._engine.check_health()
        except Exception:  # noqa: BLE001 - of whatever; Serve's health check reports it
            return {}
        return self._engine.report()

    async def status(self) -> dict[str, Any]:
        """Returns the public API's server status as a nested dict."""
        status: dict[str, Any] = {
            "model": self._config.served_model_name,
            "num_speculative_tokens": self._config.num_speculative_tokens,
            "target": self._engine.load(),
            "adapters": sorted(self._openai.adapters),
        }
        if self._config.drafter is None:
            return status
        status["methods"] = [self._config.drafter.method]
        if self._config.co_located is not None:  # part of the engine: up while that is, and no link in between
            status["speculation_up"] = True
            return status
        verifier = await self._verifier_status()
        link = verifier["link"]
        status["rounds"] = verifier["rounds"]
        status["speculation_up"] = link["state"] == "up"
        status["link"] = {
            "state": f"LINK_STATE_{link['state'].upper()}",
            **{name: link[name] for name in ("epoch", "reconnects", "drafter", "rtt_us", "last_error", "backend")},
        }
        with suppress(ray.exceptions.RayError, TimeoutError, ValueError):  # one that is loading or gone has no load
            drafter = await drafter_status(link["drafter"], _DRAFTER_TIMEOUT_S)
            status["drafter"] = {
                "running": int(drafter["num_sequences"]),
                "waiting": int(drafter["num_prefilling"]),
                "kv_cache_usage": drafter["kv_cache_usage"],
            }
            if (drafter.get("learning") or {}).get("trainer"):
                status["learning"] = status_of(drafter["learning"])
        return status

    async def revert_drafter(self, version: int) -> int:
        """Makes a former version of the drafter serve again, at all drafters of its trainer. Returns its new number.

        Raises RequestError where there is no such version, and Refused where drafter or trainer do not answer.
        """
        drafter = self._config.remote_drafter
        if not isinstance(drafter, DraftModelConfig) or drafter.learn is None:
            raise RequestError("version", "the drafter of this deployment does not learn", "set drafter.learn")
        link = (await self._verifier_status())["link"]
        try:
            actor = await find_actor(link["drafter"])
            serving, problem = await result_within(actor.go_back.remote(version), CONTROL_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError, ValueError) as error:
            logger.warning("drafter %r or its trainer does not answer: %s", link["drafter"], error)
            raise Refused(grpc.StatusCode.UNAVAILABLE, "the drafter or its trainer does not answer; retry") from None
        if serving is None:
            said, _, fix = problem.partition("; ")
            raise RequestError("version", said, fix)
        return int(serving)

    async def model_info(self) -> ModelInfo:
        """Returns TargetEngine.model_info with the speculation settings and parsers of the configuration."""
        config = self._config
        co_located = config.co_located is not None
        return replace(
            self._engine.model_info(),
            verifications=("rejection",) if co_located else tuple(BY_NAME),
            default_verification="rejection" if co_located else config.speculation.default_verification,
            methods=() if config.drafter is None else (config.drafter.method,),
            num_speculative_tokens=config.num_speculative_tokens,
            tool_call_parser=self._openai.args.tool_call_parser or None,
            reasoning_parser=self._openai.args.structured_outputs_config.reasoning_parser or None,
        )

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        """Raises RequestError."""
        return await self._engine.tokenize(request)

    async def detokenize(self, token_ids: tuple[int, ...], skip_special_tokens: bool) -> str:
        """Raises RequestError."""
        return await self._engine.detokenize(token_ids, skip_special_tokens)

    async def token_texts(self, token_ids: list[int]) -> list[str]:
        """Returns each token's own text; bytes that are no UTF-8 become U+FFFD. Raises RequestError."""
        return [await self._engine.detokenize((token_id,), False) for token_id in token_ids]

    async def abort(self, owner: int, request_id: str) -> bool:
        """Ends one of the owner's requests, of either API. Returns whether it was here."""
        return await self._engine.abort(request_id, owner) or await self._openai.abort(owner, request_id)

    async def metrics(self) -> list[Metric]:
        """Returns this replica's metrics, vLLM's and ours."""
        return await self._metrics.families()

    def __del__(self) -> None:
        """Shuts engine and drafter down. Serve calls this on a graceful shutdown."""
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.shutdown()
        drafter = getattr(self, "_drafter", None)
        if drafter is not None:
            with suppress(ray.exceptions.RayError):
                ray.kill(drafter)
        if (registry_client := getattr(self, "_registry_client", None)) is not None:
            registry_client.leave(wait_s=1.0)

    async def _start_openai(self) -> OpenAIApp:
        from outrider.actors.serving.openai.app import OpenAIApp

        return await OpenAIApp.make(self._engine.llm, self._config, self._replica)

    async def _wait_for_link(self) -> None:
        """Raises ConfigError when the link is not up in time: the operator asked for speculation."""
        deadline = time.monotonic() + _FIRST_LINK_TIMEOUT_S
        while time.monotonic() < deadline:
            link = (await self._verifier_status())["link"]
            if link["state"] == "up":
                return
            await asyncio.sleep(0.05)
        raise ConfigError(f"link: no link to the drafter within {_FIRST_LINK_TIMEOUT_S:g} s: {link['last_error']}")

    async def _verifier_status(self) -> dict[str, Any]:
        return await _call_verifier(self._engine, "round_status")

    def _stats_for_routing(self) -> RoutingStats:
        engine = self._engine

        async def link_is_up() -> bool:
            return bool((await _call_verifier(engine, "round_status"))["link"]["state"] == "up")

        asks_link = link_is_up if self._config.drafts_in_rounds else None
        return RoutingStats(engine.load, engine.kv_cache_tokens(), asks_link, engine.check_health)

    def _replica_metrics(self) -> ReplicaMetrics:
        # Not through self, which a replica's shutdown must be able to free.
        name, engine = self._config.served_model_name, self._engine
        owned = self._registry_client.member.drafter
        return ReplicaMetrics(
            name,
            (lambda: _call_verifier(engine, "round_metrics")) if self._config.drafts_in_rounds else None,
            None if owned is None else lambda: drafter_status(owned, ANSWER_WITHIN_S),
        )

    def _start_engine(self) -> TargetEngine:
        from outrider.actors.vllm_adapter.prompts import configured_chat_template
        from outrider.actors.vllm_adapter.target_engine import TargetEngine

        return TargetEngine(
            self._launch.target_vllm_config(),
            configured_chat_template(self._config),
            self._config.serving.structured_output,
            self._config.target.serves_lora,
            report_cached_tokens=self._config.serving.tenant_isolation,
        )


class RoutingStats:
    """Collects what a target replica reports to the routers every couple of seconds.

    load: ``running`` and ``waiting`` requests. kv_cache_tokens: capacity of the KV cache. link_is_up: asks the
    Verifier; None without a drafter. check_health: raises when the engine is dead.
    """

    def __init__(
        self,
        load: Callable[[], Mapping[str, Any]],
        kv_cache_tokens: int,
        link_is_up: Callable[[], Awaitable[bool]] | None,
        check_health: Callable[[], Awaitable[None]],
    ) -> None:
        self._load, self._kv_cache_tokens = load, kv_cache_tokens
        self._link_is_up, self._check_health = link_is_up, check_health
        self._speculation_up = True

    async def collect(self) -> dict[str, Any]:
        """Returns a few plain values, which Serve sends to every router when they change."""
        try:
            await self._check_health()
        except Exception:  # noqa: BLE001 - a dead engine, of whatever; Serve's health check reports it
            return {"serving": False}
        if self._link_is_up is not None:
            with suppress(TimeoutError):
                self._speculation_up = await asyncio.wait_for(self._link_is_up(), _LINK_STATE_TIMEOUT_S)
        load = self._load()
        return {
            "serving": True,
            "requests": load["running"] + load["waiting"],
            "kv_cache_tokens": self._kv_cache_tokens,
            "speculation_up": self._speculation_up,
        }


def _import_engine() -> None:
    # vLLM's 600 s may not be enough for a first load from slow storage, compilation and graph capture, and Serve would
    # start the replica again and again. Before the import: vLLM reads it then.
    os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", "3600")
    # OpenAI's own limit is 4, and evaluation harnesses send more.
    os.environ.setdefault("VLLM_MAX_STOP_STRINGS", "16")
    for module in (
        "outrider.actors.vllm_adapter.target_engine",
        "outrider.actors.serving.openai.app",
        "outrider.actors.vllm_adapter.executor",
    ):
        importlib.import_module(module)


async def _call_verifier(engine: TargetEngine, method: str) -> dict[str, Any]:
    """Returns the reply of the Verifier, the only rank that has one."""
    replies = await engine.call_ranks(method)
    return next(reply for reply in replies if reply is not None)
