"""What autoscaling is told by the front doors, and what they are told of it.

The policy runs in Serve's controller, which hears of replicas from Serve and of requests that wait from the callers'
routers; a request that was refused left no trace there. So each ingress tells how many it and its proxies refused, and
hears in return what was decided, for its metrics. `Notes` is the logic; `ScalingBoard` is the named Ray actor that
holds them for an application, made by the controller's side and gone with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from outrider.actors.serving.answers import answer_within
from outrider.cluster.head import on_head
from outrider.cluster.placement import NAMESPACE

TELL_EVERY_S = 1.0
FORGET_AFTER_S = 15.0
"""An ingress that was silent for so long is gone."""

_ANSWER_WITHIN_S = 5.0

logger = logging.getLogger("ray.serve.outrider.ingress")


@dataclass(frozen=True)
class Scaling:
    """What was decided last, and what there is."""

    wanted: int
    running: int
    least: int
    most: int
    reason: str
    """See scaling_config.REASONS."""


class Notes:
    """Pure."""

    def __init__(self) -> None:
        self._refused: dict[str, tuple[float, int]] = {}
        """By ingress: when it told, and how many it has refused since it began."""

        self._since_look = 0
        self._scaling: Scaling | None = None

    def tell(self, ingress: str, refused: int, now_s: float) -> Scaling | None:
        """refused: since it began. What one has refused that was not known before counts from here on."""
        known = self._refused.get(ingress)
        if known is not None:
            self._since_look += max(0, refused - known[1])
        self._refused[ingress] = (now_s, refused)
        return self._scaling

    def look(self, scaling: Scaling | None, now_s: float) -> int | None:
        """Requests that were refused since the last look; None when no ingress has said anything lately. scaling: what
        ingresses are to hear from now on."""
        self._scaling = scaling
        self._refused = {name: told for name, told in self._refused.items() if now_s - told[0] < FORGET_AFTER_S}
        refused, self._since_look = self._since_look, 0
        return refused if self._refused else None


class ScalingBoard:
    """The Ray actor around Notes."""

    def __init__(self) -> None:
        self._notes = Notes()

    async def tell(self, ingress: str, refused: int) -> Scaling | None:
        return self._notes.tell(ingress, refused, time.monotonic())

    async def look(self, scaling: Scaling | None) -> int | None:
        return self._notes.look(scaling, time.monotonic())


def board_name(app_name: str) -> str:
    return f"ScalingBoard:{app_name}"


def make_board(app_name: str) -> Any:
    """Lives as long as somebody has what is returned, and no longer than the process that called this."""
    return (
        ray.remote(ScalingBoard)
        .options(
            name=board_name(app_name),
            namespace=NAMESPACE,
            get_if_exists=True,
            **on_head(),
            max_restarts=-1,
        )
        .remote()
    )


def find_board(app_name: str) -> Any:
    """Raises ValueError when there is none, RayError."""
    return ray.get_actor(board_name(app_name), namespace=NAMESPACE)


class Teller:
    """An ingress's side. `run` never ends by itself."""

    def __init__(
        self, app_name: str, ingress: str, refused: Callable[[], int], hear: Callable[[Scaling | None], None]
    ) -> None:
        """refused: how many were, since the ingress began. hear: what was decided; None when that is not known."""
        self._app_name, self._ingress, self._refused, self._hear = app_name, ingress, refused, hear
        self._board: Any = None

    async def run(self) -> None:
        while True:
            try:
                await self._tell()
            except (RayError, ValueError, TimeoutError) as error:
                logger.debug("no board of autoscaling: %s", error)
                self._board = None
                self._hear(None)
            await asyncio.sleep(TELL_EVERY_S)

    async def _tell(self) -> None:
        if self._board is None:  # in a thread: Ray waits for its GCS here
            self._board = await asyncio.to_thread(find_board, self._app_name)
        answer = self._board.tell.remote(self._ingress, self._refused())
        self._hear(await answer_within(answer, _ANSWER_WITHIN_S))
