"""Whose constraint is compiled next: callers by turns, whatever they send, and who wastes time comes last."""

from __future__ import annotations

from collections import Counter

from outrider.actors.grammars.turns import MOST_RECORDS, Turn, Turns
from tests.clock import Clock

BOMBER, OTHER, THIRD = 1, 2, 3
LONGEST_S, BUDGET_S = 2.0, 20.0


def turns(clock: Clock | None = None) -> Turns[str]:
    return Turns(LONGEST_S, BUDGET_S, clock or Clock())


def taken(queue: Turns[str]) -> Turn[str]:
    turn = queue.take()
    assert turn is not None
    return turn


def run(queue: Turns[str], used_s: float, *, wasted: bool = False) -> str:
    turn = taken(queue)
    queue.done(turn, used_s, wasted=wasted)
    return turn.job


def test_fresh_small_ones_of_one_caller_do_not_starve_anothers_large_one() -> None:
    queue = turns()
    for number in range(10):
        queue.put(f"small {number}", BOMBER, 80)
    queue.put("large", OTHER, 60_000)
    order = [run(queue, 1.9) for _ in range(3)]
    assert "large" in order[:2]


def test_within_a_caller_small_ones_go_first() -> None:
    queue = turns()
    for number, size in enumerate((300, 100, 200, 100)):
        queue.put(f"{size} {number}", OTHER, size)
    assert [run(queue, 0.1).split()[0] for _ in range(4)] == ["100", "100", "200", "300"]


def test_callers_share_the_processor_by_what_theirs_really_takes() -> None:
    queue = turns()
    for number in range(400):
        queue.put(f"long {number}", OTHER, 10)
        queue.put(f"short {number}", THIRD, 10)
    used: Counter[str] = Counter()
    for _ in range(300):
        turn = taken(queue)
        kind = turn.job.split()[0]
        used_s = 1.0 if kind == "long" else 0.1
        used[kind] += round(used_s * 10)
        queue.done(turn, used_s, wasted=False)
    assert 0.8 < used["long"] / used["short"] < 1.25


def test_what_one_had_alone_is_not_held_against_it_and_a_newcomer_gets_no_credit() -> None:
    queue = turns()
    for number in range(20):
        queue.put(f"alone {number}", OTHER, 10)
        run(queue, 1.0)
    for number in range(6):
        queue.put(f"old {number}", OTHER, 10)
        queue.put(f"new {number}", THIRD, 10)
    first = Counter(run(queue, 1.0).split()[0] for _ in range(6))
    assert first["old"] == first["new"] == 3


def test_ever_new_callers_do_not_keep_an_old_one_waiting() -> None:
    queue = turns()
    queue.put("before", OTHER, 60_000)
    run(queue, 1.0)
    queue.put("large", OTHER, 60_000)
    for caller in range(10, 60):
        queue.put(f"new {caller}", caller, 80)
        queue.put(f"newer {caller}", 1000 + caller, 80)
        if run(queue, 1.0) == "large":
            return
    raise AssertionError("it never had a turn")


def test_while_one_of_its_is_compiled_the_callers_next_goes_behind_others() -> None:
    queue = turns()
    for number in range(3):
        queue.put(f"bomb {number}", BOMBER, 1)
    assert taken(queue).job == "bomb 0"
    queue.put("other", OTHER, 1000)
    assert taken(queue).job == "other"


def test_who_wasted_time_lately_comes_behind_all_who_did_not() -> None:
    clock = Clock()
    queue = turns(clock)
    queue.put("refused", BOMBER, 1)
    run(queue, 2.0, wasted=True)
    for number in range(50):
        queue.put(f"clean {number}", OTHER, 1000)
    queue.put("suspect", BOMBER, 1)
    assert all(run(queue, 1.0) != "suspect" for _ in range(50))
    assert queue.take(suspects=False) is None
    assert taken(queue).suspect
    clock.now = 6.5  # two seconds are worn off in six, at 20 a minute
    assert not queue.is_suspect(BOMBER)


def test_endless_bombs_keep_no_core_busy_for_ever() -> None:
    clock = Clock()
    queue = turns(clock)
    compiled_s = 0.0
    while clock.now < 600:
        if (wait_s := queue.retry_after_s(BOMBER)) > 0:
            clock.now += wait_s
            continue
        queue.put(f"bomb {clock.now}", BOMBER, 80)
        run(queue, 2.0, wasted=True)
        clock.now += 2.0
        compiled_s += 2.0
    assert compiled_s <= 10 * BUDGET_S + BUDGET_S + LONGEST_S
    assert queue.retry_after_s(OTHER) == 0


def test_a_job_that_several_wait_for_comes_at_the_first_ones_turn_and_once() -> None:
    queue = turns()
    queue.put("refused", BOMBER, 1)
    run(queue, 2.0, wasted=True)
    queue.put("both", BOMBER, 10)
    queue.put("both", OTHER, 10)
    turn = taken(queue)
    assert (turn.job, turn.caller, turn.suspect) == ("both", OTHER, False)
    queue.done(turn, 0.1, wasted=False)
    assert queue.take() is None
    assert not queue._queues


def test_records_of_callers_are_bounded_by_what_still_counts() -> None:
    clock = Clock()
    queue = turns(clock)
    for caller in range(3 * MOST_RECORDS):
        queue.put(f"{caller}", caller, 1)
        run(queue, 0.01, wasted=True)
        clock.now += 0.1
    assert len(queue._clocks) <= MOST_RECORDS + 1
    assert len(queue._wasted) <= MOST_RECORDS + 1
