"""What rank 0 says to its drafter and hears from it: handles, commits, answers, and whom a round still waits for.

A drafter's mistake, silence or death ends here: what does not fit is dropped and counted, and its request decodes
plainly.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from outrider.actors.round.request import Request
from outrider.cluster.link import HANG, Link, LinkBroken, Received
from outrider.cluster.link.codec import pack
from outrider.cluster.link.messages import (
    MAX_NAME_LENGTH,
    Close,
    CloseReason,
    Commit,
    Message,
    Name,
    Open,
    Proposals,
    ProposalStatus,
)

logger = logging.getLogger(__name__)


class Conversation:
    """One at a time, with whoever is at the other end of the link. Not thread-safe but for `offer`."""

    def __init__(
        self,
        requests: Mapping[str, Request],
        hang_deadline_s: float,
        clock: Callable[[], float],
        names_requests: bool = False,
    ) -> None:
        """requests: the round's own table. names_requests: tell the drafter their ids, for its log."""
        self._requests = requests
        self._hang_deadline_s = hang_deadline_s
        self._clock = clock
        self._names_requests = names_requests
        self._offered: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self._link: Link | None = None
        self._by_handle: dict[int, Request] = {}
        self._outbox: list[Message] = []
        self._next_handle = 1
        self._silent_since: float | None = None
        """Since when commits are out and nothing at all has come back."""

        self.stale = 0
        """Proposals dropped because they continue another committed length than the request's."""

        self.unusable = 0
        """Proposals that cannot have been drawn as the request asked, or that the scheduler changed."""

        self.refused: dict[ProposalStatus, int] = {}
        """Answers without drafts, by reason."""

        self.degraded: dict[str, int] = {}
        """Requests that decoded plainly though they need not have, by the first cause: ``no_link``, ``late``,
        ``out_of_kv``, ``length``, ``unusable``."""

    @property
    def epoch(self) -> int:
        """Of the link; 0 without one."""
        return self._link.epoch if self._link is not None else 0

    # The link.

    def offer(self, link: Link) -> None:
        """A new link is up. Taken over at the next step boundary, and the one before it is ended. Any thread."""
        self._offered.put(link)

    def check_link(self, at_boundary: bool = False) -> bool:
        """Take over a new link and end the one before it, drop a broken one. Whether there is a new link.

        at_boundary: nobody waits for answers. A link that works is left for another there and nowhere else.
        """
        fresh = False
        while at_boundary or self._link is None or self._link.broken is not None:
            try:
                offered = self._offered.get_nowait()
            except queue.Empty:
                break
            if offered.broken is not None:
                continue
            if self._link is not None and self._link.broken is None:
                self._link.retire(f"link of epoch {offered.epoch} takes its place")
            self._link, fresh = offered, True
        if fresh:
            self._silent_since = None
            self._forget()
            for request in self._requests.values():
                if request.running and request.max_drafts:
                    self.open(request)
        if self._link is not None and self._link.broken is not None:
            logger.warning("speculation stops until there is a new link: %s", self._link.broken)
            self._link = None
            self._forget()
        return fresh

    @property
    def is_linked(self) -> bool:
        return self._link is not None

    def flush(self) -> None:
        messages, self._outbox = self._outbox, []
        if messages and self._link is not None:
            with suppress(LinkBroken):  # noticed, logged and counted at the next step boundary
                self._link.post(pack(messages, self._link.capacity_words))

    def poll(self, timeout_s: float) -> Received[list[Message]] | None:
        """The next frame; None: nothing within timeout_s, or no link."""
        if self._link is None:
            return None
        received = self._link.poll(timeout_s)
        if received is not None:
            self._silent_since = None
        return received

    def check_silence(self) -> None:
        """A drafter that beats its heart but answers no commit for a whole link deadline hangs."""
        now = self._clock()
        if self._link is None or not self.is_unanswered():
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since > self._hang_deadline_s:
            self._link.abort(f"{HANG}: no answer for {self._hang_deadline_s:g} s")

    def nobody_is_asked(self) -> None:
        """Who was asked is gone: the next commit starts the clock anew."""
        self._silent_since = None

    def _forget(self) -> None:
        """Nobody at the other end knows any request."""
        self._by_handle.clear()
        self._outbox.clear()
        for request in self._requests.values():
            request.handle = None
            request.ready = request.awaited = request.asked = False

    # What is said.

    def open(self, request: Request) -> None:
        """The drafter shall follow the request, all its committed tokens first."""
        if self._link is None:
            return
        request.handle, self._next_handle = self._next_handle, self._next_handle + 1
        request.ready = request.awaited = request.asked = False
        self._by_handle[request.handle] = request
        if self._names_requests:
            self._outbox.append(Name(request.handle, request.request_id[:MAX_NAME_LENGTH]))
        self._outbox.append(
            Open(
                request=request.handle,
                prompt_len=len(request.token_ids),
                offset=0,
                token_ids=list(request.token_ids),
                num_speculative_tokens=request.max_drafts,
                sampling=request.draft_sampling,
            )
        )

    def close(self, request: Request, reason: CloseReason) -> None:
        if request.handle is not None:
            self._by_handle.pop(request.handle, None)
            self._outbox.append(Close(request.handle, reason))
        request.handle = None
        request.ready = request.awaited = request.asked = False

    def commit(self, request: Request, token_ids: Sequence[int], num_wanted: int, num_on_miss: int) -> None:
        """The request's last len(token_ids) tokens were committed by a step. num_wanted, num_on_miss: as in Commit."""
        if request.handle is None:
            if num_wanted:
                self.degrade(request, "no_link")
            return
        request.asked = num_wanted > 0
        request.awaited = request.asked and request.ready
        base = len(request.token_ids) - len(token_ids)
        self._outbox.append(Commit(request.handle, base, token_ids, num_wanted, num_on_miss))

    def degrade(self, request: Request, cause: str) -> None:
        """The request decodes plainly for a round. Counts once in its life."""
        if not request.degraded:
            request.degraded = True
            self.degraded[cause] = self.degraded.get(cause, 0) + 1

    # What is heard.

    def hear(self, messages: Iterable[Message]) -> list[tuple[Request, Proposals]]:
        """Apply the drafter's answers. Those of a closed handle or another committed length are dropped. Returns the
        answers to last commits, with whose they are."""
        answers = []
        for message in messages:
            if not isinstance(message, Proposals):
                continue
            request = self._by_handle.get(message.request)
            if request is None:
                self.stale += 1
                continue
            is_last = message.base_committed_len == len(request.token_ids)
            if message.status not in (ProposalStatus.OK, ProposalStatus.READY):
                if is_last:
                    answers.append((request, message))
                self._refused(request, message.status)
                continue
            request.ready = True
            if message.status is ProposalStatus.OK and is_last:
                request.awaited = request.asked = False
                self._take(request, message)
                answers.append((request, message))
                continue
            self.stale += message.status is ProposalStatus.OK
            # Prefilled, or busy with an older commit until now: the answer to the last commit comes next.
            request.awaited = request.asked
        return answers

    def is_unanswered(self) -> bool:
        """A commit is out that a drafter in good health would answer, if only with NOT_READY."""
        return any(request.asked for request in self._requests.values())

    def is_awaited(self) -> bool:
        return any(request.awaited for request in self._requests.values())

    def give_up_waiting(self) -> list[Request]:
        """Stop waiting in this round. Returns whose answers are late."""
        late = [request for request in self._requests.values() if request.awaited]
        for request in late:
            request.awaited = False
            self.degrade(request, "late")
        return late

    def _take(self, request: Request, proposal: Proposals) -> None:
        sampling = request.sampling
        if not sampling.mode.samples_q:
            proposal.q = None
        elif proposal.q is not None and proposal.q.ids.shape[1] != request.draft_sampling.top_n:
            self.unusable += 1
            self.degrade(request, "unusable")
            return
        proposal.token_ids = [int(token) for token in proposal.token_ids][: request.max_drafts]
        request.proposal = proposal

    def _refused(self, request: Request, status: ProposalStatus) -> None:
        self.refused[status] = self.refused.get(status, 0) + 1
        if status in (ProposalStatus.OUT_OF_KV, ProposalStatus.LENGTH):
            self.degrade(request, status.name.lower())
        request.ready = request.awaited = False
        # A drafter that is still prefilling answers the commit when it is done, the others never do.
        request.asked = request.asked and status is ProposalStatus.NOT_READY
        if status is ProposalStatus.UNKNOWN_REQUEST:
            self.close(request, CloseReason.ABORTED)
            self.open(request)
