"""Coupled Gumbel noise (Daliri, Musco, Suresh 2024, arXiv 2408.07978).

The token at position t is argmax_x(log p_t(x) + g_t(x)), the g independent standard Gumbel, a function of (seed, t, x)
alone. Target and drafter look at the same g, so they often choose alike; yet each choice is distributed as it should
(Gumbel-max), and the target's does not depend on the drafter at all.

g(x) = -log(-log(1 - v)), v = (word(x) + 0.5) / 2**32. A small word wins. The word's leading 8 bits come from stream
COUPLED, one Philox block for 16 tokens, the other 24 from COUPLED_FINE, one block for 4. The leading bits alone bound
g: below 5.55 unless they are all 0, so all but about 1/256 of a vocabulary is ruled out at a sixteenth of a block each.

1 - v is exact in float64, so one float64 logarithm keeps full precision at both ends, and the float32 result differs
by at most one unit in the last place between devices.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actors.verification.philox import MASK32, Role, words
from actors.verification.token_subset import TOKENS_PER_BLOCK

MAX_GUMBEL = 22.88
"""Above every g: word 0 gives 22.8739."""

MAX_GUMBEL_ORDINARY = 5.55
"""Above every g whose leading byte is not 0: word 2**24 gives 5.5432."""

MAX_BELOW_ZERO = 3.14
"""g is above minus this: word 2**32 - 1 gives -3.1300."""

# Bounds of g by the leading byte alone, 1e-3 apart from it for rounding: v is between byte / 256 and one more.
_EDGES = -np.log(-np.log1p(-np.arange(1, 256) / 256))
UPPER = np.concatenate([[MAX_GUMBEL], _EDGES + 1e-3]).astype(np.float32)
LOWER = np.concatenate([_EDGES - 1e-3, [-MAX_BELOW_ZERO]]).astype(np.float32)
"""float32 [256]: every g whose leading byte is b lies between LOWER[b] and UPPER[b]."""


def leading_bytes(seed: Tensor, position: Tensor, vocab_size: int, blocks: Tensor | None = None) -> Tensor:
    """The leading 8 bits of every token's word. seed, position: int64 [R]. Returns uint8 [R, V rounded up to 16]; of
    some blocks of 16 tokens, int64 [M], [R, 16 M]."""
    if blocks is None:
        blocks = torch.arange(-(-vocab_size // TOKENS_PER_BLOCK), device=seed.device)
    packed = torch.empty(len(seed), len(blocks), 4, dtype=torch.int32, device=seed.device)
    four = words(seed.unsqueeze(1), Role.COUPLED, position.unsqueeze(1), blocks.unsqueeze(0))
    for i, word in enumerate(four):
        packed[..., i] = word  # wraps around
    # Token x has byte x % 16 of its block, from the lowest byte of the first word. Every device is little endian.
    return packed.view(torch.uint8).flatten(1)


def leading_zeros(leading: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Rows and tokens, int64 [N] each, whose leading byte is 0: large noise. leading: what `leading_bytes` gives."""
    width = leading.shape[1]
    if leading.device.type == "cpu":
        # A third of torch's nonzero.
        flat = torch.from_numpy(np.flatnonzero(leading.numpy() == 0))
    else:
        flat = (leading.flatten() == 0).nonzero().squeeze(1)
    row, token = flat // width, flat % width
    if width == vocab_size:
        return row, token
    exists = token < vocab_size
    return row[exists], token[exists]


def gumbel(seed: Tensor, position: Tensor, token: Tensor, leading: Tensor | None = None) -> Tensor:
    """float32 g(x). seed, position, token: int64 [N]. leading: the leading bytes, int64 [N], if they are known."""
    if leading is None:
        four = torch.stack(words(seed, Role.COUPLED, position, token >> 4))
        word = four.gather(0, ((token >> 2) & 3).unsqueeze(0)).squeeze(0)
        leading = (word >> (8 * (token & 3))) & 0xFF
    fine = torch.stack(words(seed, Role.COUPLED_FINE, position, token >> 2))
    fine = fine.gather(0, (token & 3).unsqueeze(0)).squeeze(0)
    return gumbel_from_word((leading << 24) | (fine >> 8))


def gumbel_from_word(word: Tensor) -> Tensor:
    """word: int64 in [0, 2**32). Returns float32, between -3.1300 and 22.8739."""
    v = ((word & MASK32).to(torch.float64) + 0.5) * 2.0**-32
    return (-torch.log(-torch.log(1.0 - v))).to(torch.float32)
