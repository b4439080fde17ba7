"""Which replica has seen which prompt beginnings lately: what is probably in its prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from actors.routing.fingerprint import block_tokens

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
