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
    PrefetchedProposal,
    Proposals,
    ProposalStatus,
    TrainingSample,
)

logger = logging.getLogger(__name__)

_MOST_AHEAD = 128
"""Outcomes of one round that a request keeps drafts for: more than K drafts and their alternatives make."""

_MOMENT_S = 1e-3
"""So long an answer at one of two links may wait for the other."""


class DrafterConnection:
    """One link: what is to be said over it, and whom the drafter at its other end knows by which handle."""

    __slots__ = ("by_handle", "is_late", "link", "outbox", "silent_since")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.outbox: list[Message] = []
        self.by_handle: dict[int, Request] = {}
        self.silent_since: float | None = None
        """Since when commits are out and nothing at all has come back."""

        self.is_late = False
        """An answer was given up, and nothing has come since."""

    @property
    def is_unanswered(self) -> bool:
        """A commit is out that a drafter in good health would answer, if only with NOT_READY."""
        return any(request.asked and request.handle == handle for handle, request in self.by_handle.items())

    def flush(self) -> None:
        messages, self.outbox = self.outbox, []
        if messages:
            with suppress(LinkBroken):  # noticed, logged and counted at the next step boundary
                self.link.post(pack(messages, self.link.capacity_words))

    def poll(self, timeout_s: float) -> Received[list[Message]] | None:
        received = self.link.poll(timeout_s)
        if received is not None:
            self.silent_since, self.is_late = None, False
        return received


