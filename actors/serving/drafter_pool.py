"""Runs one drafter of a pool, which drafts for the targets that the registry assigns to it.

Its replica gets no requests: verifiers find the drafter through the registry, and link to it. A drafter that cannot be
loaded is tried again as long as the replica lives, and the registry reports why; targets serve without it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from prometheus_client.core import Metric
from ray import serve

from outrider.actors.drafter.actor import drafter_name, drafter_status, has_loaded
from outrider.actors.observability.metrics import ANSWER_WITHIN_S, ReplicaMetrics
from outrider.actors.replica_calls import ReplicaReply, sign
from outrider.actors.serve_adapter.replica_log import serve_log_kept
from outrider.actors.serving.launch import Launch
from outrider.actors.serving.registry_client import CONTROL_TIMEOUT_S, ENDS_WITHIN_S, RegistryClient
from outrider.cluster.config import OutriderConfig
from outrider.cluster.drafter_registry import Member, fingerprint
from outrider.cluster.placement import CorePlan, ReplicaPlacement

logger = logging.getLogger("ray.serve.outrider.pool")

MOVE_WITHIN_S = 30.0
"""How long a drafter that is taken down waits until its verifiers have moved to others."""

_LOOK_S = 0.5

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0
"""Pauses before a drafter that could not be loaded is tried again; each is twice as long as the one before."""

MOST_OF_A_REASON = 300
"""Length limit of a reason, in characters."""


class DrafterPool:
    """Is the class of the Serve deployment DrafterPool. Construction loads the draft model.

    It tries as often as that takes, since Serve gives a deployment up when its replicas have failed some times.

    placement: the bundles of this replica's own placement group; core_plan: CPU only. num_common_tokens: as Target's.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: OutriderConfig,
        placement: ReplicaPlacement,
        core_plan: CorePlan | None,
        num_common_tokens: int | None = None,
    ) -> None:
        self._replica = serve.get_replica_context().replica_id.unique_id
        name = drafter_name(self._replica)
        node = ray.get_runtime_context().get_node_id()
        member = Member(self._replica, pooled=True, fingerprint=fingerprint(config), node=node)
        launch = Launch.of_replica(config, self._replica, placement, core_plan, num_common_tokens)
        with serve_log_kept():
            self._registry_client = RegistryClient(config.serving.app_name, member)
            self._drafter = await self._load(launch.start_drafter)
        self._metrics = ReplicaMetrics(config.served_model_name, None, lambda: drafter_status(name, ANSWER_WITHIN_S))
        self._registry_client.update(drafter=name, trouble="")  # only now: targets link to it

    async def _load(self, launch: Callable[[], Any]) -> Any:
        """Returns the drafter's handle once its model has loaded."""
        pause_s = FIRST_PAUSE_S
        while True:
            drafter = None
            try:
                drafter = launch()
                await has_loaded(drafter)
            except (ray.exceptions.RayError, ValueError) as error:  # the latter: its name is not free again yet
                logger.warning("the drafter does not load, next attempt in %g s: %s", pause_s, error)
                if drafter is not None:
                    ray.kill(drafter)
                self._registry_client.update(trouble=reason(error))
            else:
                return drafter
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def signed_reply(self, method: str, args: tuple[Any, ...]) -> ReplicaReply:
        """See serve_adapter.broadcast."""
        return await sign(self, self._replica, method, args)

    async def metrics(self) -> list[Metric]:
        """Returns the drafter's metrics."""
        return await self._metrics.families()

    async def __del__(self) -> None:
        """Ends the drafter. Serve calls and awaits this on a graceful shutdown."""
        if (registry_client := getattr(self, "_registry_client", None)) is not None:
            if (loaded := registry_client.member.drafter) is not None:  # or nobody has it yet
                await self._wait_until_unused(registry_client, loaded)
            await asyncio.to_thread(registry_client.leave, ENDS_WITHIN_S)
        if (drafter := getattr(self, "_drafter", None)) is not None:
            ray.kill(drafter)

    async def _wait_until_unused(self, registry_client: RegistryClient, drafter: str) -> None:
        """Waits until all verifiers that can move to another drafter have moved with all their requests."""
        registry_client.update(draining=True)  # for a registry that is made anew meanwhile
        give_up = time.monotonic() + MOVE_WITHIN_S
        while time.monotonic() < give_up:
            try:
                if not await registry_client.drain():
                    status = await drafter_status(drafter, CONTROL_TIMEOUT_S)
                    if not status["num_sequences"]:
                        return
            except (ray.exceptions.RayError, TimeoutError, ValueError) as error:
                logger.warning("%s cannot be left yet: %s", drafter, error)
            await asyncio.sleep(_LOOK_S)
        logger.warning("%s ends without having been left", drafter)


def reason(error: BaseException) -> str:
    """Returns the error on one line: the last one where Ray has wrapped a traceback around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith((" ", "\t"))]
    return (lines or [type(error).__name__])[-1][:MOST_OF_A_REASON]
