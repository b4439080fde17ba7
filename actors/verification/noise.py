"""Generates the noise of all draws from counters: Philox words, uniforms, and coupled Gumbel noise.

The generator is Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
It uses integer arithmetic up to the last conversion, so integers and uniforms have the same bits on every device and in
Triton.

The key is the request's seed, 64 bits. The counter has four words of 32 bits: index // 4, position, role, round start.

`position` is the token's position in the sequence, prompt included. `round_start` is the position of the first token
of the round, and it makes the noise of every round fresh. Without it, block verification would be biased: the number of
accepted drafts depends on all of them, so a draft that was cut off has revealed something about its noise, and the next
round must not use that noise again at the same position. Coupled noise has round_start 0, since it must not depend on
where a round began.

Coupled Gumbel noise (Daliri, Musco, Suresh 2024, arXiv 2408.07978): the token at position t is
argmax_x(log p_t(x) + g_t(x)), where the g are independent standard Gumbel and depend on (seed, t, x) alone. Target and
drafter use the same g, so they often choose alike. Each choice still has its own distribution (Gumbel-max), and the
target's does not depend on the drafter at all.

g(x) = -log(-log(1 - v)), v = (word(x) + 0.5) / 2**32, so a small word gives a large g. The word's leading 8 bits come
from stream COUPLED, one Philox block for 16 tokens, the other 24 from COUPLED_FINE, one block for 4. The leading bits
alone bound g: it is below 5.55 unless they are all 0, which rules out all but about 1/256 of a vocabulary.

1 - v is exact in float64, so one float64 logarithm keeps full precision at both ends, and the float32 result differs
by at most one unit in the last place between devices.
"""

from __future__ import annotations

import enum
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
UNTIL_MIXED = 4
"""Rounds after which every word depends on all inputs. Before, a word may have fewer dimensions than the result."""

MASK32 = 0xFFFFFFFF

TOKENS_PER_BLOCK = 16
"""Tokens whose leading bytes come from one Philox block."""

MAX_GUMBEL = 22.88
"""Upper bound of g. Word 0 gives 22.8739."""

MAX_GUMBEL_ORDINARY = 5.55
"""Upper bound of g where the leading byte is not 0. Word 2**24 gives 5.5432."""

MAX_BELOW_ZERO = 3.14
"""Lower bound of g, negated. Word 2**32 - 1 gives -3.1300."""

# v is between byte / 256 and (byte + 1) / 256; 1e-3 allows for rounding.
_EDGES = -np.log(-np.log1p(-np.arange(1, 256) / 256))
UPPER = np.concatenate([[MAX_GUMBEL], _EDGES + 1e-3]).astype(np.float32)
LOWER = np.concatenate([_EDGES - 1e-3, [-MAX_BELOW_ZERO]]).astype(np.float32)
"""float32 [256]: every g whose leading byte is b lies between LOWER[b] and UPPER[b]."""


class Role(enum.IntEnum):
    """Names what noise is for. Streams of different roles are independent."""

    ACCEPT = 1
    RESIDUAL = 2
    """The last token of a round when it is sampled: residual after a rejection, or the bonus token."""

    DRAFT = 3
    COUPLED = 4
    """The leading bits of the coupled Gumbel noise."""

    COUPLED_FINE = 5


Word: TypeAlias = Tensor | int
Words: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> Words:
    """Returns four words of 32 bits for each counter, as int64 tensors with values in [0, 2**32).

    counter, key: int64 tensors of one dimension or more that broadcast together (at least one is a tensor), or ints;
    values in [0, 2**32).
    """
    device = next(word.device for word in (*counter, *key) if isinstance(word, Tensor))
    if device.type == "cpu":
        # numpy takes a third of torch's time where there are few counters.
        arrays = [word.numpy() if isinstance(word, Tensor) else np.array([word]) for word in (*counter, *key)]
        w0, w1, w2, w3 = _rounds(*arrays)
        return torch.from_numpy(w0), torch.from_numpy(w1), torch.from_numpy(w2), torch.from_numpy(w3)
    # torch.full writes the number by a kernel; a copy from the host would wait for the device.
    return _rounds(
        *(word if isinstance(word, Tensor) else torch.full((), word, device=device) for word in (*counter, *key))
    )


