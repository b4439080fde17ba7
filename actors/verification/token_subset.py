"""Logits of some tokens only: which, and where each stands."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

TOKENS_PER_BLOCK = 16
"""Tokens whose leading bytes of noise one Philox block gives. See gumbel.py."""


class TokenSubset:
    """Which tokens the columns of logits stand for, when they are not the whole vocabulary. Noise belongs to tokens, so
    a choice among some is the choice among all with the others forbidden.

    ids: int64 [N], in any order, none twice. `blocks`, `place` and `column` are the CPU's: they find a column's leading
    byte, and a byte's column, without a look at the bytes of other tokens.
    """

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    @cached_property
    def blocks(self) -> Tensor:
        """int64 [M], ascending: the blocks of leading bytes that the tokens lie in."""
        block = self.ids.numpy() // TOKENS_PER_BLOCK
        present = np.zeros(int(block.max(initial=-1)) + 1, dtype=np.bool_)
        present[block] = True
        return torch.from_numpy(np.flatnonzero(present))

    @cached_property
    def place(self) -> Tensor:
        """int64 [N]: where each column's byte stands among the bytes of `blocks`."""
        ids, blocks = self.ids.numpy(), self.blocks.numpy()
        rank = np.empty(int(blocks.max(initial=-1)) + 1, dtype=np.int64)
        rank[blocks] = np.arange(0, len(blocks) * TOKENS_PER_BLOCK, TOKENS_PER_BLOCK)
        return torch.from_numpy(rank[ids // TOKENS_PER_BLOCK] + ids % TOKENS_PER_BLOCK)

    @cached_property
    def column(self) -> Tensor:
        """int64 [16 M]: the column of each byte of `blocks`, -1 where its token is none of these."""
        column = np.full(len(self.blocks) * TOKENS_PER_BLOCK, -1)
        column[self.place.numpy()] = np.arange(len(self.ids))
        return torch.from_numpy(column)

    def columns_of(self, tokens: Tensor) -> Tensor:
        """Where some tokens stand: int64 [E], N for one that is none of these. tokens: int64 [E]. No host sync."""
        if self.ids.device.type == "cpu":
            blocks, block = self.blocks, tokens // TOKENS_PER_BLOCK
            rank = torch.searchsorted(blocks, block).clamp_max(len(blocks) - 1)
            columns = self.column[rank * TOKENS_PER_BLOCK + tokens % TOKENS_PER_BLOCK]
            exists = (blocks[rank] == block) & (columns >= 0)
        else:
            ordered, order = self.ids.sort()
            rank = torch.searchsorted(ordered, tokens).clamp_max(len(ordered) - 1)
            columns, exists = order[rank], ordered[rank] == tokens
        return torch.where(exists, columns, len(self.ids))
