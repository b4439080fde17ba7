"""The verifier's book of requests: what to tell the drafter, what it answered, whom a round still waits for. Pure.

``request_id`` is the engine's; ``handle`` is the link-local number that stands for it on the wire. A handle is never
used twice on a link, so an answer to an earlier life of a request (before a preemption) finds nobody.

The verification actor's own part of a round: commits out, proposals in, deadlines kept.

It lives in the process that holds the target's rank 0, because the logits are there. The engine's step thread calls
it; the link's threads and the keeper (which makes and remakes the link) work beside it and meet it in queues only.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from outrider.actors.observability.logs import about
from outrider.actors.observability.round_tracer import RoundTracer
from outrider.actors.round.length import FixedLengths, LengthController, Lengths
from outrider.actors.round.statistics import RoundStatistics, RoundTimes
from outrider.cluster.config import LinkConfig
from outrider.cluster.link import Link, LinkBroken
from outrider.cluster.link.codec import pack
from outrider.cluster.link.keeper import HANG
from outrider.cluster.link.messages import (
    MAX_NAME_LENGTH,
    Close,
    CloseReason,
    Commit,
    DraftSampling,
    Message,
    Name,
    Open,
    Origin,
    Proposals,
    ProposalStatus,
    SparseQ,
)


@dataclass(slots=True)
class TrackedRequest:
    request_id: str
    token_ids: list[int]
    """Committed: prompt and output."""

    num_speculative_tokens: int
    sampling: DraftSampling = field(default_factory=DraftSampling)
    handle: int | None = None
    """None while no link is up."""

    ready: bool = False
    """The drafter has drafted for this handle, so a round may wait for it."""

    commit_is_out: bool = False
    """The drafter has been told of a commit and has not answered it."""

    awaited: bool = False
    """A commit is out, the answer is not in, and the round waits for it."""

    drafts: list[int] = field(default_factory=list)
    """Proposed continuation of exactly token_ids. Kept until the next commit, whatever becomes of the link: the
    scheduler may hold them, and verification needs the q they were drawn from."""

    q: SparseQ | None = None
    """What the drafts were drawn from. None: not drawn, or verification need not know."""

    degraded: bool = False
    """It has decoded plainly for another reason than the length controller's choice."""

    def propose(self, drafts: list[int], q: SparseQ | None) -> None:
        self.drafts, self.q = drafts, q


