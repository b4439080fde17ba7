"""The emulated text: what the profile states is what comes out, and only a row's own token and position count."""

from __future__ import annotations

import pytest
import torch

from tests.bench.emulation.profiles import TEXTS
from tests.bench.emulation.text_process import Text, TokenRange, ranked_tokens

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


def test_a_row_is_the_same_in_any_batch() -> None:
    token_ids, positions = rows(64)
    together = ranked_tokens(token_ids, positions, TOKENS, TEXTS["stated"])
    alone = [ranked_tokens(token_ids[r : r + 1], positions[r : r + 1], TOKENS, TEXTS["stated"]) for r in range(64)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("text", [None, TEXTS["stated"]])
def test_a_row_ranks_different_written_ids_of_its_lane(text: Text | None) -> None:
    token_ids, positions = rows(4000)
    token_ids[:500] = torch.arange(500) % 256
    ranked = ranked_tokens(token_ids, positions, TOKENS, text)
    assert all(len(set(row)) == 3 for row in ranked.tolist())
    assert ranked.min() >= TOKENS.first
    assert ranked.max() < 4096
    assert torch.equal(TOKENS.lane(ranked.flatten()), TOKENS.lane(token_ids).repeat_interleave(3))
