"""A target replica: the target's engine, the drafter beside it, and the control around both.

vLLM is imported in the replica only: whoever deploys this class need not spend the seconds that takes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import weakref
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from actors.drafter import launch_drafter
from actors.generation import GenerationRequest, RoundOutput
from cluster.config import ConfigError, OutriderConfig
from cluster.cores import CorePlan, rank_environment
from cluster.membership import LEASE_S, LOADING_LEASE_S, get_or_create_registry, registry_name
from cluster.placement import ReplicaPlacement
from cluster.ranks import V1_RUNNER, RankPlacement

if TYPE_CHECKING:
    from actors.target_engine import TargetEngine

logger = logging.getLogger("ray.serve.outrider.target")

_CONTROL_TIMEOUT_S = 5.0
_REGISTRY_ATTEMPTS = 4
_FIRST_LINK_TIMEOUT_S = 60.0


class Target:
    """The Serve deployment's class. Construction loads the models: tens of seconds to minutes.

    placement: the bundles of this replica's own placement group; core_plan: CPU only.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: OutriderConfig, placement: ReplicaPlacement, core_plan: CorePlan | None
    ) -> None:
        self._config, self._placement, self._core_plan = config, placement, core_plan
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._group = ray.util.get_current_placement_group()
        self._address = ray.get_runtime_context().gcs_address
        self._registry = get_or_create_registry(config.serving.app_name)
        self._drafter = self._start_drafter() if config.drafter is not None else None
        await self._renew_lease(LOADING_LEASE_S)
        self._engine = self._start_engine()
        self._membership = asyncio.create_task(self._keep_membership(weakref.ref(self)))
        await self._engine.warm_up()
        if self._drafter is not None:
            await self._drafter.ready.remote()
            await self._engine.call_ranks("open_link")
            await self._wait_for_link()

    async def check_health(self) -> None:
        """Raises when the engine is dead: Serve then replaces this replica."""
        await self._engine.check_health()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RoundOutput, None]:
        """See TargetEngine.generate."""
        async with aclosing(self._engine.generate(request)) as outputs:
            async for output in outputs:
                yield output

    async def status(self) -> dict[str, Any]:
        """The public API's server status, as a nested dict."""
        status: dict[str, Any] = {
            "model": self._config.served_model_name,
            "num_speculative_tokens": self._config.num_speculative_tokens,
            "target": self._engine.load(),
        }
        if self._config.drafter is None:
            return status
        status["methods"] = [self._config.drafter.method]
        verifier = await self._verifier_status()
        link = verifier["link"]
        status["rounds"] = verifier["rounds"]
        status["speculation_up"] = link["state"] == "up"
        status["link"] = {
            "state": f"LINK_STATE_{link['state'].upper()}",
            **{name: link[name] for name in ("epoch", "reconnects", "drafter", "rtt_us", "last_error")},
        }
        assert self._drafter is not None
        with suppress(ray.exceptions.RayError, TimeoutError):  # a drafter that is loading or gone has no load
            drafter = await asyncio.wait_for(asyncio.wrap_future(self._drafter.status.remote().future()), 0.5)
            status["drafter"] = {
                "running": int(drafter["num_sequences"]),
                "waiting": int(drafter["num_prefilling"]),
                "kv_cache_usage": drafter["kv_cache_usage"],
            }
        return status

    def __del__(self) -> None:
        """Serve calls this on a graceful shutdown."""
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.shutdown()
        drafter = getattr(self, "_drafter", None)
        if drafter is not None:
            with suppress(ray.exceptions.RayError):
                ray.kill(drafter)
        with suppress(ray.exceptions.RayError):
            self._registry.leave.remote(self._replica)

    async def _wait_for_link(self) -> None:
        """Requests could be served without it, but not the way the operator asked for."""
        deadline = time.monotonic() + _FIRST_LINK_TIMEOUT_S
        while time.monotonic() < deadline:
            link = (await self._verifier_status())["link"]
            if link["state"] == "up":
                return
            await asyncio.sleep(0.05)
        raise ConfigError(f"link: no link to the drafter within {_FIRST_LINK_TIMEOUT_S:g} s: {link['last_error']}")

    async def _verifier_status(self) -> dict[str, Any]:
        replies = await self._engine.call_ranks("round_status")
        return next(reply for reply in replies if reply is not None)

    def _drafter_name(self) -> str | None:
        return f"Drafter:{self._replica}" if self._drafter is not None else None

    def _start_drafter(self) -> Any:
        assert self._config.drafter is not None
        return launch_drafter(
            self._config.drafter,
            self._config.speculation,
            replica=self._replica,
            ray_address=self._address,
            group=self._group,
            placement=self._placement,
            cores=self._cores("drafter"),
        )

    def _start_engine(self) -> TargetEngine:
        from actors.target_engine import TargetEngine
        from cluster.engine_args import target_vllm_config

        os.environ.update(V1_RUNNER)
        cores = self._cores("target")
        names = [f"Verifier:{self._replica}"]
        names += [f"TargetRank-{rank}:{self._replica}" for rank in range(1, self._config.target.tensor_parallel_size)]
        ranks = RankPlacement(
            self._address,
            names,
            list(self._placement.target_bundle_indices),
            cores,
            {**rank_environment(cores), **V1_RUNNER},
        )
        vllm_config = target_vllm_config(self._config, ranks, self._group)
        vllm_config.additional_config["outrider_replica"] = {
            "replica": self._replica,
            "registry": registry_name(self._config.serving.app_name),
        }
        return TargetEngine(vllm_config)

    def _cores(self, side: str) -> list[list[int]] | None:
        if self._core_plan is None:
            return None
        return [list(cores) for cores in getattr(self._core_plan, side)]

    async def _renew_lease(self, lease_s: float) -> None:
        """Raises RayError or TimeoutError when neither the registry nor a new one in its place answers."""
        for attempt in range(_REGISTRY_ATTEMPTS):
            try:
                answer = self._registry.renew.remote(self._replica, self._drafter_name(), lease_s)
                await asyncio.wait_for(asyncio.wrap_future(answer.future()), _CONTROL_TIMEOUT_S)
                return
            except (ray.exceptions.RayError, TimeoutError):
                if attempt == _REGISTRY_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(1.0)
                self._registry = get_or_create_registry(self._config.serving.app_name)

    @staticmethod
    async def _keep_membership(this: weakref.ref[Target]) -> None:
        while (target := this()) is not None:
            try:
                await target._renew_lease(LEASE_S)
            except (ray.exceptions.RayError, TimeoutError) as error:
                logger.warning("registry not reachable: %s", error)
            del target  # a replica that is shut down must not be kept alive by its own lease
            await asyncio.sleep(LEASE_S / 6)
