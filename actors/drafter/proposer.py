"""Defines what a drafting method offers the draft loop, and what the drafter knows of one request.
Imports neither vLLM, Ray nor torch.

A drafting method implements `Proposer` and adds what it needs to `Sequence` in a subclass (`model_sequence.py`,
`lookup.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from outrider.actors.observability import logs
from outrider.cluster.link.messages import (
    Commit,
    DraftOrigin,
    DraftSampling,
    Open,
    PrefetchedProposal,
    Proposals,
    ProposalStatus,
    SparseQ,
)
from outrider.cluster.modes import Mode

SequenceKey = tuple[int, int]
"""(link, request handle): unique over all targets linked to one drafter."""


class Sequence:
    """Holds what the drafter knows of one request, from its Open to its close. The draft loop's lock guards
    it."""

    def __init__(self, key: SequenceKey) -> None:
        self.key = key
        self.name = ""
        """The request id of the engine, if the verifier sends it."""

        self.sampling = DraftSampling()
        """How its drafts are drawn."""

        self.num_speculative_tokens = 0
        self.num_paths = 1
        """The last commit's, see `Commit`."""

        self.text: list[int] = []
        """All committed tokens, prompt included."""

        self.num_wanted = self.num_on_miss = 0
        """The last commit's, see `Commit`."""

        self.asked_len: int | None = None
        """The committed length of the commit that waits for its answer; None: none waits."""

        self.asked_at = 0.0
        """When that commit arrived."""

        self.turn = 0
        """Its place among all waiting commits. A commit that overtakes another one keeps that one's place."""

    @property
    def committed_len(self) -> int:
        return len(self.text)

    def about(self) -> Mapping[str, str]:
        """Returns ``extra`` for a log line about this sequence; {} when its verifier sends no name."""
        return logs.about(self.name) if self.name else {}

    @property
    def is_greedy(self) -> bool:
        """The target takes its likeliest tokens."""
        return self.sampling.mode is Mode.GREEDY

    def take_prompt(self, message: Open) -> None:
        """Begins with what the request's Open says."""
        self.name, self.sampling = message.name, message.sampling
        self.num_speculative_tokens = message.num_speculative_tokens
        self.text.extend(message.token_ids)

    def commit(self, commit: Commit) -> None:
        """Appends committed tokens, which continue the text."""
        self.text.extend(commit.token_ids)
        self.num_wanted, self.num_on_miss, self.num_paths = commit.num_wanted, commit.num_on_miss, commit.num_paths

    def drafts(
        self, token_ids: list[int], q: SparseQ | None = None, origin: DraftOrigin = DraftOrigin.MAIN_LINE
    ) -> Proposals:
        """Returns the answer to the last commit: up to K drafts that continue the text.

        Args:
            q: what they were drawn from; None: each was the only choice (a one-hot q), or verification needs no q.
        """
        return Proposals(self.key[1], len(self.text), token_ids, ProposalStatus.OK, q, origin)

    def no_drafts(self, status: ProposalStatus, committed_len: int | None = None) -> Proposals:
        """Returns an answer without drafts.

        Args:
            committed_len: of the commit that is answered; None: the present length.
        """
        length = len(self.text) if committed_len is None else committed_len
        return Proposals(self.key[1], length, [], status)


class Outgoing(NamedTuple):
    """A message for the link of a sequence: the answer to a commit, or a proposal ahead of the commit."""

    sequence: Sequence
    message: Proposals | PrefetchedProposal


class Outbox:
    """Collects a proposer's messages until the draft loop sends them."""

    def __init__(self) -> None:
        self._messages: list[Outgoing] = []

    def add(self, sequence: Sequence, message: Proposals | PrefetchedProposal) -> None:
        self._messages.append(Outgoing(sequence, message))

    def drain(self) -> list[Outgoing]:
        """Returns the messages since the last call, in their order."""
        messages, self._messages = self._messages, []
        return messages


S = TypeVar("S", bound=Sequence)


class Work(Protocol):
    """One planned unit of work. execute runs without the loop's lock: it touches nothing of a sequence that commits or
    answers use."""

    @property
    def is_step(self) -> bool:
        """Whether it is a step of the draft model."""

    def execute(self) -> None: ...


class Proposer(Protocol[S]):
    """Drafts for the sequences of all linked targets in batches, and puts every message into its outbox.

    Every method is called under the loop's lock, from any thread. Work is planned, executed and completed by the loop's
    thread alone; while it is executed, commits are applied and answered from what has been drafted ahead.

    How many tokens are drafted may depend on anything before a token, never on the token itself: drafts that are kept
    or dropped for what they are no longer come from q, and rejection against q would be biased.
    """

    outbox: Outbox

    def new_sequence(self, key: SequenceKey) -> S:
        """Returns a sequence for a new request. Nothing is held for it before `open`."""

    def open(self, sequence: S) -> None:
        """Takes a sequence whose text is complete: the prompt, or all of a resumed request's text.

        Sends READY if it can be drafted for without prefill. All commits wait meanwhile, so a long text is read later
        as work, piece by piece.
        """

    def commit(self, sequence: S, commit: Commit) -> None:
        """Appends committed tokens to an open sequence. Sends the answer if it is at hand, or why there is none; before
        it an empty answer to an earlier commit that this one overtakes, which tells the verifier that the drafter
        lives."""

    def close(self, sequence: S) -> None:
        """Forgets an open sequence and frees what is held for it. Work that is executed may still refer to it."""

    def limit_vocabulary(self, size: int) -> None:
        """Drafts no id from `size` on from the next plan on, for any target. Raises ValueError where that is
        impossible."""

    def plan(self) -> Work | None:
        """Returns the most urgent work; None: there is nothing to do until a message arrives."""

    def complete(self, work: Work) -> None:
        """Takes the results of executed work. Sends the answers that are ready, and drafts for outcomes that a target
        may still commit."""

    def step_us(self) -> int:
        """Returns what a step takes now, microseconds; 0: unknown."""

    def usage(self) -> dict[str, float]:
        """Returns ``num_sequences``, ``num_prefilling`` and ``kv_cache_usage`` (0..1)."""

    def counters(self) -> dict[str, Any]:
        """Returns what the method has counted since its start, for metrics (observability/metrics.py has the names)."""
