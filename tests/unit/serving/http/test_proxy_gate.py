"""The HTTP proxy's gate, with an ASGI app in the place of Serve's proxy, and what the ingress tells it."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from ray.serve._private.http_util import MessageQueue
from ray.serve._private.proxy import HTTPProxy
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from outrider.actors.serve_seam.http_proxy import DropServesOwn, middlewares
from outrider.actors.serving.access.calls import GuardedHttp, HandOn
from outrider.actors.serving.access.guard import HTTP_CALLS, PAGE
from outrider.actors.serving.gate import CAPACITY_METADATA, REFUSED, Doors, Routes, doors
from outrider.actors.serving.http import door
from outrider.actors.serving.http.app import TellCapacity
from outrider.actors.serving.http.browsers import CheckBrowsers
from outrider.actors.serving.http.door import SHORT_BYTES, HttpDoor
from outrider.actors.serving.http.error_faces import ErrorFaces
from outrider.actors.serving.lanes import Lane
from outrider.cluster.limits import LIMITS_VARIABLE, LimitsConfig

CAPACITY = 2
GENERATIONS = [path for path, need in HTTP_CALLS.items() if need.generates]


LEFT = {"type": "http.disconnect"}


def scope_of(path: str, method: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> Any:
    return {"type": "http", "path": path, "method": method, "headers": list(headers), "client": ("10.0.0.1", 1)}


async def never(*_: Any) -> None:
    raise AssertionError("was called")


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
async def test_what_only_ends_as_a_generation_does_takes_no_place(server: Server, path: str) -> None:
    async with server.client() as client:
        await client.get("/health")
        held = [asyncio.create_task(client.post(path, json={})) for _ in range(CAPACITY)]
        await server.until_started(CAPACITY)
        elsewhere = PAGE + path.removeprefix("/")
        assert (await client.post(elsewhere, json={})).status_code == 404, "where the page's files are"
        assert (await client.post(elsewhere, content=b" " * (SHORT_BYTES + 1))).status_code == 413
        assert (await client.put(path, json={})).status_code == 405
        server.go.set()
        await asyncio.gather(*held)


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


async def test_another_application_has_room_of_its_own(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors(), "routes", Routes(by_name=str, by_path=lambda path: path[:2]))
    async with server.client() as client:
        await client.get("/health")
        await client.get("/b/health")
        held = [asyncio.create_task(client.post(GENERATIONS[0], json={})) for _ in range(CAPACITY)]
        await server.until_started(CAPACITY)
        there = asyncio.create_task(client.post("/b" + GENERATIONS[0], json={}))
        await server.until_started(CAPACITY + 1)
        server.go.set()
        assert {(await answer).status_code for answer in (*held, there)} == {200}


async def test_a_path_that_is_made_up_is_no_other_application(server: Server) -> None:
    """Serve sends all of them to whatever is mounted at /."""
    async with server.client() as client:
        await client.get("/health")
        held = [asyncio.create_task(client.post(GENERATIONS[0], json={})) for _ in range(CAPACITY)]
        await server.until_started(CAPACITY)
        for made_up in ("/b", "/made/up"):
            assert (await client.post(made_up + GENERATIONS[0], json={})).status_code == 429
        server.go.set()
        assert {(await answer).status_code for answer in held} == {200}


async def test_a_path_that_leads_nowhere_takes_no_room_but_a_turn(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Doors(LimitsConfig(max_control_calls_per_s=1, control_timeout_s=0.01))
    here.routes = Routes(by_name=str, by_path=lambda path: None)
    monkeypatch.setattr(door, "doors", lambda: here)
    async with server.client() as client:
        statuses = [(await client.post("/nowhere" + GENERATIONS[0], json={})).status_code for _ in range(10)]
    assert statuses[0] == 404
    assert 429 in statuses


async def test_probes_are_for_health_whatever_asks_for_status(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Doors(LimitsConfig(max_control_calls_per_s=1, control_timeout_s=0.01))
    monkeypatch.setattr(door, "doors", lambda: here)
    for probe in ("/health", "/ping", "/livez", "/readyz", "/-/healthz"):
        here.health = Lane("for health", 1, patience_s=0)
        async with server.client() as client:
            statuses = {(await client.get("/", headers={})).status_code for _ in range(10)}
            assert 429 in statuses
            assert (await client.get(probe)).status_code in (200, 404), probe


@pytest.mark.parametrize(("path", "method"), [("/ping", "POST"), ("/health", "POST"), ("/", "GET"), ("/", "DELETE")])
async def test_a_body_that_says_nothing_is_not_waited_for(path: str, method: str) -> None:
    """It comes without an end."""
    came, got = 0, []

    async def receive() -> Any:
        nonlocal came
        came += 1
        return {"type": "http.request", "body": b"x" * 65536, "more_body": came < 100} if came <= 100 else LEFT

    async def app(scope: Any, receive: Any, send: Any) -> None:
        got.append(await receive())
        got.append(await receive())
        assert came == 0
        assert await receive() == LEFT

    await HttpDoor(app)(scope_of(path, method), receive, never)
    assert [message["body"] for message in got] == [b"", b""]
    assert [message["more_body"] for message in got] == [True, False]


@pytest.mark.parametrize(("path", "most"), [("/v1/load_lora_adapter", SHORT_BYTES), ("/tokenize", 8 << 20)])
async def test_what_is_no_prompt_is_short(path: str, most: int) -> None:
    sent: list[Any] = []
    announced = [(b"content-length", str(most + 1).encode())]

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return LEFT

    await HttpDoor(never)(scope_of(path, "POST", announced), receive, send)
    assert sent[0]["status"] == 413
    assert f"longer than {most} bytes" in sent[1]["body"].decode()


async def test_a_body_is_gone_from_the_proxy_when_the_ingress_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's own task reads it, and keeps the last message it got until the answer is over."""
    queue, left, answered = MessageQueue(), asyncio.Event(), asyncio.Event()

    async def receive() -> Any:
        if not answered.is_set():
            answered.set()
            return {"type": "http.request", "body": bytes(8 << 20), "more_body": False}
        await left.wait()
        return LEFT

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reading = asyncio.ensure_future(HTTPProxy.proxy_asgi_receive(None, receive, queue))
        await queue.wait_for_message()
        fetched = queue.get_messages_nowait()
        assert [len(message["body"]) for message in fetched] == [8 << 20, 0]
        del fetched
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
        assert kept < 1 << 20
        left.set()
        await reading

    tracemalloc.start()
    try:
        await HttpDoor(app)(scope_of("/v1/completions", "POST"), receive, never)
    finally:
        tracemalloc.stop()


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
    first = [HandOn, DropServesOwn, ErrorFaces, HttpDoor]  # the last is the first that a request meets
    assert found() == [*first, GuardedHttp]
    monkeypatch.setenv(LIMITS_VARIABLE, "{}")
    assert found() == [*first, CheckBrowsers, GuardedHttp], "told what hosts and origins are ours"


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
