"""Mutations of a serialised message: some still decode, as something else; most do not."""

from __future__ import annotations

import random
from collections.abc import Callable


def mutated(rng: random.Random, data: bytes) -> bytes:
    """One to three mutations, one after the other."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = rng.choice(MUTATIONS)(rng, data)
    return data


def _flip_bits(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _insert_noise(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.choice((1, 4, 64))) + data[at:]


def _repeat_a_slice(rng: random.Random, data: bytes) -> bytes:
    start, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    return data[:end] + data[start:end] * rng.choice((1, 3)) + data[end:]


def _spoil_utf8(rng: random.Random, data: bytes) -> bytes:
    """A byte that no UTF-8 text has, in the middle of whatever is there."""
    if not data:
        return b"\x1a\x01\xff"  # field 3, one byte
    changed = bytearray(data)
    changed[rng.randrange(len(changed))] = rng.choice((0xC0, 0xFE, 0xFF))
    return bytes(changed)


def _spoil_utf8_of_a_text(rng: random.Random, data: bytes) -> bytes:
    """Lengths stay right: only the text is wrong."""
    return data + bytes([rng.choice((0x0A, 0x12, 0x1A)), 2, 0xC3, 0x28])


def _unknown_fields(rng: random.Random, data: bytes) -> bytes:
    number = rng.choice((1000, 19_999, 2**29 - 1))
    return data + _varint(number << 3 | 2) + b"\x03abc" + _varint(number << 3) + _varint(2**64 - 1)


def _lie_about_a_length(rng: random.Random, data: bytes) -> bytes:
    return data + b"\x1a" + _varint(rng.choice((127, 2**20, 2**31 - 1, 2**32, 2**63))) + b"abc"


def _endless_varint(rng: random.Random, data: bytes) -> bytes:
    return data + b"\x40" + b"\xff" * rng.choice((9, 10, 11, 100))


def _groups(rng: random.Random, data: bytes) -> bytes:
    """Groups, which nobody uses any more, nested up to and beyond what decoders follow."""
    depth = rng.choice((1, 50, 200, 10_000))
    return data + b"\x0b" * depth + b"\x0c" * depth


def _nested_messages(rng: random.Random, data: bytes) -> bytes:
    """Field 1 in field 1 in field 1 …: deeper than decoders follow."""
    nested = b""
    for _ in range(rng.choice((20, 99, 101, 300))):
        nested = b"\x0a" + _varint(len(nested)) + nested
    return data + nested


def _wrong_wire_types(rng: random.Random, data: bytes) -> bytes:
    return data + b"".join(
        bytes([rng.randrange(1, 16) << 3 | rng.choice((0, 1, 5, 6, 7))]) + rng.randbytes(8) for _ in "ab"
    )


def _noise(rng: random.Random, data: bytes) -> bytes:
    return rng.randbytes(rng.choice((1, 10, 1000)))


MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _flip_bits,
    _truncate,
    _insert_noise,
    _repeat_a_slice,
    _spoil_utf8,
    _spoil_utf8_of_a_text,
    _unknown_fields,
    _lie_about_a_length,
    _endless_varint,
    _groups,
    _nested_messages,
    _wrong_wire_types,
    _noise,
)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
