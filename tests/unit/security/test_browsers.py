"""Other people's pages: by the name they call this server, by where they come from, and by what they may send."""

from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from outrider.actors.serving.http.adapters import add_adapter_routes
from outrider.actors.serving.http.app import build_http_app
from outrider.actors.serving.http.body import read_json_object
from outrider.actors.serving.http.browsers import TAKE_JSON, CheckBrowsers
from outrider.actors.serving.http.routes import HttpContext
from outrider.actors.serving.openai.errors import HttpError
from outrider.cluster.limits import LimitsConfig


async def generate(request: Request) -> Response:
    try:
        return JSONResponse(await read_json_object(request, LimitsConfig()))
    except HttpError as error:
        return error.failure.response()


async def send(headers: dict[str, str], method: str = "POST", content: bytes = b"{}", **limits: object) -> int:
    app = CheckBrowsers(Starlette(routes=[Route("/", generate, methods=["GET", "POST"])]), LimitsConfig(**limits))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as client:
        request = client.build_request(method, "/", content=content, headers=headers)
        return (await client.send(request)).status_code


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "10.1.2.3", "[::1]:8000", "::1", "localhost:8000", "gpu-7", "a.localhost", "Node.Local:80",
     "outrider.default.svc.cluster.local:8000", "box.internal."],
)  # fmt: skip
async def test_names_that_no_stranger_can_have(host: str) -> None:
    assert await send({**JSON, "host": host}) == 200


@pytest.mark.parametrize(
    "host",
    ["rebound.example.com", "rebound.example.com:8000", "127.0.0.1.nip.io", "local.evil.com",
     "outrider-serve-svc.outrider:8000", "outrider-serve-svc.outrider.svc"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_rebound_name_reads_and_asks_nothing(host: str, method: str) -> None:
    assert await send({**JSON, "host": host, "origin": f"http://{host}"}, method) == 421
    assert await send({**JSON, "host": host}, method) == 421


async def test_names_that_are_configured() -> None:
    headers = {**JSON, "host": "chat.example.com"}
    assert await send(headers, allowed_hosts=["chat.example.com"]) == 200
    assert await send(headers, allowed_hosts=["*.example.com"]) == 200
    assert await send(headers, allowed_hosts=["*"]) == 200
    assert await send(headers, allowed_hosts=["example.com"]) == 421


@pytest.mark.parametrize("origin", ["http://evil.com", "null", "https://127.0.0.1:9", "http://localhost:8000"])
async def test_pages_of_others_send_nothing(origin: str) -> None:
    assert await send({**JSON, "origin": origin}) == 403
    assert await send({**JSON, "origin": origin}, allowed_origins=[origin]) == 200
    assert await send({**JSON, "origin": origin}, allowed_origins=["*"]) == 200


async def test_our_own_page_may() -> None:
    assert await send({**JSON, "origin": "http://127.0.0.1:8000"}) == 200
    assert await send({**JSON, "origin": "https://localhost:8443", "host": "localhost:8443"}) == 200


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "text/x+json"])
async def test_what_a_page_can_post_without_asking_is_no_request(kind: str | None) -> None:
    """A blob without a type, above all."""
    assert await send({} if kind is None else {"content-type": kind}) == 415


def test_every_path_that_takes_json_is_looked_at_in_the_proxy() -> None:
    """All routes for POST are, but for what has no body: health, and responses that nobody stored."""
    context = HttpContext(Nothing(), "tiny", 4, 1, Nothing(), Nothing())  # type: ignore[arg-type]
    app = build_http_app(context)
    add_adapter_routes(app, Nothing(), LimitsConfig())  # type: ignore[arg-type]
    posted = {route.path for route in app.routes if "POST" in getattr(route, "methods", ())}
    assert posted - {"/ping", "/v1/responses/{rest:path}"} == set(TAKE_JSON)


class Nothing:
    def __getattr__(self, name: str) -> Nothing:
        return Nothing()
