"""Who asks a drafter how it is, when it does not answer."""

import asyncio
import concurrent.futures

import pytest

from outrider.actors.drafter.actor import DrafterStatus


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


async def gives_up(status):
    with pytest.raises(TimeoutError):
        await status.ask("D", 0.01)


def status_of(drafter, **options):
    async def find(name):
        return drafter

    return DrafterStatus(find, **options)


async def asked(drafter, calls):
    async with asyncio.timeout(10):
        while len(drafter.calls) < calls:  # noqa: ASYNC110 - by tasks that have just been made
            await asyncio.sleep(0)


async def test_one_call_is_out_however_many_ask_and_its_answer_is_for_all_who_wait():
    drafter = StoppedDrafter()
    status = status_of(drafter)
    for _ in range(3):
        await gives_up(status)
    waiting = [asyncio.ensure_future(status.ask("D", 10.0)) for _ in range(2)]
    await asyncio.sleep(0)
    assert len(drafter.calls) == 1
    drafter.calls[0].set_result({"links": 1})
    assert await asyncio.gather(*waiting) == [{"links": 1}] * 2
    again = asyncio.ensure_future(status.ask("D", 10.0))
    await asked(drafter, 2)
    drafter.calls[1].set_exception(ConnectionError("gone"))
    with pytest.raises(ConnectionError):
        await again
    await gives_up(status)
    assert len(drafter.calls) == 3, "one that died is asked again"
