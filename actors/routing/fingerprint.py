"""What a prompt begins with, as a chain of block hashes: two prompts share as many hashes as blocks they start with.

Computed where requests are routed, so it knows neither tokenizer nor chat template: it hashes what the client sent.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

BYTES_PER_TOKEN = 4
"""Of text, roughly; of a token id, exactly."""

BLOCK_SIZES = ((64, 128), (64, 1024), (64, 8192))
"""(blocks, bytes each), in order: fine at first, where prompts differ, coarse later. What lies beyond is not looked
at."""

_BLOCK_BYTES = tuple(size for count, size in BLOCK_SIZES for _ in range(count))
MAX_BYTES = sum(_BLOCK_BYTES)


def block_tokens(block: int) -> int:
    """Tokens in a block, by its place in the chain."""
    return _BLOCK_BYTES[block] // BYTES_PER_TOKEN


def text_fingerprint(text: str) -> tuple[int, ...]:
    """Of a prompt that is raw text."""
    return _chain(b"text", text[:MAX_BYTES].encode(errors="surrogatepass"))


def token_fingerprint(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Of a prompt that is token ids. Raises OverflowError for one that is no 32-bit number."""
    return _chain(b"ids", array("I", token_ids[: MAX_BYTES // BYTES_PER_TOKEN]).tobytes())


def chat_fingerprint(messages: Iterable[tuple[str, str]], preamble: str = "") -> tuple[int, ...]:
    """Of a conversation: (role, content) by message. preamble: what else goes into the template's beginning, such as
    the tools."""
    parts, length = [preamble], len(preamble)
    for role, content in messages:
        parts += [role, content]
        length += len(role) + len(content)
        if length > MAX_BYTES:
            break
    return _chain(b"chat", "\0".join(parts)[:MAX_BYTES].encode(errors="surrogatepass"))


def _chain(kind: bytes, data: bytes) -> tuple[int, ...]:
    """One hash per whole block, each over all that comes before it. A last block that is not full is left out: how it
    would go on decides whether it is shared."""
    chain, parent, start = [], kind, 0
    for size in _BLOCK_BYTES:
        if start + size > len(data):
            break
        parent = blake2b(parent + data[start : start + size], digest_size=8).digest()
        chain.append(int.from_bytes(parent, "little"))
        start += size
    return tuple(chain)
