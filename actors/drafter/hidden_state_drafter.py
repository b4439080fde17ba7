"""Drafts in the verifier's process, by heads that need the target's last hidden state.

Drafting takes microseconds there, so it needs neither an actor nor a transport. A `HiddenStateDrafter` has the methods
of a `Link` that a `DrafterClient` calls, and those of a `LinkKeeper` that the target's worker calls: the round, draft
lengths and verification are those of every drafter.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from torch import Tensor

from outrider.actors.drafter.mlp_speculator import MLPSpeculator
from outrider.actors.drafter.model_sequence import stacked_q
from outrider.actors.verification.transfer import to_device
from outrider.cluster.drafter_registry import LinkReport
from outrider.cluster.link import LinkBroken, Received
from outrider.cluster.link.messages import (
    Close,
    Commit,
    DraftOrigin,
    DraftSampling,
    Message,
    Open,
    Proposals,
    ProposalStatus,
)

logger = logging.getLogger(__name__)


class HiddenStateDrafter:
    """Answers each commit when it is posted. Every method is for the engine's step thread.

    An error of the heads ends it, as the death of a drafter ends a link: requests go on without drafts.
    """

    epoch = 1

    def __init__(
        self,
        load_heads: Callable[[], MLPSpeculator],
        decode: Callable[[bytes], list[Message]],
        on_link: Callable[[Any], None],
    ) -> None:
        """Args:
        load_heads: called by `load`.
        decode: turns a payload into messages.
        on_link: takes this object as the link, once drafts may be asked for.
        """
        self._load_heads, self._decode, self._on_link = load_heads, decode, on_link
        self._heads: MLPSpeculator | None = None
        self.broken: str | None = None
        """Why it has ended, or None."""

        self._report = LinkReport("connecting")
        self._samplings: dict[int, DraftSampling] = {}
        self._answers: deque[Received] = deque()
        self._hidden: Tensor | None = None
        self._rows: Mapping[int, int] = {}

    def keep_hidden(self, hidden: Tensor, rows: Mapping[int, int]) -> None:
        """Keeps what the commits that come next are drafted from.

        Args:
            hidden: [R, H], the target's hidden states in one step.
            rows: by the request's handle, the row at the position before its last committed token.
        """
        self._hidden, self._rows = hidden, rows

    # What a DrafterClient calls of a Link.

    def post(self, payload: bytes) -> None:
        """Takes messages and drafts at once for the commits among them. Raises LinkBroken if it has ended."""
        if self.broken is not None:
            raise LinkBroken(f"drafting has ended: {self.broken}")
        started = time.perf_counter()
        try:
            answers = self._answer(self._decode(payload))
        except Exception as error:
            logger.exception("the drafter beside the verifier failed: no more drafts until this replica is restarted")
            self.abort(f"drafting failed: {type(error).__name__}: {error}")
            raise LinkBroken(self.broken) from error
        if answers:
            work_us = round((time.perf_counter() - started) * 1e6)
            self._answers.append(Received(answers, work_us))

    def poll(self, timeout_s: float = 0.0) -> Received | None:
        """Returns the next answers, or None."""
        return self._answers.popleft() if self._answers else None

    def abort(self, reason: str) -> None:
        """Ends drafting."""
        self.broken, self._hidden = reason, None
        self._report = replace(self._report, state="down", last_error=reason, backend="")
        self._answers.clear()
        self._samplings.clear()

    def close(self, reason: str) -> None:
        """Ends drafting, since another link takes its place."""
        self.abort(reason)

    # What the target's worker calls, `start` to `status` as of a LinkKeeper.

    def load(self) -> int:
        """Loads the heads. Returns their bytes."""
        self._heads = self._load_heads()
        return self._heads.num_bytes

    def warm_up(self, num_drafts: int, top_n: int) -> None:
        """Compiles what drafting compiles on first use, so that no request waits for it."""
        assert self._heads is not None
        self._heads.warm_up(num_drafts, top_n)

    def start(self) -> None:
        """Offers itself as the link."""
        self._report = LinkReport("up", self.epoch, backend="in_process")
        self._on_link(self)

    def stop(self) -> None:
        self.abort("verifier stops")

    def status(self) -> dict[str, Any]:
        return asdict(self._report)

    # Drafting.

    def _answer(self, messages: Sequence[Message]) -> list[Message]:
        answers: list[Message] = []
        commits: list[Commit] = []
        for message in messages:
            if isinstance(message, Open):
                self._samplings[message.request] = message.sampling
                # There is no prompt to read, so a request's first commit is answered with drafts already.
                answers.append(Proposals(message.request, len(message.token_ids), [], ProposalStatus.READY))
            elif isinstance(message, Close):
                self._samplings.pop(message.request, None)
            elif isinstance(message, Commit) and message.num_wanted:
                commits.append(message)
        if commits:
            answers += self._drafts(commits)
        return answers

    def _drafts(self, commits: Sequence[Commit]) -> list[Message]:
        """Returns the answers to the commits of one step, in their order."""
        assert self._heads is not None
        assert self._hidden is not None, "a commit was posted before any hidden states"
        (rows,) = to_device([np.array([self._rows[commit.request] for commit in commits])], self._hidden.device)
        started = time.perf_counter()
        counts = [commit.num_wanted for commit in commits]
        drafts = self._heads.draft(
            self._hidden[rows],
            [commit.token_ids[-1] for commit in commits],
            [self._samplings[commit.request] for commit in commits],
            [commit.committed_len for commit in commits],
            counts,
        )
        step_us = round((time.perf_counter() - started) / max(counts) * 1e6)
        return [
            # For the length controller it is a hit: the drafts are there before anybody waits for them.
            Proposals(
                commit.request,
                commit.committed_len,
                [each.token for each in drawn],
                q=stacked_q(drawn),
                origin=DraftOrigin.MAIN_LINE,
                step_us=step_us,
            )
            for commit, drawn in zip(commits, drafts, strict=True)
        ]
