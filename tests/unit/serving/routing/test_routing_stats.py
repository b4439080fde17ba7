"""What a replica reports, also when its engine is slow or dead."""

import asyncio

from outrider.actors.serving import replica
from outrider.actors.serving.replica import RoutingStats


async def alive():
    return None


async def dead():
    raise RuntimeError("the engine is dead")


def collect(*answers, check_health=alive):
    """One report for each answer of rank 0."""
    given = iter(answers)

    async def link_is_up():
        answer = next(given)
        if answer == "late":
            await asyncio.sleep(60)
        return answer

    stats = RoutingStats(lambda: {"running": 2, "waiting": 3}, 4096, link_is_up if answers else None, check_health)

    async def all_of_them():
        return [await stats.collect() for _ in range(max(1, len(answers)))]

    return asyncio.run(all_of_them())


def test_a_report():
    assert collect(True) == [{"serving": True, "requests": 5, "kv_cache_tokens": 4096, "speculation_up": True}]
    assert collect()[0]["speculation_up"], "without a drafter nobody misses it"


def test_a_late_answer_leaves_what_was_known(monkeypatch):
    monkeypatch.setattr(replica, "_LINK_STATE_TIMEOUT_S", 0.01)
    reports = collect(True, False, "late", True, "late")
    assert [report["speculation_up"] for report in reports] == [True, False, False, True, True]


def test_a_dead_engine():
    assert collect(True, check_health=dead) == [{"serving": False}]
