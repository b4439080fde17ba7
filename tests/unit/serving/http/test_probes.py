"""HEAD, which load balancers probe with, over the real app."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider.actors.replica_calls import ReplicaReply
from outrider.actors.serving.http.app import ASSETS_PATH, build_http_app
from outrider.actors.serving.http.routes import HttpContext


class Nothing:
    def __getattr__(self, name: str) -> Nothing:
        return Nothing()


def app(error: str | None = None) -> Any:
    """error: of the one replica, when it is asked for its health."""

    async def broadcast(*_: Any, **__: Any) -> list[ReplicaReply]:
        return [ReplicaReply("r", error=error)]

    nothing: Any = Nothing()
    return build_http_app(HttpContext(nothing, "tiny", 4, 1, nothing, broadcast))


@pytest.mark.parametrize("error", [None, "its engine is dead"])
def test_a_probe_by_head_is_answered_as_by_get_without_a_body(error: str | None) -> None:
    client = TestClient(app(error))
    for path in ("/health", "/ping", "/readyz", "/livez", "/version", "/", f"{ASSETS_PATH}/page.js"):
        got, head = client.get(path), client.head(path)
        assert got.status_code == (503 if error and path in ("/health", "/ping", "/readyz") else 200)
        assert (head.status_code, head.content, head.headers) == (got.status_code, b"", got.headers), path


def test_whatever_can_be_read_answers_head() -> None:
    methods = [route.methods for route in app().routes]
    assert all(("HEAD" in taken) == ("GET" in taken) for taken in methods)
