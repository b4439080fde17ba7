"""What a prompt begins with, as a chain of block hashes: two prompts share as many hashes as blocks they start with.

Computed where requests are routed, so it knows neither tokenizer nor chat template: it hashes what the client sent.

Which replica has seen which prompt beginnings lately: what is probably in its prefix cache.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
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


DEFAULT_CAPACITY_TOKENS = 1 << 20
"""Of a replica that has not said how much its KV cache holds."""


class PrefixIndex:
    """Per replica a set of block hashes in order of use, bounded by the tokens that its KV cache holds.

    It is a guess: nobody tells the router what an engine evicts. A wrong one costs a prefill, never an answer.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, OrderedDict[int, int]] = {}
        """By replica: tokens of each block, by its hash, longest unused first."""

        self._tokens: dict[str, int] = {}
        self._capacities: dict[str, int] = {}

    def insert(self, replica: str, fingerprint: Sequence[int]) -> None:
        """The replica is given a prompt that begins so."""
        blocks = self._blocks.setdefault(replica, OrderedDict())
        # Last block first, so that a chain is forgotten from its end: without its beginning it matches nothing.
        for number in range(len(fingerprint) - 1, -1, -1):
            block = fingerprint[number]
            if block in blocks:
                blocks.move_to_end(block)
            else:
                blocks[block] = block_tokens(number)
                self._tokens[replica] = self._tokens.get(replica, 0) + block_tokens(number)
        self._evict(replica)

    def match(self, fingerprint: Sequence[int]) -> dict[str, int]:
        """Tokens at the prompt's beginning that each replica has probably cached; replicas with none are left out."""
        found = {}
        for replica, blocks in self._blocks.items():
            tokens = 0
            for number, block in enumerate(fingerprint):
                if block not in blocks:
                    break
                tokens += block_tokens(number)
            if tokens:
                found[replica] = tokens
        return found

    def set_capacity(self, replica: str, tokens: int) -> None:
        """tokens: what the replica's KV cache holds."""
        self._capacities[replica] = tokens
        self._evict(replica)

    def forget(self, replica: str) -> None:
        """The replica is gone, and its cache with it."""
        for table in (self._blocks, self._tokens, self._capacities):
            table.pop(replica, None)

    def num_tokens(self, replica: str) -> int:
        return self._tokens.get(replica, 0)

    def _evict(self, replica: str) -> None:
        blocks, capacity = self._blocks.get(replica), self._capacities.get(replica, DEFAULT_CAPACITY_TOKENS)
        while blocks and self._tokens[replica] > capacity:
            self._tokens[replica] -= blocks.popitem(last=False)[1]
