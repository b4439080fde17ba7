"""Turns for calls beside generations, and the room of what only waits."""

from __future__ import annotations

import asyncio

import pytest

from outrider.actors.serving.gate import Lane, LaneFull, Room


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_callers_have_their_turns_one_after_the_other() -> None:
    lane = Lane("here", 1, patience_s=60)
    await lane.take("first")
    order: list[str] = []

    async def call(caller: str) -> None:
        await lane.take(caller)
        order.append(caller)
        lane.leave()

    calls = [asyncio.create_task(call("greedy")) for _ in range(100)]
    await asyncio.sleep(0)
    calls.append(asyncio.create_task(call("modest")))
    await asyncio.sleep(0)
    lane.leave()
    await asyncio.gather(*calls)
    assert order.index("modest") <= 1
    assert len(order) == 101


async def test_turns_a_second() -> None:
    clock = Clock()
    lane = Lane("here", 1000, per_s=10, patience_s=0.01, clock=clock)
    for _ in range(10):
        await lane.take("a")
    with pytest.raises(LaneFull, match=r"within 0\.01 s; ask less often"):
        await lane.take("a")
    clock.now_s = 0.35
    for _ in range(3):
        await lane.take("a")
    with pytest.raises(LaneFull):
        await lane.take("a")


async def test_who_waits_has_a_turn_when_there_is_one_again() -> None:
    lane = Lane("here", 10, per_s=50, patience_s=60)
    for _ in range(60):
        await lane.take("a")
        lane.leave()


async def test_without_patience_there_is_a_place_or_none() -> None:
    lane = Lane("here", 1, patience_s=0)
    await lane.take("a")
    with pytest.raises(LaneFull, match="too many calls here at once"):
        await lane.take("b")
    lane.leave()
    await lane.take("b")


async def test_a_turn_that_comes_to_somebody_who_left_goes_to_the_next() -> None:
    lane = Lane("here", 1, patience_s=60)
    await lane.take("a")
    gone, stays = asyncio.create_task(lane.take("b")), asyncio.create_task(lane.take("c"))
    await asyncio.sleep(0)
    gone.cancel()
    lane.leave()
    await asyncio.wait_for(stays, 30)
    gone_too = asyncio.create_task(lane.take("d"))
    await asyncio.sleep(0)
    lane.leave()  # it is d's now, who has not heard of it
    gone_too.cancel()
    await asyncio.gather(gone, gone_too, return_exceptions=True)
    await asyncio.wait_for(lane.take("e"), 30)


def test_the_oldest_makes_room() -> None:
    put_out: list[int] = []
    room = Room(3, 100)
    guests = [room.enter(lambda number=number: put_out.append(number)) for number in range(5)]
    assert put_out == [0, 1]
    room.holds(guests[2], 60)
    room.holds(guests[4], 60)
    assert put_out == [0, 1, 2]
    assert (len(room), room.num_bytes) == (2, 60)
    room.holds(guests[2], 1000)
    room.leave(guests[2])
    room.leave(guests[4])
    room.holds(guests[3], 1000)
    assert put_out == [0, 1, 2], "who is alone may be as large as it is"
