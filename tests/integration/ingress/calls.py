"""Waiting for the stand-in target, and what a failed call says."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from outrider.deploy.client.sync_client import OutriderError
from tests.integration.ingress.stand_in_target import HANG_GUARD_S


def wait_for(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + HANG_GUARD_S
    while not condition():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.005)


def failure(call: Callable[[], Any]) -> OutriderError:
    with pytest.raises(OutriderError) as caught:
        call()
    return caught.value
