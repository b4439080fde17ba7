"""Coupled noise and uniforms in Triton, by its own Philox: the same bits as `philox.py` and `gumbel.py`."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from actors.verification.noise import Role

ACCEPT, RESIDUAL = tl.constexpr(int(Role.ACCEPT)), tl.constexpr(int(Role.RESIDUAL))
COUPLED, COUPLED_FINE = tl.constexpr(int(Role.COUPLED)), tl.constexpr(int(Role.COUPLED_FINE))


@triton.jit
def philox_words(seed, block, position, role, round_start):
    """Four uint32 words for each entry of `block` (uint32). seed: int64; position, role, round_start: integers.

    ``tl.philox`` is Philox4x32-10 with the seed's low and high words as the key: the words of `philox.words`.
    """
    zeros = tl.zeros_like(block)
    place, start = position.to(tl.uint32) + zeros, round_start.to(tl.uint32) + zeros
    return tl.philox(seed, block, place, zeros + role, start)


@triton.jit
def accept_noise(seed, position, round_start):
    """float32 scalar in (0, 1)."""
    block = tl.full([1], 0, tl.uint32)
    w0, _w1, _w2, _w3 = philox_words(seed, block, position, ACCEPT, round_start)
    return tl.max(((w0 >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07, axis=0)  # 2**-23


@triton.jit
def residual_noise(seed, position, round_start):
    """float64 scalar in (0, 1)."""
    block = tl.full([1], 0, tl.uint32)
    w0, w1, _w2, _w3 = philox_words(seed, block, position, RESIDUAL, round_start)
    bits = (w0.to(tl.int64) << 20) | (w1.to(tl.int64) >> 12)
    return tl.max((bits.to(tl.float64) + 0.5) * 2.220446049250313e-16, axis=0)  # 2**-52


@triton.jit
def leading_bytes(seed, position, start, TILE: tl.constexpr):
    """int32 [TILE]: the leading byte of tokens start .. start + TILE; start is a multiple of 16."""
    block = (start // 16 + tl.arange(0, TILE // 16)).to(tl.uint32)
    w0, w1, w2, w3 = philox_words(seed, block, position, COUPLED, tl.full([1], 0, tl.uint32))
    packed = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [TILE // 4])
    shift = (tl.arange(0, 4) * 8).to(tl.uint32)
    return tl.reshape((packed[:, None] >> shift[None, :]) & 0xFF, [TILE]).to(tl.int32)


@triton.jit
def leading_bytes_of(seed, position, token):
    """int32 [N]: the leading byte of each of N tokens, int32, wherever they lie. A Philox block a token."""
    block = (token // 16).to(tl.uint32)
    w0, w1, w2, w3 = philox_words(seed, block, position, COUPLED, tl.full([1], 0, tl.uint32))
    lane = (token // 4) % 4
    word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    return ((word >> ((token % 4) * 8).to(tl.uint32)) & 0xFF).to(tl.int32)


@triton.jit
def gumbel(seed, position, token, leading):
    """float32 scalar g of one token, given its leading byte (int32 scalar)."""
    block = (token // 4).to(tl.uint32) + tl.full([1], 0, tl.uint32)
    w0, w1, w2, w3 = philox_words(seed, block, position, COUPLED_FINE, tl.full([1], 0, tl.uint32))
    lane = token % 4
    fine = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    word = (leading.to(tl.int64) << 24) | (fine.to(tl.int64) >> 8)
    v = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2**-32
    return tl.max((-tl.log(-tl.log(1.0 - v))).to(tl.float32), axis=0)
