"""Coupled Gumbel noise, and the token it chooses (Daliri, Musco, Suresh 2024, arXiv 2408.07978).

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

import math

import numpy as np
import torch
from torch import Tensor

from actors.verification.philox import MASK32, Role, words
from actors.verification.tiles import at_least, search_maxima

MAX_GUMBEL = 22.88
"""Above every g: word 0 gives 22.8739."""

MAX_GUMBEL_ORDINARY = 5.55
"""Above every g whose leading byte is not 0: word 2**24 gives 5.5432."""

TOKENS_PER_BLOCK = 16
MAX_BELOW_ZERO = 3.14
"""g is above minus this: word 2**32 - 1 gives -3.1300."""

CHUNK_ELEMENTS = 1 << 19  # so that a chunk's intermediate values stay in cache
FEW_TOKENS = 256


def leading_bytes(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """The leading 8 bits of every token's word. seed, position: int64 [R]. Returns uint8 [R, V rounded up to 16]."""
    blocks = torch.arange(-(-vocab_size // TOKENS_PER_BLOCK), device=seed.device).unsqueeze(0)
    packed = torch.empty(len(seed), blocks.shape[1], 4, dtype=torch.int32, device=seed.device)
    for i, word in enumerate(words(seed.unsqueeze(1), Role.COUPLED, position.unsqueeze(1), blocks)):
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


def coupled_choice(
    logits: Tensor,
    temperature: Tensor,
    threshold: Tensor | None,
    row_max: Tensor,
    seed: Tensor,
    position: Tensor,
    few_tokens: bool = False,
    maxima: Tensor | None = None,
) -> Tensor:
    """argmax_x(logits(x) / temperature + g(x)) over the tokens at or above the threshold; the lowest id among equals.

    logits: float32 [R, V]. temperature (above 0), threshold, row_max: float32 [R]; threshold is in units of logits.
    row_max: the largest logit; a row where it is not finite gets a defined, meaningless choice.
    seed, position: int64 [R]. few_tokens: the caller knows that few tokens of a row are at or above the threshold.
    maxima: what `search_maxima` gives, if the caller has it. Returns int64 [R]. A row's choice does not depend on the
    other rows.

    Finds candidates with `nonzero`: no cost on the CPU, a host sync on a GPU, where the Triton kernel is used.
    """
    rows, vocab_size = logits.shape
    if rows == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    floor = torch.full_like(row_max, -math.inf) if threshold is None else threshold
    if maxima is None:
        maxima = search_maxima(logits)
    if few_tokens or vocab_size <= FEW_TOKENS:
        row, token = at_least(logits, maxima, floor)
        score = logits[row, token] / temperature[row] + gumbel(seed[row], position[row], token)
        return _best(row, token, score, rows, vocab_size)

    # The likeliest token gives a first bound, the tokens with the largest noise a better one; what is left must come
    # within MAX_GUMBEL_ORDINARY of it.
    step = max(1, CHUNK_ELEMENTS // vocab_size)
    zeros = []
    for start in range(0, rows, step):
        leading = leading_bytes(seed[start : start + step], position[start : start + step], vocab_size)
        row, token = leading_zeros(leading, vocab_size)
        zeros.append((row + start if start else row, token))
    row, token = zeros[0] if len(zeros) == 1 else (torch.cat(part) for part in zip(*zeros, strict=True))
    best = row_max / temperature - MAX_BELOW_ZERO
    slack = row_max.abs() * 1e-6 + 1e-6  # several units in the last place of the largest logit, for rounding
    value = logits[row, token]
    reach = value >= torch.maximum(floor, (best - MAX_GUMBEL) * temperature - slack)[row]
    row, token, value = row[reach], token[reach], value[reach]
    score = value / temperature[row] + gumbel(seed[row], position[row], token, torch.zeros_like(token))
    best = best.scatter_reduce(0, row, score, "amax")
    bound = torch.maximum(floor, (best - MAX_GUMBEL_ORDINARY) * temperature - slack)
    row_2, token_2 = at_least(logits, maxima, bound)
    # Bytes of one chunk are at hand; of many, they would have taken more memory than the few are worth.
    known = leading[row_2, token_2].to(torch.int64) if len(zeros) == 1 else None
    noise_2 = gumbel(seed[row_2], position[row_2], token_2, known)
    score_2 = logits[row_2, token_2] / temperature[row_2] + noise_2
    return _best(torch.cat([row, row_2]), torch.cat([token, token_2]), torch.cat([score, score_2]), rows, vocab_size)


def _best(row: Tensor, token: Tensor, score: Tensor, rows: int, vocab_size: int) -> Tensor:
    """For each row the token of the best score, the lowest id among equals. row, token, score: [N]."""
    best = torch.full((rows,), -math.inf, device=score.device).scatter_reduce(0, row, score, "amax")
    token = torch.where(score == best[row], token, vocab_size)
    choice = torch.full((rows,), vocab_size, device=score.device).scatter_reduce(0, row, token, "amin")
    return choice.clamp_max(vocab_size - 1)
