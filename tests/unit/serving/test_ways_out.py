"""Requests whose way out has died are aborted, others are not, and nobody is asked about when nothing runs."""

from __future__ import annotations

import asyncio

import pytest

from outrider.actors.serving.ways_out import WaysOut, this_process, way_out

LOOK_S = 0.005


class Processes:
    """Those that live, and what was asked and aborted."""

    def __init__(self, *living: str) -> None:
        self.living = set(living)
        self.asked: list[str] = []
        self.aborted: list[str] = []
        self.ways_out = WaysOut(self.abort, self.lives, LOOK_S)

    def lives(self, process: str) -> bool:
        self.asked.append(process)
        return process in self.living

    async def abort(self, request_id: str, caller: int) -> bool:
        self.aborted.append(f"{request_id} of {caller}" if caller else request_id)
        return True

    async def looked(self, times: int = 2) -> None:
        """Whole looks from now."""
        until = len(self.asked) + 2 * times
        async with asyncio.timeout(60):
            while len(self.asked) < until:  # noqa: ASYNC110 - counted by the looks themselves
                await asyncio.sleep(LOOK_S)


@pytest.mark.parametrize("gone", ["proxy", "ingress"])
def test_who_has_lost_its_way_out_is_aborted_and_nobody_else(gone: str) -> None:
    async def run() -> None:
        processes = Processes("proxy", "ingress", "another proxy")
        hold = processes.ways_out.hold
        with hold("lost", 0, (gone,)), hold("other", 0, ("another proxy",)):
            await processes.looked()
            assert processes.aborted == []
            processes.living.remove(gone)
            await processes.looked()
        assert set(processes.aborted) == {"lost"}

    asyncio.run(run())


def test_ids_are_each_caller_s_own() -> None:
    async def run() -> None:
        processes = Processes("proxy", "another proxy")
        hold = processes.ways_out.hold
        with hold("job-1", 7, ("proxy",)), hold("job-1", 8, ("another proxy",)):
            await processes.looked()
            processes.living.remove("proxy")
            await processes.looked()
        assert set(processes.aborted) == {"job-1 of 7"}

    asyncio.run(run())


def test_it_is_aborted_again_until_it_has_ended() -> None:
    """The first time may have been before the engine had it."""

    async def run() -> None:
        processes = Processes("proxy", "ingress")
        with processes.ways_out.hold("r", 0, ("proxy", "ingress")):
            await processes.looked()
            processes.living.remove("proxy")
            await processes.looked(3)
        assert len(processes.aborted) >= 2


def test_a_process_that_was_never_seen_alive_is_not_taken_for_dead() -> None:
    """Every answer would be cut where it cannot be found."""

    async def run() -> None:
        processes = Processes("ingress")
        with processes.ways_out.hold("r", 0, ("not found", "ingress")):
            await processes.looked(3)
        assert processes.aborted == []

    asyncio.run(run())


def test_nothing_is_asked_when_nothing_runs_and_the_next_request_is_looked_after_again() -> None:
    async def run() -> None:
        processes = Processes("proxy", "ingress")
        for _ in range(2):
            with processes.ways_out.hold("r", 0, ("proxy", "ingress")), processes.ways_out.hold("s", 0, ("proxy",)):
                await processes.looked(1)
            async with asyncio.timeout(60):
                while processes.ways_out._looking is not None:  # noqa: ASYNC110 - the last look is on its way
                    await asyncio.sleep(LOOK_S)
            asked = len(processes.asked)
            await asyncio.sleep(10 * LOOK_S)
            assert len(processes.asked) == asked
        assert processes.aborted == []

    asyncio.run(run())


def test_a_look_that_fails_is_not_the_last() -> None:
    async def run() -> None:
        processes = Processes("proxy", "ingress")
        working, processes.ways_out._abort = processes.abort, fail
        with processes.ways_out.hold("r", 0, ("proxy", "ingress")):
            await processes.looked()
            processes.living.remove("proxy")
            await processes.looked()
            processes.ways_out._abort = working
            await processes.looked()
        assert set(processes.aborted) == {"r"}

    async def fail(request_id: str) -> bool:
        raise RuntimeError("the engine is dead")

    asyncio.run(run())


def test_a_request_that_says_nothing_of_its_way_is_left_alone() -> None:
    async def run() -> None:
        processes = Processes()
        with processes.ways_out.hold("r", 0, ()):
            await asyncio.sleep(10 * LOOK_S)
        assert (processes.asked, processes.aborted) == ([], [])

    asyncio.run(run())


def test_outside_of_ray_there_is_no_process_to_name() -> None:
    assert this_process() == ""
    assert way_out() == ()
