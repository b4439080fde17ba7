"""Selects the token ids that the drafter's output head is cut to: a fixed number of slots, a token in each.
Imports neither vLLM, Ray nor torch.

Cutting the head is exact, since q only has a smaller support; which tokens are in it decides how many drafts are
accepted. At first these are the tokens that the drafter was trained on, where its checkpoint says which, then the
lowest ids: in a BPE vocabulary the earliest and so most frequent merges. Then it follows the text: a token of a prompt
or an answer that is missing enters at once, and the one that was used least recently leaves.
"""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

VOCABULARY_FILE = "draft_vocabulary.json"
"""A checkpoint's file, written by `outrider distill`: a list of the ids that the drafter was trained on."""


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
    room.
    """

    def __init__(
        self, vocab_size: int, num_slots: int, always: Iterable[int] = (), at_first: Iterable[int] = ()
    ) -> None:
        fixed = set(always)
        if not 0 < num_slots <= vocab_size:
            raise ValueError(f"num_slots: {num_slots} is not in 1 to {vocab_size}, the size of the vocabulary")
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
        self._token_of = sorted([*fixed, *itertools.islice(others, num_slots - len(fixed))])
        self._fixed = {token: slot for slot, token in enumerate(self._token_of) if token in fixed}
        self._slots = OrderedDict(
            (token, slot) for slot, token in reversed(list(enumerate(self._token_of))) if token not in fixed
        )
        """The slots of the other tokens, the least recently used first; of those never used the highest id."""

        self._changes: dict[int, int] = {}

    @property
    def token_ids(self) -> list[int]:
        """The token of each slot."""
        return list(self._token_of)

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
        leaving = {token: slot for token, slot in (*self._fixed.items(), *self._slots.items()) if token >= size}
        came_in = itertools.filterfalse(lambda token: token in self._fixed or token in self._slots, range(size))
        for (gone, slot), token in zip(leaving.items(), list(itertools.islice(came_in, len(leaving))), strict=True):
            self._fixed.pop(gone, None)
            self._slots.pop(gone, None)
            self._put(token, slot)
            self._slots.move_to_end(token, last=False)

    def use(self, token_ids: Iterable[int]) -> None:
        """Takes in tokens that are likely to be drafted, such as a prompt's, in their order."""
        for token in token_ids:
            if token in self._slots:
                self._slots.move_to_end(token)
            elif self._slots and token not in self._fixed and 0 <= token < self.vocab_size:
                _, slot = self._slots.popitem(last=False)
                self._put(token, slot)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Counts and takes in tokens that the target committed, in their order."""
        self.num_observed += len(token_ids)
        for token in token_ids:
            self.num_missed += token not in self._slots and token not in self._fixed
            self.use([token])

    def take_changes(self) -> list[tuple[int, int]]:
        """Returns (slot, token id) of every slot replaced since the last call: the rows of the head to copy."""
        changes, self._changes = list(self._changes.items()), {}
        return changes

    def _put(self, token: int, slot: int) -> None:
        self._token_of[slot] = self._changes[slot] = token
        self._slots[token] = slot
