"""GetServerStatus while no replica runs: it says what is waited for, where that is known, and fails where it is not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.exceptions import DeploymentUnavailableError

from outrider.actors.observability.metrics import METRICS
from outrider.actors.serve_seam.broadcast import broadcast
from outrider.actors.serving.grpc.servicer import Ingress
from outrider.actors.serving.waiting import Group, WaitingRoom
from outrider.v1 import generation_pb2 as pb


class NoTarget:
    """As much of a DeploymentHandle as a status touches, without a replica behind it."""

    generate = SimpleNamespace(options=lambda **_: None)

    class status:
        @staticmethod
        async def remote() -> Any:
            raise DeploymentUnavailableError("nobody")


def asked(*groups: Group) -> pb.GetServerStatusResponse:
    async def ask() -> pb.GetServerStatusResponse:
        room = WaitingRoom(lambda: list(groups), {"Target": "3 GPUs"})
        target: Any = NoTarget()
        ingress = Ingress(target, "m", 4, broadcast=broadcast, waiting=room)
        await room.look()
        context: Any = SimpleNamespace(
            invocation_metadata=lambda: (),
            set_trailing_metadata=lambda _: None,
            set_code=lambda _: None,
            set_details=lambda _: None,
            code=lambda: None,
        )
        return await ingress.GetServerStatus(pb.GetServerStatusRequest(), context)

    try:
        return asyncio.run(ask())
    finally:
        METRICS.waiting = None


def test_what_is_waited_for_is_the_answer_where_nobody_can_give_another() -> None:
    status = asked(("Target", "a"))
    (waiting,) = status.waiting
    assert (waiting.deployment, waiting.replica, waiting.needs) == ("Target", "a", "3 GPUs")
    assert waiting.seconds >= 0
    assert status.model == "m"


def test_where_nothing_waits_a_status_that_nobody_answers_fails() -> None:
    with pytest.raises(RuntimeError, match="UNAVAILABLE: GetServerStatus: the target replica is not available"):
        asked()
