"""The emulated text: what the profile states is what comes out, and only a row's own token and position count."""

from __future__ import annotations

import pytest
import torch

from tests.bench.emulation.profiles import TEXTS
from tests.bench.emulation.text_process import STRETCH, Text, TextProcess, TokenRange, ranked_tokens

TOKENS = TokenRange.of(257, 4096)
NUM_ROWS = 40_000


def rows(count: int = NUM_ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions as decoding meets them."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(257, 4096, (count,), generator=generator), torch.arange(count) % 2000


def ranks_of_target(text: Text) -> torch.Tensor:
    """Where the drafter has the target's token, 3 for nowhere: int64 [NUM_ROWS]."""
    found = ranked_tokens(*rows(), TOKENS, text) == ranked_tokens(*rows(), TOKENS)[:, :1]
    return torch.where(found.any(-1), found.int().argmax(-1), 3)


@pytest.mark.parametrize("name", TEXTS)
def test_the_drafter_follows_as_often_as_stated(name: str) -> None:
    text, (token_ids, positions), ranks = TEXTS[name], rows(), ranks_of_target(TEXTS[name])
    part_of = text.part_of(positions, TOKENS.lane(token_ids))
    for index, part in enumerate(text.parts):
        here = ranks[part_of == index]
        shares = torch.bincount(here, minlength=4) / len(here)
        missed = 1 - part.acceptance
        stated = [part.acceptance, missed * part.second, missed * part.third, missed * (1 - part.second - part.third)]
        # Five standard deviations of a share of 40,000 rows are 0.0125 at most, of a quarter of them 0.025.
        assert len(here) > 0.9 * NUM_ROWS / len(text.parts)
        assert shares.tolist() == pytest.approx(stated, abs=0.0125 if len(text.parts) == 1 else 0.025)


def test_a_text_that_shifts_does_so_along_itself_and_a_mixed_batch_by_request() -> None:
    positions, lanes = torch.arange(4 * STRETCH), torch.arange(4 * STRETCH) // STRETCH
    assert TEXTS["shift"].part_of(positions, lanes).bincount().tolist() == [2 * STRETCH, 2 * STRETCH]
    assert (TEXTS["shift"].part_of(positions, lanes).diff().nonzero().flatten() + 1).tolist() == [64, 128, 192]
    assert torch.equal(TEXTS["mixed"].part_of(positions, lanes), lanes)


def test_parts_have_as_many_tokens_each_and_so_not_as_many_rounds() -> None:
    text = Text.of(TextProcess(1.0, 0.0, 0.0), TextProcess(0.0, 0.5, 0.0))
    # K = 2: a round of 3 tokens for every three of 1 token.
    assert text.round_shares(2) == pytest.approx([0.25, 0.75])
    assert text.acceptance_length(2) == pytest.approx(1.5)
    assert text.coverage(2) == pytest.approx((0.25, 0.625, 0.625))


def test_rounds_along_a_text_have_the_stated_length_and_coverage() -> None:
    text, k = TEXTS["code"], 3
    token, position = torch.arange(65, 97), torch.full((32,), 40)
    lengths, covered = torch.zeros(0), torch.zeros(3)
    rounds = 200
    for _ in range(rounds):
        alive, accepted = torch.ones(32, dtype=torch.bool), torch.zeros(32, dtype=torch.long)
        outcome_rank = torch.zeros(32, dtype=torch.long)
        at, next_token, next_position = token, token, position
        for j in range(k + 1):
            target = ranked_tokens(at, position + j, TOKENS)[:, 0]
            drafter = ranked_tokens(at, position + j, TOKENS, text)
            found = drafter == target[:, None]
            rank = torch.where(found.any(-1), found.int().argmax(-1), 3)
            next_token = torch.where(alive, target, next_token)
            next_position = torch.where(alive, position + j + 1, next_position)
            outcome_rank = torch.where(alive, rank, outcome_rank)
            accepted += alive & (rank == 0) & (j < k)
            alive &= rank == 0
            at = target
        token, position = next_token, next_position
        lengths = torch.cat([lengths, 1 + accepted])
        covered += torch.stack([(outcome_rank <= n).sum() for n in range(3)])
    assert float(lengths.mean()) == pytest.approx(text.acceptance_length(k), abs=0.05)
    assert (covered / (32 * rounds)).tolist() == pytest.approx([0.66, 0.91, 0.97], abs=0.02)


def test_coverage_is_what_it_was_derived_from() -> None:
    assert TEXTS["code"].coverage(3) == pytest.approx((0.66, 0.91, 0.97))
    assert TEXTS["chat"].coverage(3) == pytest.approx((0.52, 0.79, 0.90))
    assert TEXTS["stated"].acceptance_length(4) == pytest.approx(1 + 0.8 + 0.64 + 0.512 + 0.4096)


def test_a_row_is_the_same_in_any_batch() -> None:
    token_ids, positions = rows(64)
    together = ranked_tokens(token_ids, positions, TOKENS, TEXTS["stated"])
    alone = [ranked_tokens(token_ids[r : r + 1], positions[r : r + 1], TOKENS, TEXTS["stated"]) for r in range(64)]
    assert torch.equal(together, torch.cat(alone))


def test_a_text_depends_on_the_token_and_on_the_position() -> None:
    token_ids, positions = rows(1000)
    chosen = ranked_tokens(token_ids, positions, TOKENS)[:, 0]
    assert (chosen == ranked_tokens(token_ids, positions + 1, TOKENS)[:, 0]).float().mean() < 0.05
    assert (chosen == ranked_tokens(token_ids ^ 1, positions, TOKENS)[:, 0]).float().mean() < 0.05


@pytest.mark.parametrize("text", [None, TEXTS["stated"]])
def test_a_row_ranks_different_written_ids_of_its_lane(text: Text | None) -> None:
    token_ids, positions = rows(4000)
    token_ids[:500] = torch.arange(500) % 256
    ranked = ranked_tokens(token_ids, positions, TOKENS, text)
    assert all(len(set(row)) == 3 for row in ranked.tolist())
    assert ranked.min() >= TOKENS.first
    assert ranked.max() < 4096
    assert torch.equal(TOKENS.lane(ranked.flatten()), TOKENS.lane(token_ids).repeat_interleave(3))


def test_prompts_that_end_on_different_letters_never_write_the_same_text() -> None:
    token = torch.arange(64, 96)
    for position in range(300):
        token = ranked_tokens(token, torch.full((32,), position), TOKENS)[:, 0]
        assert len(set(token.tolist())) == 32


def test_shares_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="acceptance"):
        TextProcess(1.2, 0.5, 0.2)
    with pytest.raises(ValueError, match="second, third"):
        TextProcess(0.8, 0.8, 0.3)
    with pytest.raises(ValueError, match="vocab_size"):
        TokenRange.of(257, 300)
    with pytest.raises(ValueError, match="by"):
        Text.of(TextProcess(0.8, 0.5, 0.2), by="day")
    with pytest.raises(ValueError, match="parts"):
        Text.of()
