"""An engine that stands still is told from one that is slow, idle or new."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from outrider.actors.vllm_adapter import target_engine
from outrider.actors.vllm_adapter.step_watchdog import MEDIANS, StepWatchdog
from outrider.actors.vllm_adapter.target_engine import EngineLoad, TargetEngine


class Watched:
    """A watch with a clock that the test turns."""

    def __init__(self, least_s: float) -> None:
        self.now = 1000.0
        self.watch = StepWatchdog(least_s, tick_s=1.0, clock=lambda: self.now)

    def steps(self, number: int, each_s: float) -> None:
        for _ in range(number):
            self.now += each_s
            self.watch.stepped()

    def ticks(self, number: int, busy: bool = True) -> list[str | None]:
        return [self.watch.tick(busy) for _ in range(number)]


def test_a_step_that_does_not_end_is_told_with_how_long_it_has_been() -> None:
    watched = Watched(30.0)
    watched.steps(10, 0.05)
    told = watched.ticks(31)
    assert told[:30] == [None] * 30
    assert told[30] is not None
    assert "31 s" in told[30]
    assert "0.05 s" in told[30]


def test_steps_that_are_slow_all_the_time_may_be_slow() -> None:
    watched = Watched(30.0)
    watched.steps(10, 4.0)
    assert watched.ticks(int(MEDIANS * 4)) == [None] * int(MEDIANS * 4)
    assert watched.ticks(1) != [None]


def test_each_step_begins_anew_and_an_idle_engine_need_not_step() -> None:
    watched = Watched(5.0)
    for _ in range(2):
        watched.steps(1, 0.1)
        assert watched.ticks(5) == [None] * 5
    assert watched.ticks(100, busy=False) == [None] * 100
    assert watched.ticks(5) == [None] * 5
    for _ in range(9):
        watched.ticks(1, busy=False)
        watched.now += 3600
        watched.steps(2, 0.1)
    assert watched.ticks(6)[-1] is not None, "the hours between requests are not the usual step"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a TargetEngine over a stand-in that has a request and steps as the test says."""
    monkeypatch.setattr(target_engine, "WATCH_EVERY_S", 0.001)
    failed: list[Exception] = []
    llm = SimpleNamespace(
        output_processor=SimpleNamespace(has_unfinished_requests=lambda: True, propagate_error=failed.append),
        engine_core=SimpleNamespace(resources=SimpleNamespace(engine_dead=False)),
        check_health=lambda: asyncio.sleep(0),
        shutdown=lambda: None,
        is_held=False,
    )
    engine = TargetEngine.__new__(TargetEngine)
    engine._llm, engine._load, engine._watching, engine._stands_still = llm, EngineLoad(), None, None
    return SimpleNamespace(engine=engine, llm=llm, failed=failed)


async def test_a_replica_whose_engine_stands_still_says_so_to_serve_and_ends_its_requests(engine: Any) -> None:
    await engine.engine.check_health()
    engine.engine.watch_steps(3.0)
    async with asyncio.timeout(60):
        await engine.engine._watching
    with pytest.raises(RuntimeError, match="no step of the engine has ended for 4 s"):
        await engine.engine.check_health()
    assert [type(error) for error in engine.failed] == [EngineDeadError], "requests end as with a dead engine"
    assert engine.llm.engine_core.resources.engine_dead, "new ones are refused"


async def test_an_engine_that_steps_is_left_alone(engine: Any) -> None:
    engine.engine.watch_steps(3.0)
    recorder = engine.engine._load
    for _ in range(200):
        recorder.record(None, None)  # as vLLM does with each output
        await asyncio.sleep(0.001)
    assert not engine.engine._watching.done()
    engine.engine.shutdown()
    await engine.engine.check_health()
    assert engine.failed == []
