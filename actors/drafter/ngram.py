"""Prompt lookup drafting: propose what followed the latest earlier occurrence of the current n-gram.

The method is Saxena's prompt lookup decoding (2023), also vLLM's ``ngram``. The index is a dictionary per n-gram
length, extended as tokens are committed, so a draft costs a few look-ups whatever the length of the text.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Any, ClassVar

from outrider.actors.drafter.proposer import Work
from outrider.actors.drafter.sequence import Answer, Foreseen, Sequence, SequenceKey
from outrider.cluster.link.messages import Commit, ProposalStatus


class NgramIndex:
    """Where each n-gram of one text last occurred, for every n from min_n to max_n."""

    def __init__(self, token_ids: abc.Sequence[int], min_n: int, max_n: int) -> None:
        self.token_ids: list[int] = []
        self._min_n, self._max_n = min_n, max_n
        self._next: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_n + 1)]
        self.extend(token_ids)

    def extend(self, token_ids: abc.Sequence[int]) -> None:
        tokens = self.token_ids
        for token in token_ids:
            # The n-grams that end before this token are now followed by something.
            for n in range(self._min_n, min(self._max_n, len(tokens)) + 1):
                self._next[n][tuple(tokens[-n:])] = len(tokens)
            tokens.append(token)

    def lookup(self, count: int, suffix: abc.Sequence[int] | None = None) -> list[int]:
        """Up to count ids that followed the longest known end of `suffix` (None: of the text); empty without a match.

        A match that reaches the end of the text goes on through its own proposal, so a loop is continued as a loop.
        """
        tokens = self.token_ids
        end = tokens[-self._max_n :] if suffix is None else suffix
        for n in range(min(self._max_n, len(end)), self._min_n - 1, -1):
            start = self._next[n].get(tuple(end[-n:]))
            if start is not None:
                window = tokens[start : start + count]
                period = len(tokens) - start
                return [window[i] if i < len(window) else window[i % period] for i in range(count)]
        return []


READ_AT_ONCE = 256
"""Tokens read while others wait: about a millisecond."""


class TextIndex:
    """The NgramIndex of a text that grows at its end, read piece by piece. `read` may run beside whoever lets the text
    grow, and beside one caller of the other methods."""

    def __init__(self, text: list[int], min_n: int, max_n: int) -> None:
        """The first piece is read at once. text: not copied."""
        self._text = text
        self.ngrams = NgramIndex(text[:READ_AT_ONCE], min_n, max_n)
        self.is_read = False
        """The index has all of the text."""

        self.settle()

    def follow(self) -> None:
        """The text has grown."""
        if self.is_read:
            self.ngrams.extend(self._text[len(self.ngrams.token_ids) :])

    def read(self) -> None:
        """The next piece; settle afterwards."""
        start = len(self.ngrams.token_ids)
        self.ngrams.extend(self._text[start : start + READ_AT_ONCE])

    def settle(self) -> bool:
        """Whether the text, which may have grown meanwhile, is read whole."""
        self.is_read = len(self.ngrams.token_ids) == len(self._text)
        return self.is_read


class NgramSequence(Sequence):
    index: TextIndex
    """From `open` on."""


@dataclass(eq=False, slots=True)
class Reading:
    """Work: the next piece of a sequence's text."""

    is_step: ClassVar[bool] = False
    sequence: Sequence
    index: TextIndex

    def execute(self) -> None:
        self.index.read()


class NgramProposer:
    """Implements Proposer without a model: no KV, and ready when the prompt is read, between rounds if it is long.
    The text alone decides, so q is one-hot. A look-up is quicker than any lookahead would be, so nothing is drafted
    ahead, and every answer leaves at once."""

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        self._min_n, self._max_n = prompt_lookup_min, prompt_lookup_max
        self._num_sequences = 0
        self._unread: dict[NgramSequence, None] = {}
        """Whose text is not read whole, the oldest first."""

    def new_sequence(self, key: SequenceKey) -> NgramSequence:
        return NgramSequence(key)

    def open(self, sequence: NgramSequence) -> list[Answer]:
        self._num_sequences += 1
        sequence.index = TextIndex(sequence.text, self._min_n, self._max_n)
        if sequence.index.is_read:
            return [sequence.no_drafts(ProposalStatus.READY)]
        self._unread[sequence] = None
        return []

    def commit(self, sequence: NgramSequence, commit: Commit) -> list[Answer]:
        sequence.commit(commit)
        sequence.index.follow()
        if not commit.num_wanted:
            return []
        unread = sequence in self._unread
        return [sequence.no_drafts(ProposalStatus.NOT_READY) if unread else self._looked_up(sequence)]

    def delivered(self) -> list[Answer]:
        return []

    def close(self, sequence: NgramSequence) -> None:
        self._num_sequences -= 1
        self._unread.pop(sequence, None)

    def unlink(self, link_id: int) -> None: ...

    def limit_vocabulary(self, size: int) -> None:
        """What is proposed was committed before, by a target of this application."""

    def plan(self) -> tuple[Work | None, list[Answer]]:
        for sequence in self._unread:
            return Reading(sequence, sequence.index), []
        return None, []

    def complete(self, work: Work) -> list[Answer]:
        assert isinstance(work, Reading)
        sequence = work.sequence
        assert isinstance(sequence, NgramSequence)
        if sequence not in self._unread or not sequence.index.settle():
            return []
        del self._unread[sequence]
        answers = [sequence.no_drafts(ProposalStatus.READY)]
        if sequence.num_wanted:  # whoever asked before waits for an answer from READY on
            answers.append(self._looked_up(sequence))
        return answers

    def foreseen(self) -> list[Foreseen]:
        return []

    def step_us(self) -> int:
        return 0

    def counters(self) -> dict[str, Any]:
        return {}

    def usage(self) -> dict[str, float]:
        return {"num_sequences": self._num_sequences, "num_prefilling": len(self._unread), "kv_cache_usage": 0.0}

    @staticmethod
    def _looked_up(sequence: NgramSequence) -> Answer:
        return sequence.drafts(sequence.index.ngrams.lookup(sequence.num_wanted))
