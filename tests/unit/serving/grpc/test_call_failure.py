"""Failed calls as clients and programs get to read them."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from outrider.actors.replica_calls import RequestError, RequestIdInUse, SamplingFailed
from outrider.actors.serving.failures import (
    ERROR_DOMAIN,
    REQUEST_ID_METADATA,
    STATUS_DETAILS_METADATA,
    CallFailure,
    UnknownService,
    failure_of,
    sentence_of,
    trailing_of,
)

CODE = grpc.StatusCode


def details(trailing: list[tuple[str, str | bytes]]) -> tuple[status_pb2.Status, dict[str, object]]:
    status = status_pb2.Status.FromString(dict(trailing)[STATUS_DETAILS_METADATA])  # type: ignore[arg-type]
    found = {}
    for packed in status.details:
        kind = getattr(error_details_pb2, packed.type_url.rpartition(".")[2])
        found[kind.__name__] = message = kind()
        assert packed.Unpack(message)
    return status, found


def test_a_refused_field_is_named_for_programs() -> None:
    failure = failure_of(RequestError("sampling.top_p", "2 is out of range", "send 1"), "Generate", "r-1")
    status, found = details(failure.trailing_metadata())
    assert (status.code, status.message) == (3, "sampling.top_p: 2 is out of range; send 1")
    (violation,) = found["BadRequest"].field_violations
    assert (violation.field, violation.description) == ("sampling.top_p", "2 is out of range; send 1")
    info = found["ErrorInfo"]
    assert (info.reason, info.domain, info.metadata["request_id"]) == ("INVALID_REQUEST", ERROR_DOMAIN, "r-1")
    assert "RetryInfo" not in found


@pytest.mark.parametrize(
    ("error", "code", "reason", "retry"),
    [
        (RequestIdInUse("r-1"), CODE.ALREADY_EXISTS, "REQUEST_ID_IN_USE", False),
        (TimeoutError(), CODE.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", False),
        (ConnectionError("gone"), CODE.UNAVAILABLE, "REPLICA_UNAVAILABLE", True),
        (SamplingFailed("r-1"), CODE.INTERNAL, "SAMPLING_FAILED", False),
        (UnknownService("x"), CODE.NOT_FOUND, "UNKNOWN_SERVICE", False),
        (KeyError("a secret of the inside"), CODE.INTERNAL, "INTERNAL", False),
    ],
)
def test_every_kind_of_failure_has_a_reason_of_its_own(
    error: Exception, code: grpc.StatusCode, reason: str, retry: bool
) -> None:
    failure = failure_of(error, "request r-1", "r-1")
    assert (failure.code, failure.reason) == (code, reason)
    _, found = details(failure.trailing_metadata())
    assert ("RetryInfo" in found) is retry
    assert "secret" not in failure.packed()
    assert b"secret" not in failure.status().SerializeToString()


def test_what_is_packed_is_found_again() -> None:
    failure = CallFailure(CODE.INVALID_ARGUMENT, "text: grün; rot", "INVALID_REQUEST", {"text": "grün; rot"}, "r-9")
    packed = failure.packed()
    assert sentence_of(packed) == "text: grün; rot"
    assert trailing_of(failure.code, packed) == failure.trailing_metadata()
    assert dict(trailing_of(failure.code, packed))[REQUEST_ID_METADATA] == "r-9"


@pytest.mark.parametrize("text", ["", "Request dropped due to backpressure", "cut \x1eCgUKA1", "odd \x1e!!!", "x\x1e"])
def test_what_serve_says_itself_gets_details_too(text: str) -> None:
    status, found = details(trailing_of(CODE.RESOURCE_EXHAUSTED, text))
    assert status.message == sentence_of(text) == text.partition("\x1e")[0]
    assert found["ErrorInfo"].reason == "QUEUE_FULL"
    assert found["RetryInfo"].retry_delay.seconds > 0


def test_a_long_sentence_leaves_room_for_the_details() -> None:
    failure = CallFailure(CODE.INVALID_ARGUMENT, "x" * 5000, "INVALID_REQUEST", {"text": "y" * 5000}, "r" * 128)
    assert len(failure.packed()) < 4096, "Serve cuts what is longer"
    assert "BadRequest" in details(trailing_of(failure.code, failure.packed()))[1]
