"""How exceptions end a call over gRPC and HTTP, and what is logged of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from ray.exceptions import ActorDiedError, ObjectLostError, RayTaskError
from ray.serve.exceptions import BackPressureError

from outrider.actors.replica_calls import ReplicaLost, RequestError, RequestIdInUse, SamplingFailed
from outrider.actors.serving.failures import (
    Refused,
    errors_become_status,
    failure_of,
)

SECRET = "my secret prompt"
FIELD = RequestError("sampling.n", SECRET, "send 1")


def remote(error: Exception) -> BaseException:
    """Return an error as a call of another actor raises it."""
    return RayTaskError("generate", "traceback", error).as_instanceof_cause()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("error", "code", "status", "kind", "sentence"),
    [
        (remote(FIELD), "INVALID_ARGUMENT", 400, "BadRequestError", f"sampling.n: {SECRET}; send 1"),
        (Refused(grpc.StatusCode.UNAUTHENTICATED, "no key"), "UNAUTHENTICATED", 401, "AuthenticationError", "no key"),
        (Refused(grpc.StatusCode.PERMISSION_DENIED, "no"), "PERMISSION_DENIED", 403, "PermissionDeniedError", "no"),
        (remote(TimeoutError()), "DEADLINE_EXCEEDED", 408, "RequestTimeoutError", "call r was aborted when"),
        (remote(RequestIdInUse("r")), "ALREADY_EXISTS", 409, "ConflictError", "request_id: 'r' is the id of a running"),
        (BackPressureError(1, 1), "RESOURCE_EXHAUSTED", 429, "RateLimitError", "the queue is full"),
        (remote(SamplingFailed("r")), "INTERNAL", 500, "InternalServerError", "request r: the model's logits"),
        (remote(ValueError(SECRET)), "INTERNAL", 500, "InternalServerError", "call r failed inside the server"),
        (RayTaskError("f", SECRET, None), "INTERNAL", 500, "InternalServerError", "call r failed inside"),
        (ActorDiedError(), "UNAVAILABLE", 503, "ServiceUnavailableError", "call r: the target replica is not"),
        (remote(ReplicaLost("a", "b")), "UNAVAILABLE", 503, "ServiceUnavailableError", "call r: the target replica is"),
        (ObjectLostError("0", None, ""), "UNAVAILABLE", 503, "ServiceUnavailableError", "call r: the target replica"),
        (MemoryError(), "UNAVAILABLE", 503, "ServiceUnavailableError", "call r: the target replica is not available"),
    ],
)
def test_an_exception_is_one_failure_on_both_apis(
    error: Any, code: str, status: int, kind: str, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    failure = failure_of(error, "call r")
    assert (failure.code.name, failure.http_status, failure.body()["error"]["type"]) == (code, status, kind)
    assert failure.message.startswith(sentence)
    assert failure.field == ("sampling.n" if status == 400 else None)
    assert SECRET not in caplog.text
    assert ("call r" in caplog.text) == (status >= 500), "the log has what the client is not told"


def test_the_status_is_set_and_serve_gets_an_exception_without_the_clients_words() -> None:
    told: dict[str, Any] = {}
    context: Any = SimpleNamespace(
        set_code=lambda code: told.update(code=code), set_details=lambda text: told.update(text=text)
    )
    with pytest.raises(RuntimeError) as raised, errors_become_status(context, "Generate"):
        raise FIELD
    assert told == {"code": grpc.StatusCode.INVALID_ARGUMENT, "text": str(FIELD)}
    assert str(raised.value) == "INVALID_ARGUMENT"
    assert raised.value.__suppress_context__
