"""Where rounds' time went, where their drafts came from, and what a side could have given at best."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.bench.emulation.measurement import Measurement, ceiling, sides_of, table
from tests.bench.emulation.profiles import PROFILES, TEXTS
from tests.bench.emulation.rounds import COLUMNS, TOKENS, RoundTimes, rounds_of
from tests.bench.emulation.text_process import Text, TextProcess, ranked_tokens
from tests.bench.emulation.trace import RECORD, ROW, Trace

PROFILE = PROFILES["70b-8b"]
ALWAYS = Text.of(TextProcess(1.0, 0.0, 0.0))


def token(lane: int, within: int = 0) -> int:
    return TOKENS.first + lane * TOKENS.size + within


def run(start: int, count: int, lane: int = 0, first: int | None = None) -> list[tuple[int, int]]:
    """(token, position) of one request's part of a step."""
    head = token(lane) if first is None else first
    return [(head, start), *((token(lane, 1), start + i) for i in range(1, count))]


def trace(*steps: tuple[float, float, Sequence[tuple[int, int]]]) -> Trace:
    """(start, end, rows): launched when it starts, logits asked for a ms later, read when it ends."""
    records = [(i, s, s + 0.001, s, e, e, e, len(rows)) for i, (s, e, rows) in enumerate(steps)]
    return Trace.of(np.array(records, RECORD), np.array([row for _, _, rows in steps for row in rows], ROW))


NOBODY = trace()


def only(rounds: np.ndarray) -> dict[str, float]:
    """Milliseconds of one round's COLUMNS."""
    (found,) = rounds
    return {name: float(found[name]) * 1e3 for name in COLUMNS}


def test_a_round_is_target_then_exposed_draft_then_idle() -> None:
    target = trace((0.0, 0.025, run(20, 4)), (0.050, 0.075, run(22, 4)))
    drafter = trace((0.030, 0.036, run(0, 1)), (0.037, 0.043, run(0, 1)))
    found = only(rounds_of(target, drafter, 1))
    names = ("period", "target", "draft", "exposed", "idle", "overhead")
    assert [found[name] for name in names] == pytest.approx([50, 25, 12, 12, 13, 25])
    assert found["sampling"] == pytest.approx(24)


def test_drafts_under_the_target_step_are_hidden() -> None:
    target = trace((0.0, 0.025, run(20, 4)), (0.027, 0.052, run(22, 4)))
    drafter = trace(*((s, s + 0.006, run(0, 1)) for s in (0.001, 0.007, 0.020, 0.026)))
    found = only(rounds_of(target, drafter, 1))
    # The last draft step straddles the rounds: 1 ms of it belongs to the first.
    assert [found[name] for name in ("draft", "exposed", "idle", "overhead")] == pytest.approx([19, 2, 0, 2])


def test_sampling_ends_where_a_drafter_is_launched_in_the_same_process() -> None:
    target = trace((0.0, 0.025, run(20, 4)), (0.050, 0.075, run(22, 4)))
    assert only(rounds_of(target, trace((0.004, 0.010, run(0, 1))), 1))["sampling"] == pytest.approx(3)


def test_only_rounds_of_the_whole_batch_count() -> None:
    both = [*run(20, 2), *run(20, 2, lane=1)]
    target = trace(
        (0.0, 0.9, [(65, 3), (66, 4), *run(20, 2)]),  # a prompt is among them
        (1.0, 1.1, both),
        (1.2, 1.3, [*run(22, 2), *run(21, 2, lane=1)]),
        (1.4, 1.5, [*run(23, 2), *run(23, 2, lane=1)]),
        (1.6, 1.7, run(25, 2, lane=1)),  # one has ended
        (1.8, 1.9, run(26, 2, lane=1)),
    )
    rounds = rounds_of(target, NOBODY, 2)
    assert rounds["step"].tolist() == [1, 2]
    assert rounds["tokens"].tolist() == [3, 3]
    times = RoundTimes.of(rounds, scale=0.25)
    assert (times.rounds, times.tokens, times.seconds) == (2, 6, pytest.approx(0.1))
    assert times.spreads["period"].median == pytest.approx(50)
    with pytest.raises(ValueError, match="rounds"):
        RoundTimes.of(rounds_of(target, NOBODY, 3))


def test_another_request_in_the_slot_is_not_the_same_batch() -> None:
    target = trace((0.0, 0.1, run(20, 2)), (0.2, 0.3, run(22, 2, lane=3)), (0.4, 0.5, run(23, 2, lane=3)))
    assert rounds_of(target, NOBODY, 1)["step"].tolist() == [1]


