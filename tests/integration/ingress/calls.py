"""Waiting for the stand-in target, and what a failed call says."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from outrider.actors.serving.failures import STATUS_DETAILS_METADATA
from outrider.deploy.client.sync_client import OutriderError
from tests.integration.ingress.stand_in_target import HANG_GUARD_S


def wait_for(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + HANG_GUARD_S
    while not condition():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.005)


def reason(error: grpc.RpcError) -> str:
    """The stable name of what went wrong, from the error's google.rpc details."""
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())[STATUS_DETAILS_METADATA])
    assert (status.code, status.message) == (error.code().value[0], error.details())
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info.reason


def failure(call: Callable[[], Any]) -> OutriderError:
    with pytest.raises(OutriderError) as caught:
        call()
    return caught.value
