"""Serve's processes go by a time that does not jump, and everything that they decide by it does."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time

import pytest

from outrider.actors.serve_seam.steady_time import SteadyTime
from tests.clock import Clock

SERVES = """
from outrider.actors.serve_seam.steady_time import STEADY, go_by_steady_time
go_by_steady_time()
from ray._common.utils import Timer
from ray.serve._private import autoscaling_state, deployment_state, proxy, replica, router
import time
time.time = lambda: 0.0
for module in (autoscaling_state, deployment_state, proxy, replica, router):
    assert module.time.time() > 1e9, module
assert Timer().time() > 1e9
"""


def test_it_begins_with_the_time_of_day_and_goes_on_by_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    day, monotonic = Clock(1000.0), Clock(50.0)
    monkeypatch.setattr(time, "time", day)
    monkeypatch.setattr(time, "monotonic", monotonic)
    steady = SteadyTime()
    assert steady.time() == 1000
    day.now = 1000 - 7200
    monotonic.now += 3
    assert steady.time() == 1003
    assert steady.sleep is time.sleep


def test_serve_goes_by_it() -> None:
    """In a process of its own: the modules stay changed."""
    subprocess.run([sys.executable, "-c", SERVES], check=True)


def test_a_controller_s_environment_names_it() -> None:
    from outrider.actors.serve_seam import PROXY_ENVIRONMENT
    from outrider.actors.serve_seam.steady_time import go_by_steady_time

    module, _, name = PROXY_ENVIRONMENT["RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH"].rpartition(".")
    assert getattr(importlib.import_module(module), name) is go_by_steady_time
