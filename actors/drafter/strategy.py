"""What a drafting method offers the drafter's loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from outrider.cluster.link.messages import Commit, DraftSampling, Origin, ProposalStatus, SparseQ

SequenceKey = tuple[int, int]
"""(link, request handle): unique over every target linked to one drafter."""


@dataclass(slots=True)
class Draft:
    """The answer for one sequence: up to K token ids that continue its committed length.

    q: what they were drawn from; None: each was the only choice (a one-hot q), or verification needs no q.
    """

    key: SequenceKey
    base_committed_len: int
    token_ids: list[int]
    status: ProposalStatus
    q: SparseQ | None = None
    origin: Origin = Origin.NONE


class UnknownSequence(KeyError):
    """A commit for a sequence that is not open here or is at another length: the verifier must open it again."""


class Work(Protocol):
    """One unit of work, planned. execute runs without the loop's lock: it must touch nothing of a sequence that
    commits or answers use."""

    @property
    def is_step(self) -> bool:
        """A step of the model's; else a piece of some text is read."""

    def execute(self) -> None: ...


class DraftStrategy(Protocol):
    """Holds the sequences of all linked targets and drafts for many of them at once.

    Every method is called under the loop's lock, by any thread; work is planned, executed and completed by the loop's
    thread alone, so while a step runs, commits are applied and answered from what has been drafted ahead.

    How many tokens are drafted may depend on anything before a token, never on the token itself: drafts that are
    kept or dropped for what they are no longer come from q, and rejection against q would be biased.
    """

    def open(
        self, key: SequenceKey, token_ids: list[int], num_speculative_tokens: int, sampling: DraftSampling
    ) -> Draft | None:
        """A new sequence with its committed tokens (the prompt, or all of a resumed request's text).

        sampling: how its drafts are to be drawn. Drafts that are a function of the text alone may ignore it.
        Returns a READY answer if it can be drafted for at once, without prefill. Everybody's commits wait meanwhile: a
        long text is not read here but as work, piece by piece.
        """

    def commit(self, key: SequenceKey, commit: Commit) -> list[Draft]:
        """Append committed tokens. Returns the answer if it is at hand, or why there is none, and before it an empty
        one to an earlier commit that is overtaken: who asked shall know that somebody is there. Raises
        UnknownSequence."""

    def close(self, key: SequenceKey) -> None:
        """Forget a sequence and free what it holds. Unknown keys are ignored."""

    def plan(self) -> tuple[Work | None, list[Draft]]:
        """The most urgent work, and answers that need none. (None, []): nothing to do until something arrives."""

    def complete(self, work: Work) -> list[Draft]:
        """Take the results of executed work. Returns the answers that are ready now."""

    def step_us(self) -> int:
        """What a step takes now, microseconds; 0: not known."""

    def usage(self) -> dict[str, float]:
        """``num_sequences``, ``num_prefilling`` and ``kv_cache_usage`` (0..1)."""

    def counters(self) -> dict[str, Any]:
        """What the method counts since its start, for metrics (observability/metrics.py has the names). Plain
        values; {} for none."""
