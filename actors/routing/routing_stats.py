"""What a target replica tells the routers about itself, every couple of seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

_LINK_TIMEOUT_S = 1.0
"""An engine in the middle of a long step answers late; what it said last is good enough."""


class RoutingStats:
    """load: ``running`` and ``waiting`` requests. kv_cache_tokens: what the KV cache holds. link_is_up: asks the
    engine's rank 0; None without a drafter. check_health: raises when the engine is dead.
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
        """Plain values, few of them: Serve sends them to every router when they change."""
        try:
            await self._check_health()
        except Exception:  # noqa: BLE001 - a dead engine, of whatever; Serve's health check reports it
            return {"serving": False}
        if self._link_is_up is not None:
            with suppress(TimeoutError):
                self._speculation_up = await asyncio.wait_for(self._link_is_up(), _LINK_TIMEOUT_S)
        load = self._load()
        return {
            "serving": True,
            "requests": load["running"] + load["waiting"],
            "kv_cache_tokens": self._kv_cache_tokens,
            "speculation_up": self._speculation_up,
        }
