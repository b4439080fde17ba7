"""The round, on the process that holds the target's rank 0, because the logits are there.

The order of events, each with the step it belongs to:

    begin         the scheduler has scheduled a step: requests come and go, the drafter hears of it at once
    choose        the forward pass has run: every token of the step is chosen, drafts verified against their q
    commit        the drafter is told what was chosen, and how many drafts each request wants next
    take_drafts   the scheduler asks: answers are waited for as long as that is worth it

Drafts and their q belong to a step. The steps in flight are `Round.steps`: one where the engine schedules when a step
is done, two where it schedules one ahead and begins a step between the choice and the commit of the one before. What a
request is like is read from its `Request`, never from what the scheduler expects.

The engine's step thread calls all of this; the link's threads and the keeper (which makes and remakes the link) work
beside it and meet it in queues only.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

from outrider.actors.observability.logs import about
from outrider.actors.observability.tracing import RoundTracer
from outrider.actors.round.deadline import RoundDeadline
from outrider.actors.round.drafter_client import DrafterClient
from outrider.actors.round.learning_recorder import LearningRecorder
from outrider.actors.round.length import FixedLengths, LengthController, Lengths
from outrider.actors.round.request import Deployment, Request, acceptance_group, carried
from outrider.actors.round.statistics import RoundStatistics, RoundTimes
from outrider.cluster.config import LinkConfig
from outrider.cluster.drafter_registry import Work
from outrider.cluster.link.link import Link
from outrider.cluster.link.messages import (
    CloseReason,
    DraftOrigin,
    Message,
    PrefetchedProposal,
    Proposals,
    ProposalStatus,
    SparseQ,
)

logger = logging.getLogger(__name__)

NO_DRAFTS = Lengths(0, 0)

UNUSABLE = -1
"""In place of a draft's id: verification ends the request's drafts there."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that a step is the first to hold. params: vLLM's SamplingParams. prompt_token_ids: None where a prompt
    has no ids, and nothing can be drafted. adapter: that the target answers it with; empty: none. num_pictures: in the
    prompt, whose ids only say where they are."""

    request_id: str
    params: Any
    prompt_token_ids: list[int] | None
    num_prompt_tokens: int
    adapter: str = ""
    num_pictures: int = 0


@dataclass(slots=True)
class Step:
    """One step of the engine's, from its start to its commits.

    num_tokens: scheduled, of all requests. drafts: scheduled ids of each request that has any. decodes_only: no prefill
    is among its requests.
    """

    number: int
    num_requests: int
    num_tokens: int
    decodes_only: bool
    drafts: dict[str, list[int]]
    arrived: Sequence[Arrival] = ()
    resumed: Iterable[str] = ()
    finished: Iterable[str] = ()
    preempted: Iterable[str] = ()

    q: dict[str, SparseQ] = field(default_factory=dict)
    """What the drafts were drawn from, at least as many rows as drafts; nothing for those that were not drawn."""

    allowed: dict[str, int] = field(default_factory=dict)
    """How many of a request's drafts its grammar allows, where that was known when all of them were in the batch."""

    @classmethod
    def of(cls, number: int, num_tokens: Mapping[str, int], drafts: Mapping[str, Sequence[int]], **events: Any) -> Step:
        """num_tokens: scheduled of each request. drafts: likewise, no alias of them is kept. events: who comes and
        goes."""
        step = cls(number, 0, 0, True, {}, **events)
        step.schedule(num_tokens, drafts)
        return step

    def schedule(self, num_tokens: Mapping[str, int], drafts: Mapping[str, Sequence[int]]) -> None:
        """What is to run, as in `of`. Once more where the step was scheduled before all of it was known."""
        self.num_requests, self.num_tokens = len(num_tokens), sum(num_tokens.values())
        self.drafts = {request_id: list(ids) for request_id, ids in drafts.items() if ids}
        self.decodes_only = bool(num_tokens) and all(
            count == 1 + len(self.drafts.get(request_id, ())) for request_id, count in num_tokens.items()
        )

    def num_drafts(self, request_id: str) -> int:
        """That count as drafts."""
        return self.allowed.get(request_id, len(self.drafts.get(request_id, ())))

    overlaps: bool = False
    """It is launched before what the step before it chose has been read: there are no drafts."""

    @property
    def width(self) -> int:
        """Columns of the step's committed ids. Two at least where vLLM reads them at once: with one it takes what is in
        it for a token, and -1 says that there is none."""
        return 1 if self.overlaps else max([1, *map(len, self.drafts.values())]) + 1

    started_s: float = 0.0
    target_s: float = 0.0
    wait_s: float = 0.0
    """For the proposals of the step that follows."""

    draft_work_us: int = 0
    is_committed: bool = False


