"""Waiting for the stand-in target, and what a failed call says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outrider.deploy.client.sync_client import OutriderError
from tests.integration.ingress.stand_in_target import HANG_GUARD_S
from tests.support.cluster.serving import wait_until


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for what the stand-in target does, which has no deadline of its own."""
    wait_until(condition, HANG_GUARD_S, "the stand-in target", every_s=0.005)


def failure(call: Callable[[], Any]) -> OutriderError:
    with pytest.raises(OutriderError) as caught:
        call()
    return caught.value
