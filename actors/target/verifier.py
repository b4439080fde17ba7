"""The verification actor's own part of a round: commits out, proposals in, deadlines kept.

It lives in the process that holds the target's rank 0, because the logits are there. The engine's step thread calls
it; the link's threads and the keeper (which makes and remakes the link) work beside it and meet it in queues only.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from actors.length.fixed import FixedLengths, Lengths
from actors.length.length_controller import LengthController
from actors.message_codec import pack
from actors.messages import CloseReason, Message, Origin, Proposals, ProposalStatus, SparseQ
from actors.observability.logs import about
from actors.observability.round_tracer import RoundTracer
from actors.target.round_statistics import RoundStatistics, RoundTimes
from actors.target.rounds import RoundBook, TrackedRequest
from cluster.config import LinkConfig
from cluster.link import Link, LinkBroken
from cluster.link_keeper import HANG

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
