"""Each token's origin, from counts that only grow."""

from __future__ import annotations

import random

import pytest

from outrider.actors.round.origins import (
    ACCEPTED,
    BONUS,
    PLAIN,
    RECOVERED,
    UNKNOWN,
    RoundLog,
    SpeculationTotals,
    round_origins,
)

START = SpeculationTotals(5, 20, 11)


def after(drafted: int, accepted: int, rounds: int = 1) -> SpeculationTotals:
    return SpeculationTotals(START.drafted_rounds + rounds, START.drafted + drafted, START.accepted + accepted)


@pytest.mark.parametrize(
    ("num_tokens", "end", "expected"),
    [
        (1, START, (PLAIN,)),
        (1, after(3, 0), (RECOVERED,)),
        (3, after(3, 2), (ACCEPTED, ACCEPTED, RECOVERED)),
        (4, after(3, 3), (ACCEPTED, ACCEPTED, ACCEPTED, BONUS)),
        (1, after(0, 0), (PLAIN,)),  # a grammar refused every draft
        # Cut by a stop: the rest of the round is not delivered.
        (2, after(3, 2), (ACCEPTED, ACCEPTED)),
        (1, after(3, 3), (ACCEPTED,)),
        (0, after(3, 3), ()),
        # What cannot be.
        (2, START, (UNKNOWN,) * 2),
        (4, after(3, 2), (UNKNOWN,) * 4),
        (2, after(6, 4, rounds=2), (UNKNOWN,) * 2),
        (1, after(2, 3), (UNKNOWN,)),
        (1, after(-1, 0), (UNKNOWN,)),
        (1, after(2, 0, rounds=0), (UNKNOWN,)),
    ],
)
def test_origins_of_one_round(num_tokens: int, end: SpeculationTotals, expected: tuple[str, ...]) -> None:
    assert round_origins(num_tokens, START, end) == expected


def log_of(*rounds: tuple[int, SpeculationTotals | None], speculating: bool = True) -> RoundLog:
    log = RoundLog(speculating)
    log.watch("r")
    for num_tokens, totals in rounds:
        log.note("r", 0, num_tokens, totals)
    return log


@pytest.mark.parametrize(("speculating", "expected"), [(True, UNKNOWN), (False, PLAIN)])
def test_what_nothing_counts_is_plain_only_where_nothing_drafts(speculating: bool, expected: str) -> None:
    assert log_of((1, None), speculating=speculating).take("r", 0, 1).origins == (expected,)


def test_a_request_that_nobody_watches_leaves_nothing_and_has_unknown_tokens() -> None:
    log = log_of((1, SpeculationTotals()))
    log.forget("r")
    assert not log.watches("r")
    assert log.take("r", 0, 2).origins == (UNKNOWN, UNKNOWN)


def test_accepted_tokens_add_up_to_what_was_counted_however_they_are_read() -> None:
    rng = random.Random(7)
    for _ in range(200):
        log, totals, pending, read = RoundLog(speculating=True), SpeculationTotals(), 0, []
        log.watch("r")
        for _ in range(rng.randrange(1, 12)):
            drafted = rng.randrange(4)
            accepted = rng.randint(0, drafted)
            totals = SpeculationTotals(
                totals.drafted_rounds + (drafted > 0), totals.drafted + drafted, totals.accepted + accepted
            )
            log.note("r", 0, accepted + 1, totals)
            pending += accepted + 1
            if rng.random() < 0.5:
                read += log.take("r", 0, pending).origins
                pending = 0
        read += log.take("r", 0, pending).origins
        assert UNKNOWN not in read
        assert read.count(ACCEPTED) == totals.accepted
        assert read.count(BONUS) + read.count(RECOVERED) == totals.drafted_rounds
