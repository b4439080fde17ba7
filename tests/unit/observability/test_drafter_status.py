"""Who asks a drafter how it is, when it does not answer."""

import asyncio
import concurrent.futures

import pytest
from prometheus_client import CollectorRegistry

from outrider.actors.drafter.actor import DrafterStatus
from outrider.actors.observability.metrics import ReplicaMetrics
from outrider.cluster.link.keeper import LOST_S
from tests.clock import Clock

A_MOMENT_S = 0.01


class StoppedDrafter:
    """A handle as Ray gives it; every call to it stays open until the test answers."""

    def __init__(self):
        self.calls = []
        self.status = self

    def remote(self):
        self.calls.append(concurrent.futures.Future())
        return self

    def future(self):
        return self.calls[-1]


def status_of(drafter, **options):
    async def find(name):
        assert name == "D"
        return drafter

    return DrafterStatus(find, **options)


async def asked_again(drafter, calls):
    async with asyncio.timeout(10):
        while len(drafter.calls) < calls:  # noqa: ASYNC110 - by tasks that have just been made
            await asyncio.sleep(0)


async def test_one_call_is_out_however_many_ask_and_give_up():
    drafter = StoppedDrafter()
    status = status_of(drafter)
    for _ in range(5):
        with pytest.raises(TimeoutError):
            await status.ask("D", A_MOMENT_S)
    metrics = ReplicaMetrics(
        "m", None, lambda: status.ask("D", 1.0), registry=CollectorRegistry(), answer_within_s=0.01
    )
    await asyncio.gather(metrics.text(), metrics.text())
    assert len(drafter.calls) == 1


async def test_its_answer_is_for_all_who_wait_and_the_next_is_asked_anew():
    drafter = StoppedDrafter()
    status = status_of(drafter)
    with pytest.raises(TimeoutError):
        await status.ask("D", A_MOMENT_S)
    waiting = [asyncio.ensure_future(status.ask("D", 10.0)) for _ in range(2)]
    await asyncio.sleep(0)
    drafter.calls[0].set_result({"links": 1})
    assert await asyncio.gather(*waiting) == [{"links": 1}] * 2
    asked = asyncio.ensure_future(status.ask("D", 10.0))
    await asked_again(drafter, 2)
    drafter.calls[1].set_result({"links": 2})
    assert await asked == {"links": 2}
    assert len(drafter.calls) == 2


async def test_a_drafter_that_dies_unanswered_is_asked_again():
    drafter = StoppedDrafter()
    status = status_of(drafter)
    with pytest.raises(TimeoutError):
        await status.ask("D", A_MOMENT_S)
    asked = asyncio.ensure_future(status.ask("D", 10.0))
    await asyncio.sleep(0)
    drafter.calls[0].set_exception(ConnectionError("gone"))
    with pytest.raises(ConnectionError):
        await asked
    with pytest.raises(TimeoutError):
        await status.ask("D", A_MOMENT_S)
    assert len(drafter.calls) == 2


async def test_a_call_that_is_lost_is_made_once_more():
    drafter, clock = StoppedDrafter(), Clock()
    status = status_of(drafter, clock=clock)
    for clock.now, calls in ((0.0, 1), (LOST_S, 1), (LOST_S + 1, 2), (2 * LOST_S, 2)):
        with pytest.raises(TimeoutError):
            await status.ask("D", A_MOMENT_S)
        assert len(drafter.calls) == calls
    waiting = asyncio.ensure_future(status.ask("D", 10.0))
    await asyncio.sleep(0)
    drafter.calls[1].set_result({"links": 1})
    assert await waiting == {"links": 1}
    asked = asyncio.ensure_future(status.ask("D", 10.0))
    await asked_again(drafter, 3)
    drafter.calls[0].set_result({"links": 0})  # at last, and for nobody
    await asyncio.sleep(A_MOMENT_S)
    also = asyncio.ensure_future(status.ask("D", 10.0))
    await asyncio.sleep(0)
    drafter.calls[2].set_result({"links": 2})
    assert await asyncio.gather(asked, also) == [{"links": 2}] * 2
    assert len(drafter.calls) == 3
