"""Unit tests run in a random order, each within 30 s.

``UNIT_ORDER_SEED=n`` repeats the order that a run printed at its top; 0 keeps the order of the files.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

UNIT_TIMEOUT_S = 30.0
"""Limit of one test without its fixtures, unless it is marked with another or as exhaustive."""

# In the environment, so that the workers of pytest-xdist, which must all collect in one order, have it too.
SEED = int(os.environ.setdefault("UNIT_ORDER_SEED", str(random.SystemRandom().randrange(1, 1_000_000))))

FOLDER = Path(__file__).parent


def pytest_report_header() -> str:
    return f"unit tests in random order: UNIT_ORDER_SEED={SEED}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffles modules, and tests within each. Tests of other folders keep their places."""
    places = [place for place, item in enumerate(items) if FOLDER in item.path.parents]
    modules: dict[Path, list[pytest.Item]] = {}
    for place in places:
        item = items[place]
        if item.get_closest_marker("timeout") is None and item.get_closest_marker("exhaustive") is None:
            item.add_marker(pytest.mark.timeout(UNIT_TIMEOUT_S, func_only=True))
        modules.setdefault(item.path, []).append(item)
    groups = list(modules.values())
    if SEED:
        dice = random.Random(SEED)
        dice.shuffle(groups)
        for group in groups:
            dice.shuffle(group)
    for place, item in zip(places, (item for group in groups for item in group), strict=True):
        items[place] = item


@pytest.fixture
def taken_port() -> Iterator[int]:
    """Listens on a port for as long as the test."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]