class RoundBook:
    """Not thread-safe: the engine's step owns it."""

    def __init__(self, names_requests: bool = False) -> None:
        """names_requests: tell the drafter their ids."""
        self._names_requests = names_requests
        self._requests: dict[str, TrackedRequest] = {}
        self._by_handle: dict[int, TrackedRequest] = {}
        self._outbox: list[Message] = []
        self._next_handle = 1
        self._linked = False
        self.stale = 0
        """Proposals dropped because they continue another committed length than the request's."""

        self.unusable = 0
        """Proposals that cannot have been drawn as the request asked, or that the scheduler changed."""

        self.refused: dict[ProposalStatus, int] = {}
        """Answers without drafts, by reason."""

        self.wanted: dict[int, int] = {}
        """Commits by the number of drafts wanted."""

        self.degraded: dict[str, int] = {}
        """Requests that decoded plainly though they need not have, by the first cause: ``no_link``, ``late``,
        ``out_of_kv``, ``length``, ``unusable``."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def link_up(self) -> None:
        """A new link knows nobody: open every request on it with all its committed tokens."""
        self.link_down()
        self._linked = True
        for request in self._requests.values():
            self._open(request)

    def link_down(self) -> None:
        self._linked = False
        self._by_handle.clear()
        self._outbox.clear()
        for request in self._requests.values():
            request.handle = None
            request.ready = request.awaited = request.commit_is_out = False

    def track(self, request: TrackedRequest) -> None:
        self._requests[request.request_id] = request
        if self._linked:
            self._open(request)

    def untrack(self, request_id: str, reason: CloseReason) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._close(request, reason)

    def commit(
        self, request_id: str, token_ids: Sequence[int], finished: bool, num_wanted: int, num_on_miss: int
    ) -> None:
        """A step committed token_ids (accepted drafts and the next token). finished: nothing more will be needed.

        num_wanted, num_on_miss: as in Commit, cut to what the request allows.
        """
        request = self._requests.get(request_id)
        if request is None or not token_ids:
            return
        base = len(request.token_ids)
        request.token_ids.extend(token_ids)
        request.propose([], None)
        request.awaited = request.commit_is_out = False
        if finished:
            return
        wanted = min(num_wanted, request.num_speculative_tokens)
        self.wanted[wanted] = self.wanted.get(wanted, 0) + 1
        if request.handle is None:
            if wanted:
                self.degrade(request_id, "no_link")
        else:
            request.commit_is_out, request.awaited = wanted > 0, wanted > 0 and request.ready
            self._outbox.append(Commit(request.handle, base, token_ids, wanted, min(num_on_miss, wanted)))

    def degrade(self, request_id: str, cause: str) -> None:
        """The request decodes plainly for a round. Counts once in its life."""
        request = self._requests.get(request_id)
        if request is not None and not request.degraded:
            request.degraded = True
            self.degraded[cause] = self.degraded.get(cause, 0) + 1

    def take_outbox(self) -> list[Message]:
        outbox, self._outbox = self._outbox, []
        return outbox

    def receive(self, messages: Iterable[Message]) -> list[tuple[str, Proposals]]:
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
            if message.status not in (ProposalStatus.OK, ProposalStatus.READY):
                if message.base_committed_len == len(request.token_ids):
                    answers.append((request.request_id, message))
                self._refused(request, message.status)
                continue
            request.ready = True
            if message.status is ProposalStatus.OK and message.base_committed_len == len(request.token_ids):
                request.awaited = request.commit_is_out = False
                self._take(request, message)
                answers.append((request.request_id, message))
                continue
            self.stale += message.status is ProposalStatus.OK
            # Prefilled, or busy with an older commit until now: the answer to the last commit comes next.
            request.awaited = request.commit_is_out
        return answers

    def unanswered(self) -> bool:
        """A commit is out that a drafter in good health would answer, if only with NOT_READY."""
        return any(request.commit_is_out for request in self._requests.values())

    def awaited(self) -> bool:
        return any(request.awaited for request in self._requests.values())

    def give_up_waiting(self) -> list[str]:
        """Stop waiting in this round. Returns whose answers are late."""
        late = [request.request_id for request in self._requests.values() if request.awaited]
        for request_id in late:
            self._requests[request_id].awaited = False
            self.degrade(request_id, "late")
        return late

    def take_drafts(self, request_ids: Collection[str]) -> list[list[int]]:
        """Drafts of each request, [] where there are none. Those of a request that then sits a step out are handed
        out again."""
        return [list(r.drafts) if (r := self._requests.get(i)) is not None else [] for i in request_ids]

    def q_of(self, request_id: str, drafts: Sequence[int], position: int) -> tuple[bool, SparseQ | None]:
        """For verification: whether these scheduled drafts, whose first stands at `position`, are the request's
        proposal (the beginning of it: the scheduler may cut), and what it was drawn from."""
        request = self._requests.get(request_id)
        known = (
            request is not None and position == len(request.token_ids) and list(drafts) == request.drafts[: len(drafts)]
        )
        return known, request.q if known and request is not None else None

    def _take(self, request: TrackedRequest, message: Proposals) -> None:
        sampling, q = request.sampling, message.q
        if not sampling.mode.samples_q:
            q = None
        elif q is not None and q.ids.shape[1] != sampling.top_n:
            self.unusable += 1
            self.degrade(request.request_id, "unusable")
            return
        request.propose([int(token) for token in message.token_ids][: request.num_speculative_tokens], q)

    def _refused(self, request: TrackedRequest, status: ProposalStatus) -> None:
        self.refused[status] = self.refused.get(status, 0) + 1
        if status in (ProposalStatus.OUT_OF_KV, ProposalStatus.LENGTH):
            self.degrade(request.request_id, status.name.lower())
        request.ready = request.awaited = False
        # A drafter that is still prefilling answers the commit when it is done, the others never do.
        request.commit_is_out = request.commit_is_out and status is ProposalStatus.NOT_READY
        if status is ProposalStatus.UNKNOWN_REQUEST:
            self._close(request, CloseReason.ABORTED)
            self._open(request)

    def _open(self, request: TrackedRequest) -> None:
        request.handle, self._next_handle = self._next_handle, self._next_handle + 1
        request.ready = request.awaited = request.commit_is_out = False
        self._by_handle[request.handle] = request
        if self._names_requests:
            self._outbox.append(Name(request.handle, request.request_id[:MAX_NAME_LENGTH]))
        self._outbox.append(
            Open(
                request=request.handle,
                prompt_len=len(request.token_ids),
                offset=0,
                token_ids=list(request.token_ids),
                num_speculative_tokens=request.num_speculative_tokens,
                sampling=request.sampling,
            )
        )

    def _close(self, request: TrackedRequest, reason: CloseReason) -> None:
        if request.handle is not None:
            self._by_handle.pop(request.handle, None)
            self._outbox.append(Close(request.handle, reason))
            request.handle = None


logger = logging.getLogger(__name__)

NO_DRAFTS = Lengths(0, 0)

P = ParamSpec("P")
T = TypeVar("T")


class Verifier:
    """All methods but offer_link are for the engine's step thread."""

    def __init__(
        self, config: LinkConfig, lengths: LengthController | FixedLengths, names_requests: bool = False
    ) -> None:
        """names_requests: tell the drafter their ids, for its log."""
        self._lengths = lengths
        self._round_deadline_s = config.round_deadline_ms / 1e3
        self._book = RoundBook(names_requests)
        self._offered: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self._link: Link | None = None
        self._hang_deadline_s = config.link_deadline_ms / 1e3
        self._lagging = False
        """The last answer was late: no waiting until the drafter is heard from."""

        self._silent_since: float | None = None
        """Since when commits are out and nothing at all has come back."""

        self._warned_of_bad_proposals = False
        self._length_controller_failures = 0
        self.statistics = RoundStatistics()
        self.tracer: RoundTracer | None = None
        """Set where rounds are traced."""

        self._step_started: float | None = None
        self._step_load: tuple[int, int] | None = None
        """Requests and tokens of the step that runs; None when prefill is among them."""

        self._target_s = self._wait_s = 0.0
        self._work_us = 0

    def offer_link(self, link: Link) -> None:
        """A new link is up. Taken over at the next step boundary, and the one before it is ended. Any thread."""
        self._offered.put(link)

    def track(self, request: TrackedRequest) -> None:
        self._book.track(request)
        self._guarded(self._lengths.track, request.request_id, request.num_speculative_tokens)

    def untrack(self, request_id: str, reason: CloseReason) -> None:
        self._book.untrack(request_id, reason)
        self._guarded(self._lengths.untrack, request_id)

    def begin_step(self) -> None:
        """Adopt a new link, drop a broken one, and let opened and closed requests reach the drafter now."""
        self._check_link(at_boundary=True)
        if not self._book.unanswered():
            # Who was asked is gone; the next commit starts the clock anew, and is waited for.
            self._silent_since, self._lagging = None, False
        self._flush()

    def end_step(
        self, committed: Mapping[str, Sequence[int]], num_drafts: Mapping[str, int], finished: Collection[str]
    ) -> None:
        """Tell the drafter what each request's part of the step committed, and what the next round needs of it.
        Requests without tokens are left out."""
        going_on = []
        for request_id, token_ids in committed.items():
            if token_ids:
                drafted = num_drafts.get(request_id, 0)
                self.statistics.count(drafted, len(token_ids))
                if self.tracer is not None:
                    epoch = self._link.epoch if self._link is not None else 0
                    self.tracer.committed(request_id, drafted, len(token_ids), epoch)
                if drafted:
                    self._guarded(self._lengths.observe_round, request_id, drafted, len(token_ids) - 1)
                if request_id not in finished:
                    going_on.append(request_id)
        lengths = self._guarded(self._lengths.choose, going_on) or {}
        for request_id, token_ids in committed.items():
            if token_ids:
                wanted = lengths.get(request_id, NO_DRAFTS)
                self._book.commit(request_id, token_ids, request_id in finished, wanted.k, wanted.k_miss)
        self._flush()

    def _guarded(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Every call of the length controller's. An error of its must not end the engine: nothing is drafted any more,
        and the log says so."""
        try:
            return call(*args, **kwargs)
        except Exception:
            logger.exception("the length controller failed: no more drafts until this replica is restarted")
            self._length_controller_failures += 1
            self._lengths = FixedLengths(0)
            return None

    def take_drafts(self, request_ids: Collection[str]) -> list[list[int]]:
        """Proposals for the next step, one list per request, waiting no longer than the round's deadline.

        After a round whose answer was late there is no waiting until the drafter is heard from again.
        """
        started = time.perf_counter()
        self._check_link()
        deadline = started + (0.0 if self._lagging else self._round_deadline_s)
        while self._link is not None:
            remaining = deadline - time.perf_counter() if self._book.awaited() else 0.0
            received = self._link.poll(max(remaining, 0.0))
            if received is not None:
                self._lagging, self._silent_since = False, None
                deadline = started + self._round_deadline_s
                self._work_us += received.work_us
                drafted = sum(bool(m.token_ids) for m in received.messages if isinstance(m, Proposals))
                self.statistics.count_frame(drafted, received.nbytes)
                self._take_answers(received.messages, time.perf_counter() - started)
                continue
            self._check_link()
            if not self._book.awaited() or time.perf_counter() >= deadline:
                break
        late = self._book.give_up_waiting()
        if late:
            self.statistics.late_rounds += len(late)
            if not self._lagging:  # else nobody waited, which says nothing of how long it would have taken
                waited_s = time.perf_counter() - started
                for request_id in late:
                    self._guarded(self._lengths.observe_answer, request_id, Origin.NONE, 0, 0.0, waited_s)
            self._lagging = True
        self._check_silence()
        self._flush()
        waited_s = time.perf_counter() - started
        self._wait_s += waited_s
        if self.tracer is not None:
            self.tracer.waited(waited_s)
        return self._book.take_drafts(request_ids)

    def q_of(self, request_id: str, drafts: Sequence[int], position: int) -> tuple[bool, SparseQ | None]:
        """See RoundBook.q_of."""
        return self._book.q_of(request_id, drafts, position)

    def proposal_was_bad(self, request_id: str) -> None:
        """Verification could not use a proposal: its request decoded plainly this round."""
        self._book.unusable += 1
        self._book.degrade(request_id, "unusable")
        if not self._warned_of_bad_proposals:
            self._warned_of_bad_proposals = True
            message = "request %s: a proposal was not usable; further ones are only counted"
            logger.warning(message, request_id, extra=about(request_id))

    def step_starts(self, num_requests: int, num_tokens: int, decodes_only: bool) -> None:
        """Close the books on the last round's time and open the next.

        num_tokens: scheduled in the step that starts, for num_requests. decodes_only: no prefill is among them.
        """
        now = time.perf_counter()
        if self.tracer is not None:
            self.tracer.step_starts()
        if self._step_started is not None:
            period_s = now - self._step_started
            self.statistics.add_times(
                RoundTimes(
                    period_ms=period_s * 1e3,
                    target_ms=self._target_s * 1e3,
                    draft_ms=self._work_us / 1e3,
                    wait_ms=self._wait_s * 1e3,
                )
            )
            if self._step_load is not None:
                self._guarded(self._lengths.observe_step, *self._step_load, period_s - self._wait_s)
        self._step_started, self._target_s, self._wait_s, self._work_us = now, 0.0, 0.0, 0
        self._step_load = (num_requests, num_tokens) if decodes_only else None

    def add_target_time(self, seconds: float) -> None:
        self._target_s += seconds

    def reset_statistics(self) -> None:
        """Forget the rounds of the warm-up."""
        self.statistics = RoundStatistics()
        self._step_started = None

    def goes_idle(self) -> None:
        """No request is left: the pause until the next one is nobody's round."""
        self._step_started = None
        if self.tracer is not None:
            self.tracer.waited(0.0)

    def status(self) -> dict[str, Any]:
        lengths = self._guarded(self._lengths.snapshot)
        return {
            **self.statistics.snapshot(),
            "dropped_proposals": self._book.stale + self._book.unusable,
            "refused_proposals": sum(self._book.refused.values()),
            **({"lengths": lengths} if lengths else {}),
        }

    def metrics(self) -> dict[str, Any]:
        """What is exported, in plain values: counts, histograms in seconds, the length controller's state. Cheap, for
        the next step waits for it."""
        book = self._book
        lengths = self._guarded(self._lengths.snapshot)
        return {
            **self.statistics.counts(),
            "histograms": self.statistics.histograms(),
            "stale": book.stale,
            "unusable": book.unusable,
            "refused": {status.name.lower(): count for status, count in book.refused.items()},
            "wanted": {str(k): count for k, count in sorted(book.wanted.items())},
            "degraded": dict(book.degraded),
            "length_controller_failures": self._length_controller_failures,
            "lengths": lengths or {},
        }

    def _take_answers(self, messages: Sequence[Message], waited_s: float) -> None:
        for request_id, answer in self._book.receive(messages):
            if answer.status is ProposalStatus.OK:
                self.statistics.count_answer(answer.origin, answer.step_us)
            step_s = answer.step_us / 1e6
            if self.tracer is not None:
                self.tracer.answered(request_id, answer.origin)
            num_tokens = len(answer.token_ids)
            self._guarded(self._lengths.observe_answer, request_id, answer.origin, num_tokens, step_s, waited_s)

    def _check_silence(self) -> None:
        """A drafter that beats its heart but answers no commit for a whole link deadline hangs."""
        now = time.perf_counter()
        if self._link is None or not self._book.unanswered():
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since > self._hang_deadline_s:
            self._link.abort(f"{HANG}: no answer for {self._hang_deadline_s:g} s")

    def _check_link(self, at_boundary: bool = False) -> None:
        """at_boundary: nobody waits for answers. A link that works is left for another there and nowhere else."""
        while at_boundary or self._link is None or self._link.broken is not None:
            try:
                offered = self._offered.get_nowait()
            except queue.Empty:
                break
            if offered.broken is not None:
                continue
            if self._link is not None and self._link.broken is None:
                self._link.retire(f"link of epoch {offered.epoch} takes its place")
            self._link = offered
            self._lagging, self._silent_since = False, None
            self._book.link_up()
        if self._link is not None and self._link.broken is not None:
            logger.warning("speculation stops until there is a new link: %s", self._link.broken)
            self._link = None
            self._book.link_down()

    def _flush(self) -> None:
        messages: list[Message] = self._book.take_outbox()
        if messages and self._link is not None:
            with suppress(LinkBroken):  # noticed, logged and counted at the next step boundary
                self._link.post(pack(messages, self._link.capacity_words))