@pytest.mark.parametrize(
    ("origin", "at", "next_is_guess", "accepted", "fed_s", "drafts"),
    [
        ("main", 24, True, 4, 0.010, 3),
        ("side", 24, False, 4, 0.010, 3),  # all accepted, and the bonus token another than the likeliest
        ("side", 22, True, 2, 0.010, 3),
        ("miss", 24, True, 4, 0.026, 3),  # the target's host had the tokens at 0.025
        ("miss", 24, True, 4, None, 3),
        ("none", 24, True, 4, 0.010, 0),
    ],
)
def test_drafts_come_from_where_the_drafter_had_begun(
    origin: str, at: int, next_is_guess: bool, accepted: int, fed_s: float | None, drafts: int
) -> None:
    last = token(0, 1), 23
    guesses = ranked_tokens(torch.tensor([last[0]]), torch.tensor([last[1]]), TOKENS, ALWAYS)[0]
    committed = int(guesses[0 if next_is_guess else 1])
    target = trace(
        (0.0, 0.025, run(20, 4)),
        (0.030, 0.055, run(at, 1 + drafts, first=committed)),
    )
    assert at == 20 + accepted
    drafter = trace((fed_s or 0.001, 0.032, [(committed if fed_s else 300, at)]))
    (found,) = rounds_of(target, drafter, 1, ALWAYS)
    assert {name: int(found[name]) for name in ("main", "side", "miss", "none")} == {
        name: int(name == origin) for name in ("main", "side", "miss", "none")
    }


def test_overhead_is_told_for_hits_and_for_misses() -> None:
    rounds = rounds_of(trace(*((i * 0.03, i * 0.03 + 0.025, run(20 + i, 2)) for i in range(4))), NOBODY, 1)
    rounds["overhead"], rounds["idle"] = [0.001, 0.002, 0.009], [0.001, 0.0005, 0.003]
    rounds["main"], rounds["side"], rounds["miss"] = [1, 0, 0], [0, 1, 0], [0, 0, 1]
    found = RoundTimes.of(rounds)
    medians = [{n: s.median for n, s in of.items()} for of in (found.overhead_by_origin, found.idle_by_origin)]
    assert medians == [pytest.approx({"hit": 1.5, "miss": 9.0}), pytest.approx({"hit": 0.75, "miss": 3.0})]


def test_the_ceiling_of_plain_decoding_is_a_token_a_step() -> None:
    found = ceiling(sides_of(PROFILE)["plain"], PROFILE.target, TEXTS["stated"], batch=1, k=0)
    assert (found.covered, found.expected) == pytest.approx((40, 40))


def test_a_drafter_that_is_always_right_gives_all_its_tokens() -> None:
    sides = sides_of(PROFILE)
    in_process = ceiling(sides["in-process"], PROFILE.target, ALWAYS, batch=1, k=3)
    assert in_process.covered == in_process.expected == pytest.approx(4 / (25.15 + 6.12 + 6.0 + 6.0) * 1e3)
    # Four draft steps of 6 ms hide behind the target's 25.15, five of them do not.
    for k, period in ((3, 25.15), (4, 30.0)):
        ours = ceiling(sides["outrider"], PROFILE.target, ALWAYS, batch=1, k=k)
        assert (ours.covered, ours.expected) == pytest.approx(((k + 1) / period * 1e3,) * 2)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_what_is_expected_lies_between_plain_decoding_and_full_coverage(text: str, batch: int) -> None:
    sides = sides_of(PROFILE)
    plain = ceiling(sides["plain"], PROFILE.target, TEXTS[text], batch, 0).expected
    ours = ceiling(sides["outrider"], PROFILE.target, TEXTS[text], batch, 3)
    assert plain <= ours.expected <= max(ours.covered, plain)


def test_misses_cost_what_the_drafter_takes_to_answer_them() -> None:
    # h = 0.5 ** 2 at K = 1, nothing else is covered; waiting for one draft of 6 ms on every other round beats decoding.
    text = Text.of(TextProcess(0.5, 0.0, 0.0))
    ours = ceiling(sides_of(PROFILE)["outrider"], PROFILE.target, text, batch=1, k=1)
    assert ours.expected == pytest.approx(max(1.5 / (25.05 + 0.75 * 6.0), 1.2 / (0.4 * 25.05 + 0.6 * 25.0)) * 1e3)


def test_every_side_counts_the_accelerators_it_needs() -> None:
    assert {name: side.accelerators for name, side in sides_of(PROFILE).items()} == {
        "plain": 4,
        "in-process": 4,
        "in-process-tp": 4,
        "outrider": 5,
        "outrider-plain": 4,
    }


def test_a_line_has_a_cell_for_every_column() -> None:
    rounds = rounds_of(trace(*((i * 0.05, i * 0.05 + 0.025, run(20 + 2 * i, 2)) for i in range(3))), NOBODY, 1)
    rounds["main"], rounds["miss"] = [1, 0], [0, 1]
    side = sides_of(PROFILE)["outrider"]
    measured = Measurement(
        "outrider", 1, 1, 5, ceiling(side, PROFILE.target, ALWAYS, 1, 1), RoundTimes.of(rounds)
    )  # fmt: skip
    head, rule, line = table([measured]).splitlines()
    assert head.count("|") == rule.count("|") == line.count("|")
    assert "| outrider | 1 | 1 | 2 | 40.0 | 8.0 | 79.8 | 79.8 | 50% | 2.00 | 50.0 |" in line
    assert "50 / 0 / 50 / 0" in line
