"""An abort ends a request wherever it is held: at a target, at the ingress that was asked, or at another one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.actors.replica_calls import GenerationRequest, sign
from outrider.actors.serve_seam.broadcast import broadcast, is_alone
from outrider.actors.serving.grpc import servicer
from outrider.actors.serving.grpc.servicer import Ingress
from outrider.v1 import generation_pb2 as pb


class Replicas:
    """As much of a DeploymentHandle as a broadcast touches, with the replicas in this process."""

    def __init__(self, *replicas: Any) -> None:
        self._replicas = replicas
        self.generate = SimpleNamespace(options=lambda **_: None)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        running = [SimpleNamespace(unique_id=f"replica-{number}") for number in range(len(replicas))]
        self._router = SimpleNamespace(
            _asyncio_router=SimpleNamespace(request_router=SimpleNamespace(curr_replicas=running))
        )

    def broadcast(self, signed_reply: str, method: str, args: tuple[Any, ...]) -> Any:
        assert signed_reply == "signed_reply"
        self.calls.append((method, args))
        calls = [
            SimpleNamespace(get_async=lambda one=one, number=number: sign(one, f"replica-{number}", method, args))
            for number, one in enumerate(self._replicas)
        ]

        async def known() -> list[Any]:
            return calls

        return SimpleNamespace(_fetch_replica_results_async=known)


class EmptyTarget:
    async def abort(self, request_id: str, caller: int | None) -> bool:
        return False


@pytest.fixture
def ingresses(monkeypatch: pytest.MonkeyPatch) -> list[Ingress]:
    targets: Any = Replicas(EmptyTarget(), EmptyTarget())
    made = [Ingress(targets, "m", 4, broadcast=broadcast) for _ in range(3)]
    monkeypatch.setattr(servicer, "_this_deployment", lambda: Replicas(*made))
    monkeypatch.setattr(servicer, "_this_replica", lambda: "replica-0")
    return made


async def abort(ingress: Ingress, request_id: str) -> bool:
    context = SimpleNamespace(
        invocation_metadata=lambda: (), set_trailing_metadata=lambda _: None, set_code=None, set_details=None
    )
    response = await ingress.AbortRequest(pb.AbortRequestRequest(request_id=request_id), context)  # type: ignore[arg-type]
    return response.aborted


@pytest.mark.parametrize("holder", [0, 1, 2])
def test_every_ingress_can_end_what_any_of_them_holds(ingresses: list[Ingress], holder: int) -> None:
    request = GenerationRequest(request_id="r", prompt_text="p")

    async def one_asked(asked: int) -> None:
        with ingresses[holder]._running.hold(request) as running:
            assert not await abort(ingresses[asked], "another")
            assert not running.aborted
            assert await abort(ingresses[asked], "r")
            assert running.aborted

    for asked in range(3):
        asyncio.run(one_asked(asked))


def test_an_only_ingress_does_not_ask_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    targets: Any = Replicas(EmptyTarget())
    ingress = Ingress(targets, "m", 4, broadcast=broadcast)
    deployment = Replicas(ingress)
    monkeypatch.setattr(servicer, "_this_deployment", lambda: deployment)
    monkeypatch.setattr(servicer, "_this_replica", lambda: "replica-0")
    assert not asyncio.run(abort(ingress, "r"))
    assert targets.calls == [("abort", ("r", None))]
    assert deployment.calls == []
    monkeypatch.setattr(servicer, "_this_replica", lambda: "being-replaced")
    assert not asyncio.run(abort(ingress, "r"))
    assert deployment.calls == [("abort_here", ("r", None))], "the only one that runs is another one"


def test_before_serve_has_said_who_runs_everybody_is_asked() -> None:
    unused, unheard = Replicas(), Replicas()
    unused._router = None  # type: ignore[assignment]
    unheard._router._asyncio_router.request_router = None
    for handle in (unused, unheard):
        assert not is_alone(handle, "replica-0")  # type: ignore[arg-type]


def test_a_scrape_of_one_ingress_tells_what_each_of_them_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        async def metrics_text(self) -> str:
            return "# HELP x Y.\n# TYPE x gauge\nx 2.0\n"

    class Silent:
        async def metrics_text(self) -> str:
            raise OSError

    metrics = SimpleNamespace(text=lambda: "# HELP x Y.\n# TYPE x gauge\nx 1.0\n")
    monkeypatch.setattr(servicer, "METRICS", metrics)
    targets: Any = Replicas(EmptyTarget())
    alone = Ingress(targets, "m", 4, broadcast=broadcast)
    assert asyncio.run(alone.all_metrics_text()) == metrics.text(), "nobody is asked"
    one = Ingress(targets, "m", 4, broadcast=broadcast, num_ingresses=3)
    monkeypatch.setattr(servicer, "_this_deployment", lambda: Replicas(one, Other(), Silent()))
    monkeypatch.setattr(servicer, "_this_replica", lambda: "replica-0")
    told = asyncio.run(one.all_metrics_text())
    assert told == '# HELP x Y.\n# TYPE x gauge\nx{ingress="replica-0"} 1.0\nx{ingress="replica-1"} 2.0\n'