class Chooser(Protocol):
    """Chooses tokens; `TargetSampler` is the real one."""

    def __call__(self, logits: Any, requests: Sequence[Request], step: Step, metadata: Any) -> Any: ...


class Round:
    """One deployment's rounds. Every method but offer_link is for the engine's step thread."""

    def __init__(
        self,
        choose: Chooser,
        deployment: Deployment,
        link: LinkConfig,
        lengths: LengthController | FixedLengths,
        *,
        names_requests: bool = False,
        tracer: RoundTracer | None = None,
        teaching: LearningRecorder | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """names_requests: tell the drafter their ids, for its log. tracer: where rounds are traced. teaching: with a
        drafter that learns."""
        self.requests: dict[str, Request] = {}
        self.steps: deque[Step] = deque()
        """Those whose time runs: the last, and the one before it until it is committed."""

        self.deployment = deployment
        self.statistics = RoundStatistics()
        self._choose = choose
        self._lengths = lengths
        self._length_controller_failures = 0
        self._wanted: dict[int, int] = {}
        """Commits by the number of drafts wanted."""

        self._clock = clock
        self._tracer = tracer
        self._teaching = teaching
        self._deadline = RoundDeadline(link.round_deadline_ms / 1e3, link.round_deadline_steps)
        self._drafter = DrafterClient(self.requests, link.link_deadline_ms / 1e3, clock, names_requests)
        self._lagging = False
        """The last answer was late: no waiting until the drafter is heard from."""

        self._warned_of_bad_proposals = False

    def offer_link(self, link: Link) -> None:
        """A new link is up. Taken over at the next step boundary, and the one before it is ended. Any thread."""
        self._drafter.offer(link)

    # One round.

    def begin(self, step: Step) -> None:
        """Opened and closed requests reach the drafter before the forward pass, and the books on the last step's time
        are closed. A step without tokens only tells who is finished."""
        if step.num_tokens:
            self._keep_time(step)
        for request_id in step.finished:
            self._leave(request_id, CloseReason.FINISHED)
        for request_id in step.preempted:
            self._pause(request_id)
        for arrival in step.arrived:
            self._enter(arrival)
        for request_id in step.resumed:
            self._pause(request_id)
            self._follow(self.requests[request_id])
        # A step that was scheduled ahead begins while the answers to the commit before it are on their way.
        self._check_link(at_boundary=not self._drafter.is_awaited())
        if not self._drafter.is_unanswered():
            # Who was asked is gone; the next commit starts the clock anew, and is waited for.
            self._drafter.nobody_is_asked()
            self._lagging = False
        self._drafter.flush()
        if not self.requests:
            self._goes_idle()

    def choose(self, step: Step, request_ids: Sequence[str], logits: Any, metadata: Any) -> Any:
        """Every token of the step, drafts verified. request_ids: in the order of the logits' rows. See Chooser."""
        for request_id, drafts in step.drafts.items():
            request = self.requests[request_id]
            if request.sampling.mode.samples_q:
                if drafts == request.drafts[: len(drafts)]:  # the scheduler may cut
                    if request.proposal is not None and request.proposal.q is not None:
                        step.q[request_id] = request.proposal.q
                else:
                    step.drafts[request_id] = [UNUSABLE] * len(drafts)
        requests = [self.requests[request_id] for request_id in request_ids]
        if self._teaching is not None:
            self._teaching.saw(step, requests, logits)
        return self._choose(logits, requests, step, metadata)

    def commit(self, step: Step, committed: Mapping[str, list[int]]) -> None:
        """What the step chose for each request: the accepted drafts and the next token; nothing where a prompt is not
        done. Requests that were aborted since are ignored."""
        step.is_committed = True
        going_on: list[Request] = []
        for request_id, token_ids in committed.items():
            request, drafted = self.requests.get(request_id), step.num_drafts(request_id)
            if request is None or not token_ids:
                continue
            request.token_ids.extend(token_ids)
            request.proposal, request.asked, request.awaited = None, False, False
            self.statistics.count(drafted, len(token_ids))
            if self._teaching is not None:
                self._teaching.committed(step, request, len(token_ids))
            if request.trace is not None and self._tracer is not None:
                self._tracer.committed(request.trace, drafted, len(token_ids), self._drafter.epoch)
            if drafted:
                self._guarded(self._lengths.observe_round, request.estimate, drafted, len(token_ids) - 1)
            request.ended = request.is_finished_by(token_ids, self.deployment.max_model_len)
            if request.running and not request.ended:
                going_on.append(request)
        lengths = self._guarded(self._lengths.choose, [request.estimate for request in going_on])
        self._hear_what_came(step)
        for request, wanted in zip(going_on, lengths or [NO_DRAFTS] * len(going_on), strict=True):
            if request.max_drafts:
                k = min(wanted.k, request.max_drafts)
                self._wanted[k] = self._wanted.get(k, 0) + 1
                ahead = self._drafter.commit(request, committed[request.request_id], k, min(wanted.k_miss, k))
                if ahead is not None:
                    self.statistics.foreseen += 1
                    self._answered(request, ahead.origin, k, ahead.step_us, 0.0)
        self._drafter.flush()

    def take_drafts(self, step: Step, request_ids: Sequence[str]) -> list[list[int]]:
        """Proposals for the step after `step`, one list per request, waiting no longer than the round's deadline. Those
        of a request that then sits a step out are handed out again.

        After a round whose answer was late there is no waiting until the drafter is heard from again.
        """
        started = self._clock()
        self._check_link()
        self._teach()
        longest_s = self._deadline.longest_s
        deadline = started + (0.0 if self._lagging else longest_s)
        while self._drafter.is_linked:
            remaining = deadline - self._clock() if self._drafter.is_awaited() else 0.0
            received = self._drafter.poll(max(remaining, 0.0))
            if received is not None:
                self._lagging = False
                deadline = started + longest_s
                step.draft_work_us += received.work_us
                self._take(received.messages, received.nbytes, self._clock() - started)
                continue
            self._check_link()
            if not self._drafter.is_awaited() or self._clock() >= deadline:
                break
        late = self._drafter.give_up_waiting()
        if late:
            self.statistics.late_rounds += len(late)
            if not self._lagging:  # else nobody waited, which says nothing of how long it would have taken
                waited_s = self._clock() - started
                for request in late:
                    self._guarded(self._lengths.observe_answer, request.estimate, DraftOrigin.NONE, 0, 0.0, waited_s)
            self._lagging = True
        self._drafter.check_silence()
        self._drafter.flush()
        waited_s = self._clock() - started
        step.wait_s += waited_s
        if self._tracer is not None:
            self._tracer.waited(waited_s)
        return [r.drafts if (r := self.requests.get(request_id)) is not None else [] for request_id in request_ids]

    def _teach(self) -> None:
        """While the drafter is at work on its answers. An error here must not end the engine."""
        if self._teaching is None:
            return
        try:
            for request, lesson in self._teaching.take():
                self._drafter.teach(request, lesson)
            self._drafter.flush()
        except Exception:
            logger.exception("lessons failed: nothing is taught any more until this replica is restarted")
            self._teaching = None

    def settle(self, step: Step, request_ids: Sequence[str], slots: Sequence[int]) -> list[list[int] | None]:
        """`take_drafts` for a step that was scheduled while the one before it ran, and has begun: no more drafts of
        each request than it has slots. None for a request that has ended: there is nothing to do for it."""
        drafts = self.take_drafts(step, request_ids)
        if self._tracer is not None:
            self._tracer.step_starts()
        self._check_link(at_boundary=True)
        self._drafter.flush()
        ended = {request_id for request_id in request_ids if (r := self.requests.get(request_id)) and r.ended}
        return [
            None if request_id in ended else ids[:room]
            for request_id, ids, room in zip(request_ids, drafts, slots, strict=True)
        ]

    # Beside it.

    def is_structured(self, request_id: str) -> bool:
        return self.requests[request_id].params.structured_outputs is not None

    def has_no_next_token(self, request_id: str) -> None:
        """The scheduler is told, and ends the request."""
        self.requests[request_id].ended = True

    def proposal_was_bad(self, request_id: str) -> None:
        """Verification could not use a proposal: its request decoded plainly this round."""
        self._drafter.unusable += 1
        self._drafter.degrade(self.requests[request_id], "unusable")
        if not self._warned_of_bad_proposals:
            self._warned_of_bad_proposals = True
            message = "request %s: a proposal was not usable; further ones are only counted"
            logger.warning(message, request_id, extra=about(request_id))

    def work(self) -> Work:
        """What the target does now. Any thread."""
        rate, plain_rate = self._guarded(self._lengths.rates) or (0.0, 0.0)
        rows = sum(each.running and not each.ended and each.max_drafts > 0 for each in tuple(self.requests.values()))
        return Work(rows, rate, plain_rate)

    def reset_statistics(self) -> None:
        """Forget the rounds of the warm-up."""
        self.statistics = RoundStatistics()
        self._deadline.forget()
        self.steps.clear()

    def status(self) -> dict[str, Any]:
        """In plain values. Asked for every couple of seconds, between two steps: by this a target that idles, and makes
        none, goes to another drafter, too."""
        if not self.requests:
            self._check_link(at_boundary=True)
            self._drafter.flush()
        lengths = self._guarded(self._lengths.snapshot)
        return {
            **self.statistics.snapshot(),
            "dropped_proposals": self._drafter.stale + self._drafter.unusable,
            "refused_proposals": sum(self._drafter.refused.values()),
            **({"lengths": lengths} if lengths else {}),
        }

    def metrics(self) -> dict[str, Any]:
        """What is exported, in plain values: counts, histograms in seconds, the length controller's state. Cheap, for
        the next step waits for it."""
        drafter = self._drafter
        return {
            **self.statistics.counts(),
            "histograms": self.statistics.histograms(),
            "picture_requests": self.statistics.picture_requests,
            "stale": drafter.stale,
            "unusable": drafter.unusable,
            "refused": {status.name.lower(): count for status, count in drafter.refused.items()},
            "wanted": {str(k): count for k, count in sorted(self._wanted.items())},
            "degraded": dict(drafter.degraded),
            "length_controller_failures": self._length_controller_failures,
            "lengths": self._guarded(self._lengths.snapshot) or {},
        }

    # Requests that come and go.

    def _enter(self, arrival: Arrival) -> None:
        self._leave(arrival.request_id, CloseReason.ABORTED)
        prompt = arrival.prompt_token_ids
        token_ids = [0] * arrival.num_prompt_tokens if prompt is None else list(prompt)
        shown = arrival.num_pictures > 0
        request = Request.of(
            arrival.request_id,
            arrival.params,
            token_ids,
            arrival.num_prompt_tokens,
            self.deployment,
            arrival.adapter,
            shows_pictures=shown,
        )
        self.statistics.picture_requests += shown
        if prompt is None or (shown and not self._can_be_read(token_ids)):
            request.max_drafts = 0
        if self._tracer is not None and (headers := carried(arrival.params).get("trace_headers")) is not None:
            request.trace = self._tracer.track(headers)
        if request.max_drafts:
            kind = acceptance_group(arrival.adapter, shown)
            estimate = self._guarded(self._lengths.track, request.max_drafts, kind)
            request.estimate = estimate or request.estimate
        if self._teaching is not None:
            self._teaching.enter(request, arrival.adapter, shows_pictures=shown)
        self.requests[arrival.request_id] = request
        self._follow(request)

    def _can_be_read(self, token_ids: Sequence[int]) -> bool:
        """By a drafter, as text: some models mark the place of a picture with ids that no vocabulary has."""
        return min(token_ids, default=0) >= 0 and max(token_ids, default=0) < self.deployment.vocab_size

    def _follow(self, request: Request) -> None:
        request.running = True
        if request.max_drafts:
            self._drafter.open(request)

    def _pause(self, request_id: str) -> None:
        if (request := self.requests.get(request_id)) is not None:
            request.running, request.proposal = False, None
            self._drafter.close(request, CloseReason.PREEMPTED)

    def _leave(self, request_id: str, reason: CloseReason) -> None:
        if (request := self.requests.pop(request_id, None)) is not None:
            self._drafter.close(request, reason)

    # What was heard, and what it took.

    def _hear_what_came(self, step: Step) -> None:
        """While the target verified."""
        while (received := self._drafter.poll(0.0)) is not None:
            self._lagging = False
            step.draft_work_us += received.work_us
            self._take(received.messages, received.nbytes, 0.0)

    def _goes_idle(self) -> None:
        """No request is left: the pause until the next one is nobody's round."""
        self.steps.clear()
        if self._tracer is not None:
            self._tracer.waited(0.0)

    def _check_link(self, at_boundary: bool = False) -> None:
        if self._drafter.check_link(at_boundary):
            self._lagging = False

    def _take(self, messages: Sequence[Message], nbytes: int, waited_s: float) -> None:
        drafted = sum(
            bool(message.token_ids) for message in messages if isinstance(message, Proposals | PrefetchedProposal)
        )
        self.statistics.count_frame(drafted, nbytes)
        for request, answer in self._drafter.hear(messages):
            if answer.status is ProposalStatus.OK:
                self._answered(request, answer.origin, len(answer.token_ids), answer.step_us, waited_s)
            else:
                self._observe(request, answer.origin, 0, answer.step_us, waited_s)

    def _answered(self, request: Request, origin: DraftOrigin, count: int, step_us: int, waited_s: float) -> None:
        self.statistics.count_answer(origin, step_us)
        self._observe(request, origin, count, step_us, waited_s)

    def _observe(self, request: Request, origin: DraftOrigin, count: int, step_us: int, waited_s: float) -> None:
        if request.trace is not None:
            request.trace.origin = origin
        self._guarded(self._lengths.observe_answer, request.estimate, origin, count, step_us / 1e6, waited_s)

    def _keep_time(self, step: Step) -> None:
        step.started_s = self._clock()
        if self._tracer is not None:
            self._tracer.step_starts()
        self.steps.append(step)
        while len(self.steps) > 2 or (len(self.steps) > 1 and self.steps[0].is_committed):
            done = self.steps.popleft()
            if not done.num_tokens:  # scheduled ahead for requests that had ended
                continue
            period_s = self.steps[0].started_s - done.started_s
            self.statistics.add_times(
                RoundTimes(
                    period_ms=period_s * 1e3,
                    target_ms=done.target_s * 1e3,
                    draft_ms=done.draft_work_us / 1e3,
                    wait_ms=done.wait_s * 1e3,
                )
            )
            if done.decodes_only:
                self._deadline.observe_step(period_s - done.wait_s)
                self._guarded(self._lengths.observe_step, done.num_requests, done.num_tokens, period_s - done.wait_s)

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
