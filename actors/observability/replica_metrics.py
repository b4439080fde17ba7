"""A target replica's part of ``/metrics``: vLLM's metrics of this process, and ours of its verifier and drafter.

The verifier's numbers are in rank 0, which answers between two steps of the engine. So they are asked for once for all
scrapes of a second, are counts and never computed there, and a scrape does not wait for an engine that is busy with one
very long step: it gets the last numbers and their age.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry

from actors.observability.exposition import Families, render
from actors.observability.replica_families import add_drafter, add_link, add_rounds
from cluster.versions import VLLM, installed_version

logger = logging.getLogger("ray.serve.outrider.target")

FRESH_FOR_S = 1.0
ANSWER_WITHIN_S = 1.0

Ask = Callable[[], Awaitable[Mapping[str, Any]]]


class ReplicaMetrics:
    """model_name: as in vLLM's label.

    ask_rank_0: ``{"rounds": Verifier.metrics(), "link": LinkKeeper.status()}``; None without a drafter of ours.
    ask_drafter: Drafter.status(); None likewise.
    """

    def __init__(
        self,
        model_name: str,
        ask_rank_0: Ask | None,
        ask_drafter: Ask | None,
        *,
        registry: CollectorRegistry = REGISTRY,
        clock: Callable[[], float] = time.monotonic,
        answer_within_s: float = ANSWER_WITHIN_S,
    ) -> None:
        self._model_name = model_name
        self._ask_rank_0, self._ask_drafter = ask_rank_0, ask_drafter
        self._registry, self._clock, self._answer_within_s = registry, clock, answer_within_s
        self._asking: asyncio.Task[Mapping[str, Any]] | None = None
        self._rank_0: Mapping[str, Any] | None = None
        self._rank_0_at = 0.0
        self._versions = {
            "version": installed_version("outrider"),
            "vllm": installed_version(*VLLM),
            "ray": installed_version("ray"),
        }

    async def text(self) -> str:
        """The exposition. Never fails: what does not answer in time is left out or old, and says so."""
        families = Families({"model_name": self._model_name})
        families.add("outrider:build_info", 1, **self._versions)
        _, drafter = await asyncio.gather(self._refresh(), self._drafter())
        if self._rank_0 is not None:
            families.add("outrider:snapshot_age_seconds", self._clock() - self._rank_0_at)
            add_rounds(families, self._rank_0["rounds"])
            add_link(families, self._rank_0["link"])
        if self._ask_drafter is not None:
            add_drafter(families, drafter)
        # In a thread: tokens of every request pass through this event loop.
        return await asyncio.to_thread(render, self._registry, families)

    async def _refresh(self) -> None:
        """Ask rank 0, or wait for the answer to the scrape before, but not long."""
        if self._ask_rank_0 is None or (self._rank_0 is not None and self._clock() - self._rank_0_at < FRESH_FOR_S):
            return
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._ask_rank_0())
            self._asking.add_done_callback(self._answered)
        await asyncio.wait([self._asking], timeout=self._answer_within_s)

    def _answered(self, asking: asyncio.Task[Mapping[str, Any]]) -> None:
        self._asking = None
        if asking.cancelled():
            return
        if (error := asking.exception()) is not None:
            logger.warning("metrics: the verifier did not answer: %s", error)
            return
        self._rank_0, self._rank_0_at = asking.result(), self._clock()

    async def _drafter(self) -> Mapping[str, Any] | None:
        if self._ask_drafter is None:
            return None
        try:
            return await asyncio.wait_for(self._ask_drafter(), self._answer_within_s)
        except Exception as error:  # noqa: BLE001 - loading, stopped or gone: outrider:drafter_up tells
            logger.debug("metrics: the drafter did not answer: %s", error)
            return None
