"""Turns for calls beside generations, and the room of what only waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.actors.serving.connections import peer_of_call
from outrider.actors.serving.gate import Doors, Room
from outrider.actors.serving.lanes import CALL_BYTES, MOST_WAITING, SHARE_OF_ONE, Lane, LaneFull
from outrider.cluster.limits import LimitsConfig
from tests.clock import Clock


async def test_callers_have_their_turns_one_after_the_other() -> None:
    lane = Lane("here", 1, patience_s=60)
    await lane.take("first")
    order: list[str] = []

    async def call(caller: str) -> None:
        await lane.take(caller)
        order.append(caller)
        lane.leave(caller)

    calls = [asyncio.create_task(call("greedy")) for _ in range(100)]
    await asyncio.sleep(0)
    calls.append(asyncio.create_task(call("modest")))
    await asyncio.sleep(0)
    lane.leave("first")
    await asyncio.gather(*calls)
    assert order.index("modest") <= 1
    assert len(order) == 101


async def asked(lane: Lane, caller: str, calls: int, num_bytes: int = 0) -> list[asyncio.Task[None]]:
    """Calls that wait, or have been refused by now."""
    tasks = [asyncio.create_task(lane.take(caller, num_bytes)) for _ in range(calls)]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


def refused(tasks: list[asyncio.Task[None]]) -> list[int]:
    return [number for number, task in enumerate(tasks) if task.done() and task.exception() is not None]


async def end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_caller_does_not_fill_a_lane() -> None:
    lane = Lane("here", 1, patience_s=60)
    await lane.take("greedy")
    greedy = await asked(lane, "greedy", 2 * MOST_WAITING)
    assert refused(greedy) == list(range(MOST_WAITING // SHARE_OF_ONE, 2 * MOST_WAITING)), "a fourth, the oldest"
    with pytest.raises(LaneFull, match="too many calls here from this address wait for a turn"):
        await lane.take("greedy")
    modest = await asked(lane, "modest", 1)
    lane.leave("greedy")
    lane.leave("greedy")
    await asyncio.wait_for(modest[0], 30)
    await end(*greedy)


async def test_when_a_lane_is_full_the_newest_of_who_has_most_makes_room() -> None:
    lane = Lane("here", 1, patience_s=60)
    await lane.take("first")
    share = MOST_WAITING // SHARE_OF_ONE
    greedy = {caller: await asked(lane, caller, share) for caller in "abcd"}
    modest = await asked(lane, "modest", 1)
    assert [refused(calls) for calls in greedy.values()] == [[share - 1], [], [], []]
    assert "while others ask" in str(greedy["a"][-1].exception())
    assert not modest[0].done()
    a = await asked(lane, "a", 1)
    assert refused(a) == [0], "it has no more than the others, and would have"
    order = [asyncio.create_task(_order(calls[0], name)) for name, calls in (*greedy.items(), ("modest", modest))]
    for _ in range(5):
        lane.leave("first")
    assert await asyncio.wait_for(asyncio.gather(*order), 30) == [*"abcd", "modest"]
    await end(*(task for calls in greedy.values() for task in calls))


async def _order(task: asyncio.Task[None], name: str) -> str:
    await task
    return name


async def test_who_has_one_call_like_everybody_is_not_put_out_for_another() -> None:
    lane = Lane("here", 1, patience_s=60, most_waiting_bytes=4 * CALL_BYTES)
    await lane.take("first")
    waiting = [task for caller in "abcd" for task in await asked(lane, caller, 1)]
    with pytest.raises(LaneFull, match="too many calls here at once"):
        await lane.take("late")
    assert not refused(waiting)
    await end(*waiting)


async def test_what_waits_is_counted_in_bytes() -> None:
    lane = Lane("here", 1, patience_s=60, most_waiting_bytes=64 << 20)
    await lane.take("first")
    large = {caller: await asked(lane, caller, 3, 8 << 20) for caller in "abcd"}
    assert [refused(calls) for calls in large.values()] == [[2]] * 4, "two of 8 MiB are a fourth of 64"
    small = await asked(lane, "small", 1, 100)
    assert [refused(calls) for calls in large.values()] == [[1, 2], [2], [2], [2]]
    assert not small[0].done()
    huge = await asked(lane, "huge", 1, 60 << 20)
    assert refused(huge) == [0]
    await end(*small, *(task for calls in large.values() for task in calls))
    alone = await asked(lane, "huge", 1, 100 << 20)
    assert not alone[0].done(), "who is alone may be as large as it is"
    await end(*alone)
    assert not lane._waiting_bytes


async def test_one_caller_has_so_many_places() -> None:
    lane = Lane("here", 4, patience_s=0, most_of_one=2)
    await lane.take("a")
    await lane.take("a")
    with pytest.raises(LaneFull, match="from this address at once; end some"):
        await lane.take("a")
    await lane.take("b")
    lane.leave("a")
    await lane.take("a")
    await lane.take("b")
    with pytest.raises(LaneFull, match="too many calls here at once"):
        await lane.take("c")


def test_a_caller_is_a_network_as_for_connections() -> None:
    peers = [peer_of_call(peer) for peer in ("ipv6:%5B2001:db8::1%5D:1", "ipv6:[2001:db8::ffff]:2")]
    assert peers == ["2001:db8::/64"] * 2
    assert peer_of_call("ipv6:[2001:db8:0:1::1]:1") != peers[0]
    assert peer_of_call("ipv4:10.0.0.1:1") == peer_of_call("ipv6:[::ffff:10.0.0.1]:2") == "10.0.0.1"


def test_aborts_and_tokenising_have_turns_a_second() -> None:
    doors = Doors(LimitsConfig(max_control_calls_per_s=0.25, max_tokenize_calls=3))
    for lane in (doors.abort, doors.tokenize):
        assert [lane._may_go("a") for _ in range(3)] == [True, False, False], lane._name


async def test_turns_a_second() -> None:
    clock = Clock()
    lane = Lane("here", 1000, per_s=10, patience_s=0.01, clock=clock)
    for _ in range(10):
        await lane.take("a")
    with pytest.raises(LaneFull, match=r"within 0\.01 s; ask less often"):
        await lane.take("a")
    clock.now = 0.35
    for _ in range(3):
        await lane.take("a")
    with pytest.raises(LaneFull):
        await lane.take("a")


async def test_who_waits_has_a_turn_when_there_is_one_again() -> None:
    lane = Lane("here", 10, per_s=50, patience_s=60)
    for _ in range(60):
        await lane.take("a")
        lane.leave("a")


async def test_without_patience_there_is_a_place_or_none() -> None:
    lane = Lane("here", 1, patience_s=0)
    await lane.take("a")
    with pytest.raises(LaneFull, match="too many calls here at once"):
        await lane.take("b")
    lane.leave("a")
    await lane.take("b")


async def test_a_turn_that_comes_to_somebody_who_left_goes_to_the_next() -> None:
    lane = Lane("here", 1, patience_s=60)
    await lane.take("a")
    gone, stays = asyncio.create_task(lane.take("b")), asyncio.create_task(lane.take("c"))
    await asyncio.sleep(0)
    gone.cancel()
    lane.leave("a")
    await asyncio.wait_for(stays, 30)
    gone_too = asyncio.create_task(lane.take("d"))
    await asyncio.sleep(0)
    lane.leave("c")  # it is d's now, who has not heard of it
    gone_too.cancel()
    await asyncio.gather(gone, gone_too, return_exceptions=True)
    await asyncio.wait_for(lane.take("e"), 30)


def test_nobodys_number_puts_anothers_out() -> None:
    put_out: list[str] = []

    def enter(caller: str, number: int) -> Any:
        return room.enter(caller, lambda: put_out.append(f"{caller}{number}"))

    room = Room(3, 100)
    slow = enter("slow", 0)
    many = [enter("many", number) for number in range(10)]
    assert put_out == [f"many{number}" for number in range(8)], "the first of whoever has most"
    enter("new", 0)
    assert put_out[8:] == ["many8"]
    room.holds(slow, 60)
    room.holds(many[-1], 50)
    assert put_out[9:] == ["slow0"], "by bytes where there are too many of those"


def test_the_oldest_makes_room() -> None:
    put_out: list[int] = []
    room = Room(3, 100)
    guests = [room.enter("a", lambda number=number: put_out.append(number)) for number in range(5)]
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
