"""How what goes wrong behind the ingress is told to the client."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterator

import grpc
import pytest
from ray.exceptions import GetTimeoutError
from ray.serve.exceptions import RequestCancelledError, gRPCStatusError

from outrider.actors.replica_calls import RequestError
from outrider.actors.request_checks import check_request_id
from outrider.actors.serve_seam.leans_on import SERVE_LOGGER
from outrider.actors.serving.failures import (
    REQUEST_ID_METADATA,
    failure_of,
    leave_out_what_is_told,
    leave_out_who_left,
)
from tests.unit.proxy_servers import proxy_servers


@pytest.mark.parametrize("request_id", ["\u2603", "a\n", "x" * 1_000_000])
def test_an_unusable_request_id_does_not_travel_in_metadata(request_id: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_request_id(request_id)
    failure = failure_of(caught.value, "request", request_id)
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert REQUEST_ID_METADATA not in dict(failure.trailing_metadata())
    assert sum(len(value) for _, value in failure.trailing_metadata()) < 1000


def test_any_other_refusal_carries_the_request_s_id() -> None:
    failure = failure_of(RequestError("sampling.n", "0 is none", "send 1"), "request r", "r")
    assert dict(failure.trailing_metadata())[REQUEST_ID_METADATA] == "r"


@pytest.fixture
def serves_log() -> Iterator[logging.Logger]:
    log = logging.getLogger(SERVE_LOGGER)
    before = list(log.filters)
    leave_out_what_is_told()
    yield log
    log.filters[:] = before


def logged(log: logging.Logger, caplog: pytest.LogCaptureFixture, error: BaseException) -> bool:
    """As Serve's replica logs what a call raised."""
    caplog.clear()
    log.addHandler(caplog.handler)
    try:
        raise error
    except BaseException:
        log.exception("Request failed.")
    finally:
        log.removeHandler(caplog.handler)
    return bool(caplog.records)


def test_the_log_has_no_traceback_of_what_a_client_is_told(serves_log, caplog) -> None:
    told = RequestError("sampling.n", "0 is none", "send 1")
    assert not logged(serves_log, caplog, told)
    assert not logged(serves_log, caplog, gRPCStatusError(told, grpc.StatusCode.INVALID_ARGUMENT, "sampling.n"))
    assert not logged(serves_log, caplog, TimeoutError())
    assert logged(serves_log, caplog, RuntimeError("a fault of ours"))
    assert logged(serves_log, caplog, GetTimeoutError("another"))
    serves_log.error("without an exception")


async def test_nor_has_a_proxys(monkeypatch, caplog) -> None:
    """Which would be some 4 KB for each call that is refused."""
    log = logging.getLogger(SERVE_LOGGER)
    monkeypatch.setattr(log, "filters", [])
    async with proxy_servers(monkeypatch):
        assert not logged(log, caplog, gRPCStatusError(ValueError(), grpc.StatusCode.INVALID_ARGUMENT, "sampling.n"))
        assert logged(log, caplog, RuntimeError("a fault of ours"))


@pytest.mark.parametrize(("error", "is_logged"), [(RequestCancelledError("r"), False), (ValueError("ours"), True)])
async def test_a_proxy_logs_no_task_that_a_client_left_behind(caplog, error: Exception, is_logged: bool) -> None:
    async def left() -> None:
        raise error

    leave_out_who_left()
    task = asyncio.create_task(left())
    await asyncio.wait([task])
    del task
    gc.collect()
    assert any("never retrieved" in record.message for record in caplog.records) == is_logged
