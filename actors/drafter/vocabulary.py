"""Selects the token ids that the drafter's output head is cut to: a fixed number of slots, a token in each. Pure.

Cutting the head is exact, since q only has a smaller support; which tokens are in it decides how many drafts are
accepted. At first these are the tokens that the drafter was trained on, where its checkpoint says which, then the
lowest ids: in a BPE vocabulary the earliest and so most frequent merges. Then it follows the text: the tokens of open
prompts are held, a committed token that is missing enters at once, and the token in least use leaves.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

VOCABULARY_FILE = "draft_vocabulary.json"
"""A checkpoint's file, written by `outrider distill`: a list of the ids that the drafter was trained on."""

HALF_LIFE_TOKENS = 1 << 18
_RESCALE_AT = 2.0**512
"""Weights of later tokens grow instead of those of earlier ones shrinking, so only the counted one changes. float64
ends at 2**1024."""


def trained_on(checkpoint: str) -> list[int]:
    """Returns the ids that a checkpoint was trained on; [] where it does not say. Raises ValueError."""
    file = Path(checkpoint) / VOCABULARY_FILE
    if not file.is_file():
        return []
    try:
        ids = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is not readable: {error}") from None
    if (
        not isinstance(ids, list)
        or not all(type(each) is int and each >= 0 for each in ids)
        or len(set(ids)) < len(ids)
    ):
        raise ValueError(f"{file} is no list of different token ids")
    return ids