class DrafterClient:
    """With one drafter, or with two while requests move from one to the other: each is drafted for where it was until
    its text has been read where it goes, and then asks there. Not thread-safe but for `offer`."""

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
        self._line: DrafterConnection | None = None
        """Where requests are opened."""

        self._leaving: DrafterConnection | None = None
        """The one before, for as long as requests ask there."""

        self._next_handle = 1

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
        return self._line.link.epoch if self._line is not None else 0

    # The link.

    def offer(self, link: Link) -> None:
        """A new link is up. Taken over at the next step boundary; requests move to it, and then the one before it is
        ended. One that was offered before and not taken, for want of steps, is not needed any more. Any thread."""
        with suppress(queue.Empty):
            while True:
                self._offered.get_nowait().retire(f"link of epoch {link.epoch} takes its place")
        self._offered.put(link)

    def check_link(self, at_boundary: bool = False) -> bool:
        """Take over a new link, drop a broken one. Whether there is a new link.

        at_boundary: nobody waits for answers. A link that works is left for another there and nowhere else.
        """
        lost = self._drop_broken()
        fresh = False
        while at_boundary or self._line is None:
            try:
                offered = self._offered.get_nowait()
            except queue.Empty:
                break
            if offered.broken is None:
                self._take_over(offered)
                fresh = True
        if lost is not None and self._line is None:
            logger.warning("speculation stops until there is a new link: %s", lost)
        return fresh

    def _drop_broken(self) -> str | None:
        """Returns why the link where requests are opened is gone, if it is."""
        lost = None
        if (leaving := self._leaving) is not None and leaving.link.broken is not None:
            self._leaving = None
            self._reopen(leaving)
        if (line := self._line) is not None and (lost := line.link.broken) is not None:
            self._line, self._leaving = self._leaving, None
            self._reopen(line)
        return lost

    def _take_over(self, link: Link) -> None:
        """Requests that are drafted for go on where they are, and their text is read at the new link meanwhile; all
        others begin there."""
        over, self._leaving, self._line = self._leaving, self._line, DrafterConnection(link)
        if over is not None:
            self._forget(over)
            self._retire(over)
        for request in self._requests.values():
            self._drop_next(request)
            if not (request.running and request.max_drafts):
                continue
            if request.ready:
                request.next_handle = self._introduce(request, self._line)
            else:
                self.close(request, CloseReason.PREEMPTED)
                self.open(request)

    def _reopen(self, line: DrafterConnection) -> None:
        """A link is gone: who was drafted for there goes on where it was about to move, or where there is a link."""
        self._forget(line)
        for request in self._requests.values():
            if request.handle is None and request.running and request.max_drafts:
                self.open(request)

    def _forget(self, line: DrafterConnection) -> None:
        """Nobody at the other end knows any request."""
        for handle, request in line.by_handle.items():
            if handle == request.next_handle:
                request.next_handle, request.next_ready = None, False
            else:
                self._now_at_next(request)
        line.by_handle.clear()

    def _retire(self, line: DrafterConnection) -> None:
        line.link.retire(f"link of epoch {self.epoch} takes its place")

    @property
    def is_linked(self) -> bool:
        return self._line is not None

    def _lines(self) -> Iterable[DrafterConnection]:
        return (line for line in (self._line, self._leaving) if line is not None)

    def flush(self) -> None:
        for line in self._lines():
            line.flush()
        if self._leaving is not None and not self._leaving.by_handle:
            self._retire(self._leaving)
            self._leaving = None

    def poll(self, timeout_s: float) -> Received[list[Message]] | None:
        """The next frame; None: nothing within timeout_s, or within a moment of it while requests move, or no link."""
        if self._line is None:
            return None
        if self._leaving is None:
            return self._line.poll(timeout_s)
        for line, wait_s in ((self._line, 0.0), (self._leaving, min(timeout_s, _MOMENT_S))):
            if (received := line.poll(wait_s)) is not None:
                return received
        return None

    def check_silence(self) -> None:
        """A drafter that beats its heart but answers no commit for a whole link deadline hangs."""
        now = self._clock()
        for line in self._lines():
            if not line.is_unanswered:
                line.silent_since = None
            elif line.silent_since is None:
                line.silent_since = now
            elif now - line.silent_since > self._hang_deadline_s:
                line.link.abort(f"{HANG}: no answer for {self._hang_deadline_s:g} s")

    def nobody_is_asked(self) -> None:
        """Who was asked is gone: the next commit starts the clock anew."""
        for line in self._lines():
            line.silent_since = None

    # What is said.

    def open(self, request: Request) -> None:
        """The drafter shall follow the request, all its committed tokens first."""
        if self._line is None:
            return
        request.handle = self._introduce(request, self._line)
        request.ready = False
        request.is_asked_no_more()

    def _introduce(self, request: Request, line: DrafterConnection) -> int:
        """Returns its handle there."""
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        line.by_handle[handle] = request
        if self._names_requests:
            line.outbox.append(Name(handle, request.request_id[:MAX_NAME_LENGTH]))
        line.outbox.append(
            Open(
                request=handle,
                prompt_len=len(request.token_ids),
                offset=0,
                token_ids=list(request.token_ids),
                num_speculative_tokens=request.max_drafts,
                sampling=request.sampling,
            )
        )
        return handle

    def close(self, request: Request, reason: CloseReason) -> None:
        self._drop_next(request)
        self._say_close(request.handle, reason)
        request.handle = None
        request.ready = False
        request.is_asked_no_more()

    def _say_close(self, handle: int | None, reason: CloseReason) -> None:
        for line in self._lines():
            if handle is not None and line.by_handle.pop(handle, None) is not None:
                line.outbox.append(Close(handle, reason))

    def _drop_next(self, request: Request) -> None:
        """It moves no more."""
        self._say_close(request.next_handle, CloseReason.ABORTED)
        request.next_handle, request.next_ready = None, False

    def _now_at_next(self, request: Request) -> None:
        """Where it moves to, it is known by its text; nowhere else any more."""
        request.handle, request.ready = request.next_handle, request.next_ready
        request.next_handle, request.next_ready = None, False
        request.is_asked_no_more()

    def commit(
        self, request: Request, token_ids: Sequence[int], num_wanted: int, num_on_miss: int
    ) -> PrefetchedProposal | None:
        """The request's last len(token_ids) tokens were committed by a step. num_wanted, num_on_miss: as in Commit.
        Returns what was sent ahead for this outcome, whose drafts are the request's now; None: the drafter is asked."""
        if request.next_ready:
            self._say_close(request.handle, CloseReason.PREEMPTED)
            self._now_at_next(request)
        if request.handle is None:
            if num_wanted:
                self.degrade(request, "no_link")
            return None
        base = len(request.token_ids) - len(token_ids)
        taken = self._taken(request, base, num_wanted)
        request.asked = num_wanted > 0 and taken is None
        leaving = self._leaving
        # The round waits for the new drafter's answers whatever the old one does.
        is_late = leaving is not None and leaving.is_late and request.handle in leaving.by_handle
        request.awaited = request.asked and request.ready and not is_late
        for line in self._lines():
            if request.handle in line.by_handle:
                has_drafts = taken is not None
                line.outbox.append(Commit(request.handle, base, token_ids, num_wanted, num_on_miss, has_drafts))
            elif request.next_handle is not None:
                # Asked there, too: a text that nobody asks for is read when there is nothing else to do.
                line.outbox.append(Commit(request.next_handle, base, token_ids, num_wanted, num_on_miss))
        return taken

    def _taken(self, request: Request, base: int, num_wanted: int) -> PrefetchedProposal | None:
        """What was sent ahead for what has just been committed to a text of `base` tokens, if it is all that is wanted:
        the drafter may be about to have more."""
        assert request.handle is not None
        ahead = request.ahead.get((len(request.token_ids) - 1, request.token_ids[-1]))
        request.ahead.clear()
        if ahead is None or ahead.base_committed_len != base or not 0 < num_wanted <= len(ahead.token_ids):
            return None
        drafts = list(ahead.token_ids[:num_wanted])
        request.proposal = Proposals(request.handle, len(request.token_ids), drafts, origin=ahead.origin)
        return ahead

    def teach(self, request: Request, lesson: TrainingSample) -> None:
        """Where it is drafted for; its commits have gone there before."""
        for line in self._lines():
            if lesson.request in line.by_handle:
                line.outbox.append(lesson)

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
            if not isinstance(message, Proposals | PrefetchedProposal):
                continue
            request = next((r for line in self._lines() if (r := line.by_handle.get(message.request))), None)
            if request is None:
                self.stale += isinstance(message, Proposals)
                continue
            if isinstance(message, PrefetchedProposal):
                # Where a q is sampled from, verification needs it, and there is none with these.
                wanted = message.request == request.handle and not request.sampling.mode.samples_q
                if wanted and len(request.ahead) < _MOST_AHEAD:
                    request.ahead[message.position, message.next_token] = message
                continue
            if message.request == request.next_handle:
                self._hear_from_next(request, message.status)
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
        """See DrafterConnection.is_unanswered."""
        return any(request.asked for request in self._requests.values())

    def is_awaited(self) -> bool:
        return any(request.awaited for request in self._requests.values())

    def give_up_waiting(self) -> list[Request]:
        """Stop waiting in this round. Returns whose answers are late."""
        late = [request for request in self._requests.values() if request.awaited]
        for request in late:
            request.awaited = False
            self.degrade(request, "late")
        for line in self._lines():
            line.is_late = line.is_late or any(request.handle in line.by_handle for request in late)
        return late

    def _take(self, request: Request, proposal: Proposals) -> None:
        if not request.sampling.mode.samples_q:
            proposal.q = None
        elif proposal.q is not None and proposal.q.ids.shape[1] != request.sampling.top_n:
            self.unusable += 1
            self.degrade(request, "unusable")
            return
        proposal.token_ids = [int(token) for token in proposal.token_ids][: request.max_drafts]
        request.proposal = proposal

    def _hear_from_next(self, request: Request, status: ProposalStatus) -> None:
        """Where it is about to move, its text has been read, or will not be: then it stays where it is."""
        if status in (ProposalStatus.READY, ProposalStatus.OK):
            request.next_ready = True
        elif status is not ProposalStatus.NOT_READY:
            self.refused[status] = self.refused.get(status, 0) + 1
            self._drop_next(request)

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
