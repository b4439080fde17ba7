"""The HTTP proxy's gate, with an ASGI app in the place of Serve's proxy, and what the ingress tells it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from outrider.actors.serve_seam.http_proxy import middlewares
from outrider.actors.serving.access.calls import GuardedHttp, HandOn
from outrider.actors.serving.gate import CAPACITY_METADATA, REFUSED
from outrider.actors.serving.http.app import TellCapacity
from outrider.actors.serving.http.browsers import CheckBrowsers
from outrider.actors.serving.http.door import GENERATIONS, HttpDoor
from outrider.actors.serving.http.error_faces import ErrorFaces
from outrider.cluster.limits import LIMITS_VARIABLE

CAPACITY = 2


class Server:
    """A generation waits until it is let go; the rest answers at once."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.started = 0
        self.capacity = CAPACITY
        self.told: list[int | None] = []
        """How many refusals each generation was told of."""

    async def generate(self, request: Request) -> Response:
        self.started += 1
        self.told.append(request.scope.get(REFUSED))
        await self.go.wait()
        return JSONResponse({"text": "done"})

    async def other(self, request: Request) -> Response:
        return Response(status_code=200)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        generations = [
            Route(before + end, self.generate, methods=["POST"]) for before in ("", "/b") for end in GENERATIONS
        ]
        others = [Route(path, self.other, methods=["GET", "POST"]) for path in ("/health", "/b/health", "/tokenize")]
        app = HttpDoor(TellCapacity(Starlette(routes=[*generations, *others]), lambda: self.capacity))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
            yield client

    async def until_started(self, count: int) -> None:
        while self.started < count:  # noqa: ASYNC110 - counted by the requests themselves
            await asyncio.sleep(0)


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.mark.parametrize("path", GENERATIONS)
async def test_beyond_what_there_is_room_for_generations_are_refused_and_only_those(server: Server, path: str) -> None:
    async with server.client() as client:
        assert (await client.get("/health")).headers[CAPACITY_METADATA] == str(CAPACITY)
        held = [asyncio.create_task(client.post(path, json={})) for _ in range(CAPACITY)]
        await server.until_started(CAPACITY)
        for generation in GENERATIONS:
            refused = await client.post(generation, json={})
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == 429
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/tokenize")).status_code == 200
        server.go.set()
        assert [(await answer).status_code for answer in held] == [200] * CAPACITY
        assert (await client.post(path, json={})).status_code == 200
    assert server.started == CAPACITY + 1


async def test_another_application_has_room_of_its_own(server: Server) -> None:
    async with server.client() as client:
        await client.get("/health")
        await client.get("/b/health")
        held = [asyncio.create_task(client.post(GENERATIONS[0], json={})) for _ in range(CAPACITY)]
        await server.until_started(CAPACITY)
        there = asyncio.create_task(client.post("/b" + GENERATIONS[0], json={}))
        await server.until_started(CAPACITY + 1)
        server.go.set()
        assert {(await answer).status_code for answer in (*held, there)} == {200}


async def test_a_client_that_leaves_gives_its_place_back(server: Server) -> None:
    async with server.client() as client:
        await client.get("/health")
        held = [asyncio.create_task(client.post(GENERATIONS[0], json={})) for _ in range(CAPACITY)]
        await server.until_started(CAPACITY)
        for request in held:
            request.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        server.go.set()
        assert (await client.post(GENERATIONS[0], json={})).status_code == 200


def test_serve_gets_a_list_of_middlewares(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve._private import default_impl, http_util

    def found() -> list[type]:
        with monkeypatch.context() as patch:
            patch.setattr(default_impl, "add_grpc_address", default_impl.add_grpc_address)
            patch.setattr(http_util, "uvicorn", http_util.uvicorn)
            return [middleware.cls for middleware in http_util.validate_http_proxy_callback_return(middlewares())]

    monkeypatch.delenv(LIMITS_VARIABLE, raising=False)
    assert found() == [HandOn, ErrorFaces, HttpDoor, GuardedHttp]  # the last is the first that a request meets
    monkeypatch.setenv(LIMITS_VARIABLE, "{}")
    assert found() == [HandOn, ErrorFaces, HttpDoor, CheckBrowsers, GuardedHttp], "told what hosts and origins are ours"


async def test_room_follows_what_the_ingress_tells_last(server: Server) -> None:
    """As many more as there are places in a replica that has come."""
    async with server.client() as client:
        await client.get("/health")
        held = [asyncio.create_task(client.post(GENERATIONS[0], json={})) for _ in range(CAPACITY)]
        await server.until_started(CAPACITY)
        assert (await client.post(GENERATIONS[0], json={})).status_code == 429
        server.capacity = 2 * CAPACITY
        await client.get("/health")
        held += [asyncio.create_task(client.post(GENERATIONS[0], json={})) for _ in range(CAPACITY)]
        await server.until_started(2 * CAPACITY)
        assert (await client.post(GENERATIONS[0], json={})).status_code == 429
        server.go.set()
        assert {(await answer).status_code for answer in held} == {200}


async def test_the_next_generation_that_is_let_in_tells_of_those_refused(server: Server) -> None:
    async with server.client() as client:
        await client.get("/health")
        held = [asyncio.create_task(client.post(GENERATIONS[0], json={})) for _ in range(CAPACITY)]
        await server.until_started(CAPACITY)
        for _ in range(5):
            assert (await client.post(GENERATIONS[1], json={})).status_code == 429
        server.go.set()
        await asyncio.gather(*held)
        forged = {REFUSED: "1000"}
        for _ in range(2):
            assert (await client.post(GENERATIONS[0], json={}, headers=forged)).status_code == 200
    assert server.told == [None] * CAPACITY + [5, None], "once, and what a client writes is no number of refusals"