class DraftVocabulary:
    """Keeps the tokens in use in a fixed number of slots. A replacement changes one row of the head and moves none.

    vocab_size: tokens of the full vocabulary; ids from there on are passed over. num_slots: tokens of the cut one.
    always: ids that never leave, such as end tokens. at_first: ids that are in it before any lower one, as many as find
    room. half_life_tokens: committed tokens after which a use counts half.
    """

    def __init__(
        self,
        vocab_size: int,
        num_slots: int,
        always: Iterable[int] = (),
        half_life_tokens: int = HALF_LIFE_TOKENS,
        at_first: Iterable[int] = (),
    ) -> None:
        fixed = set(always)
        if not 0 < num_slots <= vocab_size:
            raise ValueError(f"num_slots: {num_slots} is not in 1 to {vocab_size}, the size of the vocabulary")
        if half_life_tokens < 1:
            raise ValueError(f"half_life_tokens: {half_life_tokens} is not positive")
        if len(fixed) > num_slots:
            raise ValueError(f"always: {len(fixed)} ids do not fit in {num_slots} slots; raise num_slots")
        if any(not 0 <= token < vocab_size for token in fixed):
            raise ValueError(f"always: an id is not in 0 to {vocab_size - 1}")
        self.vocab_size, self.num_slots = vocab_size, num_slots
        self.num_observed = 0
        self.num_missed = 0
        """Observed tokens that were not in the vocabulary when they came, so they could not have been drafted."""

        preferred = [token for token in at_first if 0 <= token < vocab_size]
        others = (token for token in dict.fromkeys([*preferred, *range(vocab_size)]) if token not in fixed)
        first = sorted([*fixed, *itertools.islice(others, num_slots - len(fixed))])
        self._token_of = first
        self._slot_of = {token: slot for slot, token in enumerate(first)}
        self._weight = [0.0] * num_slots
        self._increment, self._growth = 1.0, 2.0 ** (1.0 / half_life_tokens)
        self._pinned_by: dict[Hashable, set[int]] = {}
        self._pins: dict[int, int] = {}
        self._waiting: dict[int, None] = {}
        """Pinned tokens without a slot, the earliest first."""

        # One entry for every token that may go, and for some that are pinned: (weight when it was last looked at, -id),
        # so that the highest of the unused ids goes first. Weights only grow, so a stale entry comes too early and is
        # put right then.
        self._heap = [(0.0, -token) for token in reversed(first) if token not in fixed]
        self._off_heap: set[int] = set()
        """Slots of pinned tokens without an entry."""

        self._changes: dict[int, int] = {}

    @property
    def token_ids(self) -> list[int]:
        """The token of each slot."""
        return list(self._token_of)

    def __len__(self) -> int:
        return self.num_slots

    def __contains__(self, token_id: int) -> bool:
        return token_id in self._slot_of

    def limit(self, size: int) -> None:
        """Removes the ids from `size` on for good.

        Raises:
            ValueError: fewer tokens than slots would be left. Nothing has changed.
        """
        if size >= self.vocab_size:
            return
        if size < self.num_slots:
            raise ValueError(f"{self.num_slots} slots, and only {size} tokens to fill them")
        self.vocab_size = size
        leaving = [token for token in self._slot_of if token >= size]
        came_in = (token for token in range(size) if token not in self._slot_of)
        replaced = list(zip(leaving, came_in, strict=False))
        for gone, token in replaced:
            slot = self._slot_of.pop(gone)
            self._off_heap.discard(slot)
            self._token_of[slot], self._slot_of[token] = token, slot
            self._weight[slot], self._changes[slot] = 0.0, token
            self._waiting.pop(token, None)
        self._heap = [entry for entry in self._heap if -entry[1] < size]
        self._heap += [(0.0, -token) for _, token in replaced]
        heapq.heapify(self._heap)
        for token in [token for token in self._waiting if token >= size]:
            del self._waiting[token]

    def pin(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """Holds a sequence's tokens until unpin(key). Those without a slot wait for one, earlier ones first. A key that
        is pinned already is unpinned first."""
        self.unpin(key)
        self.pin_more(key, token_ids)

    def pin_more(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """Holds these tokens of the sequence too."""
        held = self._pinned_by.setdefault(key, set())
        distinct = [t for t in dict.fromkeys(token_ids) if 0 <= t < self.vocab_size and t not in held]
        held.update(distinct)
        for token in distinct:
            self._pins[token] = self._pins.get(token, 0) + 1
        for token in distinct:
            slot = self._slot_of.get(token)
            if slot is not None:
                self._weight[slot] += self._increment
            elif token not in self._waiting and not self._take_in(token):
                self._waiting[token] = None

    def unpin(self, key: Hashable) -> None:
        """Releases the tokens of a closed sequence. A key that is not pinned is ignored."""
        for token in self._pinned_by.pop(key, ()):
            self._pins[token] -= 1
            if self._pins[token]:
                continue
            del self._pins[token]
            self._waiting.pop(token, None)
            slot = self._slot_of.get(token)
            if slot is not None and slot in self._off_heap:
                self._off_heap.discard(slot)
                heapq.heappush(self._heap, (self._weight[slot], -token))
        came_in = []
        for token in self._waiting:
            if not self._take_in(token):
                break
            came_in.append(token)
        for token in came_in:
            del self._waiting[token]

    def observe(self, token_ids: Sequence[int]) -> None:
        """Counts tokens that the target committed, in their order."""
        slot_of, weight = self._slot_of, self._weight
        for token in token_ids:
            self._increment *= self._growth
            if self._increment > _RESCALE_AT:
                self._rescale()
            slot = slot_of.get(token)
            if slot is not None:
                weight[slot] += self._increment
            elif 0 <= token < self.vocab_size:
                self.num_missed += 1
                self._take_in(token)
        self.num_observed += len(token_ids)

    def take_changes(self) -> list[tuple[int, int]]:
        """Returns (slot, token id) of every slot replaced since the last call: the rows of the head to copy."""
        changes, self._changes = list(self._changes.items()), {}
        return changes

    def _take_in(self, token: int) -> bool:
        """Replaces the token in least use and counts one use. Returns False when none may leave."""
        slot = self._free_a_slot()
        if slot is None:
            return False
        del self._slot_of[self._token_of[slot]]
        self._token_of[slot] = token
        self._slot_of[token] = slot
        self._weight[slot] = self._increment
        self._changes[slot] = token
        if token in self._pins:
            self._off_heap.add(slot)
        else:
            heapq.heappush(self._heap, (self._increment, -token))
        return True

    def _free_a_slot(self) -> int | None:
        heap = self._heap
        while heap:
            seen, negative = heap[0]
            slot = self._slot_of[-negative]
            if -negative in self._pins:
                heapq.heappop(heap)
                self._off_heap.add(slot)
            elif self._weight[slot] > seen:
                heapq.heapreplace(heap, (self._weight[slot], negative))
            else:
                heapq.heappop(heap)
                return slot
        return None

    def _rescale(self) -> None:
        scale = 1.0 / _RESCALE_AT  # a power of two, so equal weights stay equal
        self._increment *= scale
        self._weight[:] = [weight * scale for weight in self._weight]
        self._heap = [(weight * scale, negative) for weight, negative in self._heap]
        heapq.heapify(self._heap)
