"""Room for generations follows the replicas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outrider.actors.serving.capacity import Capacity

TARGET: Any = SimpleNamespace(app_name="outrider", deployment_name="Target")


def test_a_fixed_number_of_replicas_has_fixed_room() -> None:
    assert Capacity(64, 256, 3).now(TARGET) == 3 * 64 + 256


def test_room_follows_the_replicas_and_never_falls_below_the_least() -> None:
    running = 0
    capacity = Capacity(64, 256, 2, lambda handle: running)
    assert capacity.now(TARGET) == 2 * 64 + 256, "before any is known, and while one is replaced"
    running = 4
    assert capacity.now(TARGET) == 4 * 64 + 256
    running = 1
    assert capacity.now(TARGET) == 2 * 64 + 256
