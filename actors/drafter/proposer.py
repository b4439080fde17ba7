"""What a drafting method offers the draft loop."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from outrider.actors.drafter.sequence import Answer, Foreseen, Sequence, SequenceKey
from outrider.cluster.link.messages import Commit

S = TypeVar("S", bound=Sequence)


class Work(Protocol):
    """One unit of work, planned. execute runs without the loop's lock: it must touch nothing of a sequence that
    commits or answers use."""

    @property
    def is_step(self) -> bool:
        """A step of the model's; else a piece of some text is read."""

    def execute(self) -> None: ...


class Proposer(Protocol[S]):
    """Drafts for the sequences of all linked targets, many of them at once.

    Every method is called under the loop's lock, by any thread; work is planned, executed and completed by the loop's
    thread alone, so while a step runs, commits are applied and answered from what has been drafted ahead.

    How many tokens are drafted may depend on anything before a token, never on the token itself: drafts that are
    kept or dropped for what they are no longer come from q, and rejection against q would be biased.
    """

    def new_sequence(self, key: SequenceKey) -> S:
        """For a request of which nothing is known yet. Nothing is held for it before `open`."""

    def open(self, sequence: S) -> list[Answer]:
        """The sequence's text is whole: the prompt, or all of a resumed request's text.

        Returns a READY answer if it can be drafted for at once, without prefill. Everybody's commits wait meanwhile: a
        long text is not read here but as work, piece by piece.
        """

    def commit(self, sequence: S, commit: Commit) -> list[Answer]:
        """Take committed tokens, which continue the text of an open sequence. Returns the answer if it is at hand and
        not kept for `delivered`, or why there is none, and before it an empty one to an earlier commit that is
        overtaken: who asked shall know that somebody is there."""

    def delivered(self) -> list[Answer]:
        """All that a link has sent at once is taken. Returns the answers to its commits that were kept back for it."""

    def close(self, sequence: S) -> None:
        """Forget an open sequence and free what is held for it. Work that is under way may still know it."""

    def unlink(self, link_id: int) -> None:
        """A link is gone; its sequences are closed. What is kept of it can go."""

    def limit_vocabulary(self, size: int) -> None:
        """A target with `size` tokens is about to be linked: from the next plan on no larger id is drafted, for
        anybody. Raises ValueError where that cannot be."""

    def plan(self) -> tuple[Work | None, list[Answer]]:
        """The most urgent work, and answers that need none. (None, []): nothing to do until something arrives."""

    def complete(self, work: Work) -> list[Answer]:
        """Take the results of executed work. Returns the answers that are ready now."""

    def foreseen(self) -> list[Foreseen]:
        """What the work that was completed last has drafted for outcomes that have not come yet, to be sent at once;
        [] where it is decided at each commit whose drafts answer it, or where no drafts are made ahead."""

    def step_us(self) -> int:
        """What a step takes now, microseconds; 0: not known."""

    def usage(self) -> dict[str, float]:
        """``num_sequences``, ``num_prefilling`` and ``kv_cache_usage`` (0..1)."""

    def counters(self) -> dict[str, Any]:
        """What the method counts since its start, for metrics (observability/metrics.py has the names). Plain
        values; {} for none."""
