"""Drafts by looking texts up, without a model: what n-gram and suffix drafters have in common.
Imports neither vLLM, Ray nor torch.

The text alone decides, so q is one-hot. A look-up takes less than a millisecond, so a commit is answered at once and
nothing is drafted ahead. Long prompts are read between rounds, a slice at a time.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from outrider.actors.drafter.proposer import Outbox, Sequence, SequenceKey, Work
from outrider.cluster.link.messages import Commit, ProposalStatus


class TextIndex(Protocol):
    """Indexes one text that grows at its end."""

    def append(self, token_ids: abc.Sequence[int]) -> None: ...


class LookupSequence(Sequence):
    """Adds an index of the text to a sequence."""

    index: Any
    """A TextIndex, set by `open`."""

    num_read = 0
    """Leading tokens of the text that the index has."""


L = TypeVar("L", bound=LookupSequence)


@dataclass(eq=False, slots=True)
class Reading:
    """Appends the next slice of a text to its index, which nobody else uses before all of the text is read."""

    is_step: ClassVar[bool] = False
    sequence: LookupSequence
    most_tokens: int
    num_read: int = 0
    """How many were read. They count when the work is completed, and the text may have grown by then."""

    def execute(self) -> None:
        start = self.sequence.num_read
        tokens = self.sequence.text[start : start + self.most_tokens]
        self.sequence.index.append(tokens)
        self.num_read = len(tokens)


class LookupProposer(Generic[L]):
    """Implements Proposer with an index of each text. A subclass makes sequences and indexes, and looks drafts up."""

    slice_tokens: ClassVar[int]
    """Tokens that are read while others wait: about a millisecond."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self._num_sequences = 0
        self._unread: dict[L, None] = {}
        """Sequences whose text is not read completely, the oldest first."""

    def new_sequence(self, key: SequenceKey) -> L:
        raise NotImplementedError

    def new_index(self, sequence: L) -> TextIndex:
        """Returns an empty index for a sequence's text."""
        raise NotImplementedError

    def look_up(self, sequence: L) -> list[int]:
        """Returns num_wanted drafts at most. The text has been read completely."""
        raise NotImplementedError

    def open(self, sequence: L) -> None:
        self._num_sequences += 1
        sequence.index = self.new_index(sequence)
        if self._read_on(sequence):
            self.outbox.add(sequence, sequence.no_drafts(ProposalStatus.READY))

    def commit(self, sequence: L, commit: Commit) -> None:
        sequence.commit(commit)
        is_read = sequence not in self._unread and self._read_on(sequence)
        if commit.num_wanted:
            drafts = sequence.drafts(self.look_up(sequence)) if is_read else None
            self.outbox.add(sequence, drafts or sequence.no_drafts(ProposalStatus.NOT_READY))

    def close(self, sequence: L) -> None:
        self._num_sequences -= 1
        self._unread.pop(sequence, None)

    def limit_vocabulary(self, size: int) -> None:
        """Limits nothing: a look-up proposes only ids that a target of this application has committed."""

    def plan(self) -> Work | None:
        return next((Reading(sequence, self.slice_tokens) for sequence in self._unread), None)

    def complete(self, work: Work) -> None:
        assert isinstance(work, Reading)
        sequence: Any = work.sequence
        if sequence not in self._unread or not self._take_read(sequence, work.num_read):
            return
        self.outbox.add(sequence, sequence.no_drafts(ProposalStatus.READY))
        if sequence.num_wanted:  # a verifier that was told NOT_READY waits for an answer from READY on
            self.outbox.add(sequence, sequence.drafts(self.look_up(sequence)))

    def step_us(self) -> int:
        return 0

    def usage(self) -> dict[str, float]:
        return {"num_sequences": self._num_sequences, "num_prefilling": len(self._unread), "kv_cache_usage": 0.0}

    def counters(self) -> dict[str, Any]:
        return {}

    def _read_on(self, sequence: L) -> bool:
        """Reads a slice at once. Returns whether all is read now."""
        reading = Reading(sequence, self.slice_tokens)
        reading.execute()
        return self._take_read(sequence, reading.num_read)

    def _take_read(self, sequence: L, num_tokens: int) -> bool:
        sequence.num_read += num_tokens
        is_read = sequence.num_read == len(sequence.text)
        if is_read:
            self._unread.pop(sequence, None)
        else:
            self._unread[sequence] = None
        return is_read
