"""Where rounds' time went, and what a side could have given at best."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench.emulation.load import prompt
from tests.bench.emulation.measurement import Measurement, bound, sides_of, table
from tests.bench.emulation.profiles import PROFILES, TEXTS
from tests.bench.emulation.round_times import round_times
from tests.bench.emulation.text_process import TextProcess
from tests.bench.emulation.trace import RECORD

PROFILE = PROFILES["70b-8b"]


def steps(*spans: tuple[float, float], num_tokens: int = 4) -> np.ndarray:
    return np.array([(start, end, end, num_tokens) for start, end in spans], RECORD)


def test_a_round_is_target_then_exposed_draft_then_idle() -> None:
    target = steps((0.0, 0.025), (0.050, 0.075))
    drafter = steps((0.030, 0.036), (0.037, 0.043))
    times = round_times(target, drafter, max_decode_tokens=4)
    found = [spread.median for spread in (times.period, times.target, times.draft, times.exposed_draft, times.idle)]
    assert found == pytest.approx([50, 25, 12, 12, 13])
    assert times.overhead.median == pytest.approx(25)


def test_drafts_under_the_target_step_are_hidden() -> None:
    target = steps((0.0, 0.025), (0.027, 0.052))
    drafter = steps((0.001, 0.007), (0.007, 0.013), (0.020, 0.026), (0.026, 0.032))
    times = round_times(target, drafter, max_decode_tokens=4)
    found = [spread.median for spread in (times.draft, times.exposed_draft, times.idle, times.overhead)]
    # The last draft step straddles the rounds: 1 ms of it belongs to the first.
    assert found == pytest.approx([19, 2, 0, 2])


def test_steps_with_prompts_in_them_are_left_out_and_dilation_is_taken_out() -> None:
    target = np.concatenate([steps((0.0, 0.9), num_tokens=300), steps((1.0, 1.1), (1.2, 1.3), (1.4, 1.5))])
    times = round_times(target, steps(), max_decode_tokens=4, scale=0.25)
    assert times.rounds == 2
    assert times.period.median == pytest.approx(50)
    with pytest.raises(ValueError, match="target"):
        round_times(target[:2], steps(), max_decode_tokens=4)


def test_the_bound_of_plain_decoding_is_a_token_a_step() -> None:
    side = sides_of(PROFILE)["plain"]
    assert bound(side, PROFILE.target, TEXTS["stated"], batch=1, k=0) == pytest.approx(40)


def test_a_drafter_that_is_always_right_gives_all_its_tokens() -> None:
    always, sides = TextProcess(1.0, 0.0, 0.0), sides_of(PROFILE)
    in_process = bound(sides["in-process"], PROFILE.target, always, batch=1, k=3)
    assert in_process == pytest.approx(4 / (25.15 + 6.12 + 6.0 + 6.0) * 1e3)
    # Four draft steps of 6 ms hide behind the target's 25.15, five of them do not.
    assert bound(sides["outrider"], PROFILE.target, always, batch=1, k=3) == pytest.approx(4 / 25.15 * 1e3)
    assert bound(sides["outrider"], PROFILE.target, always, batch=1, k=4) == pytest.approx(5 / 30.0 * 1e3)


def test_every_side_counts_the_accelerators_it_needs() -> None:
    assert {name: side.accelerators for name, side in sides_of(PROFILE).items()} == {
        "plain": 4,
        "in-process": 4,
        "in-process-tp": 4,
        "outrider": 5,
    }


def test_a_line_has_a_cell_for_every_column() -> None:
    times = round_times(steps((0.0, 0.025), (0.050, 0.075)), steps(), max_decode_tokens=4)
    hits = {"main_line_hits": 7, "side_branch_hits": 2, "misses": 1}
    measured = Measurement("outrider", 8, 3, 1000, 2.0, 5, 2.95, 900.0, times, hits)
    head, rule, line = table([measured]).splitlines()
    assert head.count("|") == rule.count("|") == line.count("|")
    assert "| 500.0 | 100.0 |" in line
    assert "7 / 2 / 1" in line


def test_requests_side_by_side_end_on_different_letters() -> None:
    assert len({prompt(index)[-1] for index in range(32)}) == 32
