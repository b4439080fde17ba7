"""What a client reads when Ray or Serve fails: UNAVAILABLE and an id, never their words, which name nodes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from ray import exceptions
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from outrider.actors.serving.failures import REQUEST_ID_METADATA, failure_of, made_by_serve
from outrider.actors.serving.grpc.door import proxied_call
from outrider.actors.serving.http.error_faces import ErrorFaces
from outrider.v1 import generation_pb2 as pb

SECRETS = "10.1.2.3:6379 node 5f2c9ab0d1e2 /tmp/ray/session_2026"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    "error",
    [
        exceptions.OutOfMemoryError(SECRETS),
        exceptions.OutOfDiskError(SECRETS),
        exceptions.LocalRayletDiedError(SECRETS),
        exceptions.RaySystemError(SECRETS),
        exceptions.RayChannelError(SECRETS),
        exceptions.NodeDiedError(SECRETS),
        exceptions.RayTaskError("generate", SECRETS, exceptions.OutOfMemoryError(SECRETS)),
        MemoryError(SECRETS),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_clusters_failures_are_unavailable_with_the_requests_id(error: Exception) -> None:
    failure = failure_of(error, "Generate", "r-1")
    assert (failure.code, failure.reason, failure.request_id) == (UNAVAILABLE, "REPLICA_UNAVAILABLE", "r-1")
    assert not set(SECRETS.split()) & set(str(failure.status()).split())


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (grpc.StatusCode.INTERNAL, UNAVAILABLE),
        (grpc.StatusCode.UNKNOWN, UNAVAILABLE),
        (UNAVAILABLE, UNAVAILABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.DEADLINE_EXCEEDED),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_serves_own_words_are_replaced(code: grpc.StatusCode, told: grpc.StatusCode) -> None:
    failure = made_by_serve(code, f"The actor died: {SECRETS}", "r-2")
    assert failure is not None
    assert failure.code is told
    assert "10.1.2.3" not in failure.packed() + str(failure.status())
    assert dict(failure.trailing_metadata())[REQUEST_ID_METADATA] == "r-2"


def test_what_the_ingress_has_said_stays() -> None:
    assert made_by_serve(grpc.StatusCode.INTERNAL, failure_of(ValueError(), "Generate", "r").packed(), "r") is None
    assert made_by_serve(grpc.StatusCode.NOT_FOUND, "Application 'x' not found.", "r") is None


class Context:
    """Of a call that Serve has let fail."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details, self._trailing = code, details, (("request_id", "serves-own"),)

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailing

    def invocation_metadata(self) -> Any:
        return ()

    def peer(self) -> str:
        return "ipv4:10.0.0.1:1"

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def set_trailing_metadata(self, trailing: Any) -> None:
        self._trailing = trailing


@pytest.mark.parametrize("sent", ["mine", None, "Öl", "a b"])
async def test_a_call_whose_ingress_died_ends_as_unavailable_with_an_id(sent: str | None) -> None:
    context = Context(grpc.StatusCode.INTERNAL, f"The actor died: {SECRETS}")

    async def lost(request: Any, _: Any) -> bytes:
        return b""

    async def requests() -> AsyncIterator[pb.GenerateRequest]:
        yield pb.GenerateRequest(request_id=sent)

    await proxied_call("/outrider.v1.GenerationService/Generate", lost, streams=False)(requests(), context)
    assert context.code() is UNAVAILABLE
    assert "10.1.2.3" not in context.details() + str(context.trailing_metadata())
    trailing = dict(context.trailing_metadata())
    assert trailing["request_id"] == "serves-own"
    if sent == "mine":
        assert trailing[REQUEST_ID_METADATA] == "mine"
    else:
        assert re.fullmatch("[0-9a-f]{32}", trailing[REQUEST_ID_METADATA]), "one that a header can hold"


@pytest.fixture
def http() -> TestClient:
    async def nothing(scope: Any, receive: Any, send: Any) -> None:
        """As Serve's proxy when an ingress dies: it sends nothing."""

    routes = [
        Route("/lost", lambda request: PlainTextResponse(SECRETS, 500)),
        Route("/gone", lambda request: PlainTextResponse(SECRETS, 503)),
        Route("/full", lambda request: PlainTextResponse(SECRETS, 429)),
        Route("/own", lambda request: JSONResponse({"error": "own"}, 500)),
        Route("/fine", lambda request: PlainTextResponse("text")),
        Route("/-/healthz", lambda request: PlainTextResponse("not well", 503)),
    ]
    app = Starlette(routes=routes)

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        raise UnicodeDecodeError("utf-8", SECRETS.encode(), 0, 1, SECRETS)

    async def either(scope: Any, receive: Any, send: Any) -> None:
        await {"/nothing": nothing, "/fails": fails}.get(Request(scope).url.path, app)(scope, receive, send)

    return TestClient(ErrorFaces(either))


@pytest.mark.parametrize(
    ("path", "status"), [("/lost", 503), ("/gone", 503), ("/nothing", 503), ("/full", 429), ("/fails", 500)]
)
def test_http_has_the_same_face(http: TestClient, path: str, status: int) -> None:
    answer = http.get(path, headers={"x-request-id": "mine"})
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == status
    assert "10.1.2.3" not in answer.text
    assert answer.headers["x-request-id"] == "mine"
    assert http.get(path).headers["x-request-id"] not in ("", "mine")


@pytest.mark.parametrize(("path", "status"), [("/own", 500), ("/fine", 200), ("/-/healthz", 503)])
def test_what_is_not_serves_failure_passes(http: TestClient, path: str, status: int) -> None:
    answer = http.get(path)
    assert answer.status_code == status
    assert "x-request-id" not in answer.headers
