"""Talks to the drafter for the Verifier: opens and closes requests, sends commits, and takes the answers.

A drafter's mistake, silence or death ends here: what does not fit is dropped and counted, and its request decodes
plainly.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from outrider.actors.round.request import Request
from outrider.cluster.link import Link, LinkBroken, Received
from outrider.cluster.link.messages import (
    MAX_NAME_LENGTH,
    Close,
    CloseReason,
    Commit,
    Message,
    Open,
    PrefetchedProposal,
    Proposals,
    ProposalStatus,
    TrainingSample,
    pack,
)

logger = logging.getLogger(__name__)

HANG = "drafter hangs"
"""How the reason of a link begins that was given up because its drafter lives but answers nothing."""

_MAX_PREFETCHED = 128
"""Outcomes of one round that a request keeps drafts for: more than K drafts and their alternatives make."""

_STEP_KEEP = 1 - 1 / 16
_MAX_STEP_RATIO = 2.0
"""Caps a step at this many times the mean, so that one stall changes little and a lasting change is followed."""


class RoundDeadline:
    """Decides how long a round may wait for its proposals."""

    def __init__(self, longest_s: float, steps: float | None = None) -> None:
        """Args:
        longest_s: the longest wait; the only limit until a step has been measured.
        steps: the wait in steps of the target, by their recent duration. None: longest_s alone.
        """
        self._longest_s, self._steps = longest_s, steps
        self._step_s = 0.0

    @property
    def longest_s(self) -> float:
        """Returns the longest wait of a round now, in seconds."""
        if self._steps is None or not self._step_s:
            return self._longest_s
        return min(self._longest_s, self._steps * self._step_s)

    def observe_step(self, step_s: float) -> None:
        """Takes in the duration of a step without prefill, less its wait for proposals."""
        if step_s <= 0:
            return
        if not self._step_s:
            self._step_s = step_s
        self._step_s += (min(step_s, _MAX_STEP_RATIO * self._step_s) - self._step_s) * (1 - _STEP_KEEP)

    def reset(self) -> None:
        """Forgets the steps measured so far, such as those of the warm-up, which initialise lazily."""
        self._step_s = 0.0


class DrafterClient:
    """Speaks for all requests of the target over one link. Not thread-safe, except for `offer`.

    When the link changes, every running request is opened on the new one with all its tokens, and decodes plainly until
    its first answer.
    """

    def __init__(
        self,
        requests: Mapping[str, Request],
        hang_deadline_s: float,
        clock: Callable[[], float],
        names_requests: bool = False,
    ) -> None:
        """Args:
        requests: the round's own table.
        hang_deadline_s: a drafter that leaves commits unanswered for longer is given up.
        names_requests: send the drafter the requests' ids, for its log.
        """
        self._requests = requests
        self._hang_deadline_s = hang_deadline_s
        self._clock = clock
        self._names_requests = names_requests
        self._offered: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self._link: Link | None = None
        self._outbox: list[Message] = []
        self._by_handle: dict[int, Request] = {}
        self._next_handle = 1
        self._silent_since: float | None = None
        """Since when commits have been unanswered and nothing at all has been received."""

        self.is_lagging = False
        """The last answer was late: no round waits until the drafter is heard from."""

        self.stale = 0
        """Proposals dropped because they continue another committed length than the request's."""

        self.unusable = 0
        """Proposals that cannot have been drawn as the request asked, or that verification could not use."""

        self.refused: dict[ProposalStatus, int] = {}
        """Answers without drafts, by reason."""

        self.degraded: dict[str, int] = {}
        """Requests that decoded plainly though they need not have, by the first cause: ``no_link``, ``late``,
        ``out_of_kv``, ``length``, ``unusable``."""

    # The link.

    @property
    def epoch(self) -> int:
        """Returns the link's epoch; 0 without a link."""
        return self._link.epoch if self._link is not None else 0

    def offer(self, link: Link) -> None:
        """Offers a new link, which is taken over at the next step boundary. Any thread may call this.

        A link that was offered before and not taken yet is retired.
        """
        with suppress(queue.Empty):
            while True:
                self._offered.get_nowait().close(f"link of epoch {link.epoch} takes its place")
        self._offered.put(link)

    def check_link(self, at_boundary: bool = False) -> bool:
        """Drops a broken link and takes over a new one. Returns whether there is a link now.

        Args:
            at_boundary: no answers are awaited. A working link is left for another only then.
        """
        lost = None if self._link is None else self._link.broken
        if lost is not None:
            self._leave_link()
        while at_boundary or self._link is None:
            try:
                offered = self._offered.get_nowait()
            except queue.Empty:
                break
            if offered.broken is None:
                self._take_over(offered)
        if lost is not None and self._link is None:
            logger.warning("speculation stops until there is a new link: %s", lost)
        return self._link is not None

    def _take_over(self, link: Link) -> None:
        if self._link is not None:
            self._link.close(f"link of epoch {link.epoch} takes its place")
            self._leave_link()
        self._link, self.is_lagging = link, False
        for request in self._requests.values():
            if request.running and request.max_drafts:
                self.open(request)

    def _leave_link(self) -> None:
        self._link, self._silent_since = None, None
        self._outbox.clear()
        for request in self._by_handle.values():
            request.detach()
        self._by_handle.clear()

    def flush(self) -> None:
        """Sends the messages that have collected."""
        messages, self._outbox = self._outbox, []
        if messages and self._link is not None:
            with suppress(LinkBroken):  # noticed, logged and counted at the next step boundary
                self._link.post(pack(messages))

    def poll(self, timeout_s: float) -> Received | None:
        """Returns the next frame; None if nothing comes within timeout_s, or without a link."""
        received = None if self._link is None else self._link.poll(timeout_s)
        if received is not None:
            self._silent_since, self.is_lagging = None, False
        return received

    def check_silence(self) -> None:
        """Aborts the link of a drafter that has answered no commit for the hang deadline, heartbeats or not."""
        now = self._clock()
        if not self.is_unanswered():
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        elif self._link is not None and now - self._silent_since > self._hang_deadline_s:
            self._link.abort(f"{HANG}: no answer for {self._hang_deadline_s:g} s")

    def reset_lateness(self) -> None:
        """Forgets lateness and silence where no commit is unanswered: the next commit is waited for again."""
        if not self.is_unanswered():
            self._silent_since, self.is_lagging = None, False

    # Messages to the drafter.

    def open(self, request: Request) -> None:
        """Opens a request with all its committed tokens. Does nothing without a link."""
        if self._link is None:
            return
        request.detach()
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        request.handle, self._by_handle[handle] = handle, request
        self._outbox.append(
            Open(
                request=handle,
                token_ids=list(request.token_ids),
                num_speculative_tokens=request.max_drafts,
                sampling=request.sampling,
                name=request.request_id[:MAX_NAME_LENGTH] if self._names_requests else "",
            )
        )

    def close(self, request: Request, reason: CloseReason) -> None:
        """Closes a request that is open; answers to its handle count as stale from now on."""
        if request.handle is not None:
            del self._by_handle[request.handle]
            self._outbox.append(Close(request.handle, reason))
        request.detach()

    def commit(
        self, request: Request, token_ids: Sequence[int], num_wanted: int, num_on_miss: int, num_paths: int = 1
    ) -> PrefetchedProposal | None:
        """Tells the drafter the last len(token_ids) tokens of a request, which a step has committed.

        Returns the prefetched proposal for this outcome, whose drafts are the request's now; None if there is none, and
        the drafter is asked for drafts.

        Args:
            num_wanted, num_on_miss, num_paths: as in Commit.
        """
        if request.handle is None:
            if num_wanted:
                self.degrade(request, "no_link")
            return None
        base = len(request.token_ids) - len(token_ids)
        prefetched = self._take_prefetched(request, base, num_wanted, num_paths)
        request.asked = num_wanted > 0 and prefetched is None
        request.awaited = request.asked and request.ready
        self._outbox.append(
            Commit(request.handle, base, token_ids, num_wanted, num_on_miss, prefetched is not None, num_paths)
        )
        return prefetched

    def _take_prefetched(
        self, request: Request, base: int, num_wanted: int, num_paths: int
    ) -> PrefetchedProposal | None:
        """Returns the prefetched proposal for the tokens after the first `base`, if it has all the drafts wanted."""
        found = request.prefetched.get((len(request.token_ids) - 1, request.token_ids[-1]))
        request.prefetched.clear()
        if found is None or num_paths > 1 or found.base_committed_len != base:
            return None
        # With fewer drafts than wanted it is better to ask: the drafter may have more by now.
        if not 0 < num_wanted <= len(found.token_ids):
            return None
        drafts = list(found.token_ids[:num_wanted])
        request.proposal = Proposals(found.request, len(request.token_ids), drafts, origin=found.origin)
        return found

    def teach(self, sample: TrainingSample) -> None:
        """Sends a training sample to a drafter that learns. The commits it is about have been sent before."""
        if sample.request in self._by_handle:
            self._outbox.append(sample)

    def degrade(self, request: Request, cause: str) -> None:
        """Notes that a request decodes plainly for a round. Counts once in its life."""
        if not request.degraded:
            request.degraded = True
            self.degraded[cause] = self.degraded.get(cause, 0) + 1

    # Answers.

    def hear(self, messages: Iterable[Proposals | PrefetchedProposal]) -> list[tuple[Request, Proposals]]:
        """Applies the drafter's answers. Returns those to the last commits, each with its request.

        Answers for a closed handle or another committed length are dropped.
        """
        answers = []
        for message in messages:
            if isinstance(message, PrefetchedProposal):
                self._keep_prefetched(message)
            elif (request := self._by_handle.get(message.request)) is None:
                self.stale += 1
            elif self._apply(request, message):
                answers.append((request, message))
        return answers

    def _keep_prefetched(self, message: PrefetchedProposal) -> None:
        request = self._by_handle.get(message.request)
        # A prefetched proposal carries no q, so verification would take q as one-hot.
        if request is None or request.sampling.has_q or len(request.prefetched) >= _MAX_PREFETCHED:
            return
        request.prefetched[message.position, message.next_token] = message

    def _apply(self, request: Request, answer: Proposals) -> bool:
        """Applies an answer to its request: takes its drafts, notes that the prompt is read, or counts a refusal.

        Returns whether it answers the last commit.
        """
        is_last = answer.base_committed_len == len(request.token_ids)
        if answer.status not in (ProposalStatus.OK, ProposalStatus.READY):
            self._refuse(request, answer.status)
            return is_last
        request.ready = True
        if answer.status is ProposalStatus.OK and is_last:
            request.awaited = request.asked = False
            self._accept(request, answer)
            return True
        self.stale += answer.status is ProposalStatus.OK
        # The drafter has read the prompt, or answered an older commit: the answer to the last commit comes next.
        request.awaited = request.asked
        return False

    def _accept(self, request: Request, proposal: Proposals) -> None:
        if not request.sampling.mode.samples_q:
            proposal.q = None
        elif proposal.q is not None and proposal.q.ids.shape[1] != request.sampling.top_n:
            self.unusable += 1
            self.degrade(request, "unusable")
            return
        proposal.token_ids = [int(token) for token in proposal.token_ids][: request.max_drafts]
        proposal.paths = proposal.paths[: request.num_paths - 1]
        request.proposal = proposal

    def _refuse(self, request: Request, status: ProposalStatus) -> None:
        self.refused[status] = self.refused.get(status, 0) + 1
        if status in (ProposalStatus.OUT_OF_KV, ProposalStatus.LENGTH):
            self.degrade(request, status.name.lower())
        request.ready = request.awaited = False
        # A drafter that is still prefilling answers the commit when it is done; the others never do.
        request.asked = request.asked and status is ProposalStatus.NOT_READY
        if status is ProposalStatus.UNKNOWN_REQUEST:
            self.close(request, CloseReason.ABORTED)
            self.open(request)

    # Waiting.

    def is_unanswered(self) -> bool:
        """Returns whether a commit is out that a healthy drafter would answer, if only with NOT_READY."""
        return any(request.asked for request in self._requests.values())

    def is_awaited(self) -> bool:
        """Returns whether the round waits for an answer."""
        return any(request.awaited for request in self._requests.values())

    def give_up_waiting(self) -> list[Request]:
        """Stops waiting in this round. Returns the requests whose answers are late."""
        late = [request for request in self._requests.values() if request.awaited]
        for request in late:
            request.awaited = False
            self.degrade(request, "late")
        self.is_lagging = self.is_lagging or bool(late)
        return late
