"""Where rounds' time went, where their drafts came from, and what a side could have given at best."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.bench.ceilings import Drafted, Tree, best_paths
from tests.bench.emulation.measurement import ceiling, sides_of
from tests.bench.emulation.pair import MASK_TOKEN
from tests.bench.emulation.profiles import PROFILES, TEXTS
from tests.bench.emulation.published import PUBLISHED
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


@pytest.mark.parametrize(("k", "speed"), [(8, 163), (11, 174), (16, 181)])
def test_an_in_process_pass_adds_itself_to_the_targets_step(k: int, speed: float) -> None:
    profile = PROFILES["70b-1b"]
    found = ceiling(sides_of(profile)["in-process-one-pass"], profile.target, TEXTS["stated"], batch=1, k=k)
    assert found.expected == pytest.approx(speed, abs=0.5)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_text_has_the_published_lengths(name: str) -> None:
    for k, length in PUBLISHED[name].lengths.items():
        assert TEXTS[name].acceptance_length(k, one_pass=True) == pytest.approx(length, abs=0.01)


def test_a_mask_is_followed_by_what_follows_the_targets_own_choice() -> None:
    """Three masks behind each token: right as often as the position says, if the drafter's choice is its first."""
    text = Text.of(TextProcess(0.9, 0.0, 0.0, decay=0.5))
    heads, positions = torch.full((4000,), token(0, 1)), torch.arange(4000) * 4
    ids = torch.stack([heads, *[torch.full_like(heads, MASK_TOKEN)] * 3], 1)
    places = positions[:, None] + torch.arange(4)
    drafts = ranked_tokens(ids.flatten(), places.flatten(), TOKENS, text, MASK_TOKEN)[:, 0].view(-1, 4)
    right = heads
    for masks in range(4):
        right = ranked_tokens(right, places[:, masks], TOKENS)[:, 0]
        share = (drafts[:, masks] == right).double().mean()
        assert float(share) == pytest.approx(0.9 * 0.5**masks, abs=0.03)


def test_paths_count_what_they_share_once_in_tokens_and_each_time_in_rows() -> None:
    (process,) = TEXTS["stated"].parts
    drafted = Drafted(process, one_pass=True)
    main = (1,) * 8
    tree = Tree(drafted, [main, *((*main[:at], 2, *main[at + 1 :]) for at in range(3))])
    assert tree.rows == 36
    assert tree.tokens == pytest.approx(5.75, abs=0.01)
    assert Tree(drafted, best_paths(drafted, 0.06, 8, 4)).rows <= 36
