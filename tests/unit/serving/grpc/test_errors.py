"""How what goes wrong behind the ingress is told to the client."""

from __future__ import annotations

import grpc
import pytest

from outrider.actors.replica_calls import RequestError
from outrider.actors.request_checks import check_request_id
from outrider.actors.serving.failures import REQUEST_ID_METADATA, failure_of


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