def _rounds(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, Any, Any, Any]:
    """Computes the ten rounds on int64 arrays or tensors, and changes no argument."""
    for i in range(ROUNDS):
        # int64 wraps around: the low 64 bits of the product are right, and the mask undoes the arithmetic shift.
        # c1, c3 and the keys have wrong bits above bit 31, which a later mask clears.
        if i < UNTIL_MIXED:
            product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
            c0 = ((product_1 >> 32) ^ c1 ^ k0) & MASK32
            c2 = ((product_0 >> 32) ^ c3 ^ k1) & MASK32
            c1, c3 = product_1, product_0
        else:
            c0 *= MULTIPLIER_0
            c2 *= MULTIPLIER_1
            c1 ^= c2 >> 32
            c1 ^= k0
            c1 &= MASK32
            c3 ^= c0 >> 32
            c3 ^= k1
            c3 &= MASK32
            c0, c1, c2, c3 = c1, c2, c3, c0
        k0, k1 = k0 + WEYL_0, k1 + WEYL_1
    return c0, c1 & MASK32, c2, c3 & MASK32


def split_seed(seed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the two key words of a seed, an int64 that may be negative."""
    return seed & MASK32, (seed >> 32) & MASK32


def words(seed: Tensor, role: Role | Tensor, position: Tensor, block: Word = 0, round_start: Word = 0) -> Words:
    """Returns the four words of one counter block. All arguments are int64 and broadcast together."""
    role = role if isinstance(role, Tensor) else int(role)
    return philox4x32((block & MASK32, position & MASK32, role, round_start & MASK32), split_seed(seed))


def uniform64(seed: Tensor, role: Role, position: Tensor, round_start: Word = 0) -> Tensor:
    """Returns float64 uniforms in (0, 1). seed, position, round_start: int64, broadcast together."""
    high, low, _, _ = words(seed, role, position, 0, round_start)
    return to_uniform64(high, low)


def to_uniform(word: Tensor) -> Tensor:
    """Converts words, int64 in [0, 2**32), to float32 in (0, 1), never 0 or 1, by their leading 23 bits."""
    return ((word >> 9).to(torch.float32) + 0.5) * 2.0**-23


def to_uniform64(high: Tensor, low: Tensor) -> Tensor:
    """Converts pairs of words, int64 in [0, 2**32), to float64 in (0, 1), by their leading 52 bits.

    That is fine enough to invert a distribution function over a whole vocabulary; 23 bits would never reach tokens with
    less than 1e-7.
    """
    return (((high << 20) | (low >> 12)).to(torch.float64) + 0.5) * 2.0**-52


def leading_bytes(seed: Tensor, position: Tensor, vocab_size: int, blocks: Tensor | None = None) -> Tensor:
    """Returns the leading 8 bits of every token's word, uint8 [R, V rounded up to 16].

    seed, position: int64 [R]. blocks: int64 [M], only these blocks of 16 tokens; the result is [R, 16 M] then.
    """
    if blocks is None:
        blocks = torch.arange(-(-vocab_size // TOKENS_PER_BLOCK), device=seed.device)
    packed = torch.empty(len(seed), len(blocks), 4, dtype=torch.int32, device=seed.device)
    four = words(seed.unsqueeze(1), Role.COUPLED, position.unsqueeze(1), blocks.unsqueeze(0))
    for i, word in enumerate(four):
        packed[..., i] = word  # wraps around
    # Token x has byte x % 16 of its block, counted from the lowest byte of the first word (little endian).
    return packed.view(torch.uint8).flatten(1)


def gumbel(seed: Tensor, position: Tensor, token: Tensor, leading: Tensor | None = None) -> Tensor:
    """Returns g(x), float32 [N]. seed, position, token: int64 [N]; leading: int64 [N], the leading bytes if known."""
    if leading is None:
        four = torch.stack(words(seed, Role.COUPLED, position, token >> 4))
        word = four.gather(0, ((token >> 2) & 3).unsqueeze(0)).squeeze(0)
        leading = (word >> (8 * (token & 3))) & 0xFF
    fine = torch.stack(words(seed, Role.COUPLED_FINE, position, token >> 2))
    fine = fine.gather(0, (token & 3).unsqueeze(0)).squeeze(0)
    return gumbel_from_word((leading << 24) | (fine >> 8))


def gumbel_from_word(word: Tensor) -> Tensor:
    """Converts words, int64 in [0, 2**32), to g, float32 between -3.1300 and 22.8739."""
    v = ((word & MASK32).to(torch.float64) + 0.5) * 2.0**-32
    return (-torch.log(-torch.log(1.0 - v))).to(torch.float32)
