"""Runs the round in the Verifier's process, because the logits are there.

The order of events, each with the step it belongs to:

    begin          a step starts: requests come and go, the drafter hears of it at once
    insert_drafts  steps scheduled ahead only: waits for proposals and replaces the step's placeholder draft tokens
    choose         the forward pass has run: every token of the step is chosen, and its drafts are verified
    commit         tokens are appended, the drafter is told, and how many drafts each request wants next
    take_drafts    steps scheduled one at a time only: waits for proposals, the next step's drafts. Where steps are
                   scheduled ahead, insert_drafts does this first

Drafts and their q belong to a step. The engine core may have scheduled a further step, but here one runs at a time: it
begins after the commit of the one before. What a request is like is read from its `Request`, never from what the
scheduler expects.

The engine's step thread makes all of these calls. The link's threads, and the keeper that makes and remakes the link,
run beside it and meet it in queues only.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.actors.observability.logs import about
from outrider.actors.observability.tracing import RoundTracer
from outrider.actors.round.drafter_client import DrafterClient, RoundDeadline
from outrider.actors.round.learning_recorder import LearningRecorder
from outrider.actors.round.length import FixedLengths, LengthController, SafeLengths
from outrider.actors.round.paths import PathBudget
from outrider.actors.round.request import PLACEHOLDER_TOKEN_ID, Deployment, Draft, Request, acceptance_group, carried
from outrider.actors.round.statistics import RoundStatistics
from outrider.cluster.config import LinkConfig
from outrider.cluster.drafter_registry import Work
from outrider.cluster.link.link import Link
from outrider.cluster.link.messages import (
    CloseReason,
    DraftOrigin,
    DraftPath,
    Message,
    PrefetchedProposal,
    Proposals,
    ProposalStatus,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arrival:
    """Describes a request in the first step that holds it.

    params: vLLM's SamplingParams. prompt_token_ids: None where a prompt has no ids, and nothing can be drafted.
    adapter: the LoRA adapter the target answers with; empty for none. num_pictures: pictures in the prompt, whose ids
    only mark their places.
    """

    request_id: str
    params: Any
    prompt_token_ids: list[int] | None
    num_prompt_tokens: int
    adapter: str = ""
    num_pictures: int = 0


@dataclass(slots=True)
class Step:
    """Holds one step of the engine, from its start to its commits.

    num_tokens: scheduled for all requests. drafts: by request or path row, of those that have any. decodes_only: no
    request of it is in its prefill.
    """

    number: int
    num_tokens: int
    decodes_only: bool
    drafts: dict[str, Draft]
    arrived: Sequence[Arrival] = ()
    resumed: Iterable[str] = ()
    finished: Iterable[str] = ()
    preempted: Iterable[str] = ()

    allowed: dict[str, int] = field(default_factory=dict)
    """How many of a request's drafts count, where that is fewer than its rows: those that its grammar allows, or 0
    where vLLM made room for drafts that were never proposed."""

    overlaps: bool = False
    """It is launched before the choice of the step before it has been read: there are no drafts."""

    started_s: float = 0.0
    target_s: float = 0.0
    wait_s: float = 0.0
    """The wait for proposals between its start and the next step's."""

    draft_work_us: int = 0

    paths: Sequence[tuple[str, DraftPath]] = ()
    """Request ids, each with a further path that is worth its rows, the best first. The same on every rank."""

    path_rows: dict[str, str] = field(default_factory=dict)
    """The rows of further paths that are in the step: the id of each row, which `drafts` has too, and its request's."""

    expected: dict[str, float] = field(default_factory=dict)
    """How many more tokens each request with path rows was expected to have by them."""

    gained: Mapping[str, int] = field(default_factory=dict)
    """How many more tokens each request has by a path than by its own row."""

    best_rows: Mapping[str, str] = field(default_factory=dict)
    """The path row of each of these requests, whose tokens became the request's."""

    @classmethod
    def of(cls, number: int, num_tokens: Mapping[str, int], drafts: Mapping[str, Sequence[int]], **events: Any) -> Step:
        """Makes a step of what the scheduler says.

        Args:
            num_tokens: scheduled for each request.
            drafts: ids scheduled for each request; PLACEHOLDER_TOKEN_ID where they are not known yet.
            events: requests that come and go.
        """
        known = {request_id: Draft(list(ids)) for request_id, ids in drafts.items() if ids}
        step = cls(number, 0, True, known, **events)
        step.count(num_tokens)
        return step

    def count(self, num_tokens: Mapping[str, int]) -> None:
        """Counts the tokens scheduled for each request, once more after drafts have come that were not known before."""
        self.num_tokens = sum(num_tokens.values())
        self.decodes_only = bool(num_tokens) and all(
            count == 1 + len(self.draft(request_id).ids) for request_id, count in num_tokens.items()
        )

    def draft(self, request_id: str) -> Draft:
        """Returns the request's draft, without tokens if it has none."""
        return self.drafts.get(request_id) or Draft()

    def num_drafts(self, request_id: str) -> int:
        """Returns how many draft tokens of a request count as drafted: those of its longest path."""
        paths = [len(self.drafts[row_id].ids) for row_id, owner in self.path_rows.items() if owner == request_id]
        return max([self.allowed.get(request_id, len(self.draft(request_id).ids)), *paths])

    def add_path(self, row_id: str, request_id: str, path: DraftPath) -> None:
        """Adds the row of a further path of a request."""
        self.drafts[row_id], self.path_rows[row_id] = Draft(list(path.token_ids)), request_id
        self.expected[request_id] = self.expected.get(request_id, 0.0) + path.gain

    @property
    def width(self) -> int:
        """Returns the number of columns of the step's committed ids.

        It is at least two where vLLM reads them at once: with one column it takes its value for a token, and -1 says
        that there is none.
        """
        return 1 if self.overlaps else max([1, *(len(draft.ids) for draft in self.drafts.values())]) + 1


Chooser = Callable[[Any, Sequence[Request], Sequence[Draft], int, Any], Any]
"""Chooses tokens from logits, requests, drafts, width and metadata; `TargetSampler` is the real one."""


class Round:
    """Runs one deployment's rounds. Every method but `offer_link` and `work` is for the engine's step thread."""

    def __init__(
        self,
        choose: Chooser,
        deployment: Deployment,
        link: LinkConfig,
        lengths: LengthController | FixedLengths,
        *,
        names_requests: bool = False,
        tracer: RoundTracer | None = None,
        recorder: LearningRecorder | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Args:
        names_requests: send the drafter the requests' ids, for its log.
        tracer: where rounds are traced.
        recorder: with a drafter that learns.
        """
        self.requests: dict[str, Request] = {}
        self.deployment = deployment
        self.statistics = RoundStatistics()
        self._choose = choose
        self._lengths = SafeLengths(lengths)
        self._paths = PathBudget()
        self._wanted: Counter[int] = Counter()
        """Commits by the number of drafts wanted."""

        self._picture_requests = 0
        self._chains: Counter[str] = Counter()
        """Requests that verify one path where others verify several, by the reason."""

        self._timed: Step | None = None
        """The last step that began. Its duration ends when the next one begins."""

        self._clock = clock
        self._tracer = tracer
        self._recorder = recorder
        self._deadline = RoundDeadline(link.round_deadline_ms / 1e3, link.round_deadline_steps)
        self._drafter = DrafterClient(self.requests, link.link_deadline_ms / 1e3, clock, names_requests)
        self._warned_of_bad_proposals = False

    def offer_link(self, link: Link) -> None:
        """Offers a new link, which replaces the one before it at the next step boundary. Any thread may call this."""
        self._drafter.offer(link)

    # One round.

    def begin(self, step: Step) -> None:
        """Tells the drafter before the forward pass which requests have come and gone.

        Also records the duration of the step before. A step without tokens only says who is finished.
        """
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
        for request_id, draft in step.drafts.items():
            if draft.ids[0] != PLACEHOLDER_TOKEN_ID:  # else they are not known before `insert_drafts`
                self._attach_q(self.requests[request_id], draft)
        # A step that was scheduled ahead begins while the answers to the commit before it are on their way.
        self._drafter.check_link(at_boundary=not self._drafter.is_awaited())
        self._drafter.reset_lateness()
        self._drafter.flush()
        if not self.requests:
            # The idle time until the next request belongs to no round.
            self._timed = None
            if self._tracer is not None:
                self._tracer.waited(0.0)

    def choose(self, step: Step, row_ids: Sequence[str], logits: Any, metadata: Any) -> Any:
        """Chooses every token of the step and verifies its drafts.

        Args:
            row_ids: of requests and path rows, in the order of the rows of the logits.
            logits, metadata: see `TargetSampler`.
        """
        requests = [self.requests[step.path_rows.get(row_id, row_id)] for row_id in row_ids]
        if self._recorder is not None:
            self._recorder.record_logits(step, row_ids, requests, logits)
        return self._choose(logits, requests, [step.draft(row_id) for row_id in row_ids], step.width, metadata)

    def commit(self, step: Step, committed: Mapping[str, list[int]]) -> None:
        """Appends what the step chose, and tells the drafter.

        Args:
            committed: for each request the accepted drafts and the next token; nothing where a prompt is not done.
                Requests that were aborted since are ignored.
        """
        going_on: list[Request] = []
        for request_id, token_ids in committed.items():
            request, drafted = self.requests.get(request_id), step.num_drafts(request_id)
            if request is None or not token_ids:
                continue
            request.token_ids.extend(token_ids)
            request.proposal, request.asked, request.awaited = None, False, False
            self.statistics.count(drafted, len(token_ids))
            gained = step.gained.get(request_id, 0)
            if request_id in step.expected:
                self._paths.observe(step.expected[request_id], gained)
                self.statistics.count_paths(sum(owner == request_id for owner in step.path_rows.values()), gained)
            if self._recorder is not None:
                self._recorder.record_commit(step, request, len(token_ids))
            if request.trace is not None and self._tracer is not None:
                self._tracer.committed(request.trace, drafted, len(token_ids), self._drafter.epoch)
            if drafted:  # of the main line: a chain has no other
                self._lengths.observe_round(request.estimate, drafted, len(token_ids) - 1 - gained)
            request.ended = request.is_finished_by(token_ids, self.deployment.max_model_len)
            if request.running and not request.ended:
                going_on.append(request)
        trees = any(request.num_paths > 1 for request in going_on) and self._paths.wants_paths(
            self._lengths.token_price(), self._lengths.round_price()
        )
        lengths = self._lengths.choose([request.estimate for request in going_on], trees)
        self._read_answers(step)
        for request, wanted in zip(going_on, lengths, strict=True):
            if request.max_drafts:
                k = min(wanted.k, request.max_drafts)
                self._wanted[k] += 1
                k_miss, token_ids = min(wanted.k_miss, k), committed[request.request_id]
                # A tree is drafted after the commit, never ahead, so it needs a request that waits on a miss.
                num_paths = request.num_paths if trees and k_miss else 1
                prefetched = self._drafter.commit(request, token_ids, k, k_miss, num_paths)
                if prefetched is not None:
                    self.statistics.foreseen += 1
                    self._count_answer(request, prefetched.origin, k, prefetched.step_us, 0.0)
        self._drafter.flush()

    def take_drafts(self, step: Step, request_ids: Sequence[str]) -> list[list[int]]:
        """Waits for the answers to the last commits, no longer than the round's deadline, and adds the wait to `step`.

        After a late round, later rounds do not wait for proposals at all until a message from the drafter arrives.
        Returns one list for each request; drafts of a request that then sits a step out are handed out again.
        """
        started = self._clock()
        self._send_training_samples()
        longest_s = self._deadline.longest_s
        deadline = started + (0.0 if self._drafter.is_lagging else longest_s)
        while self._drafter.check_link():
            remaining = deadline - self._clock() if self._drafter.is_awaited() else 0.0
            received = self._drafter.poll(max(remaining, 0.0))
            if received is not None:
                deadline = started + longest_s
                step.draft_work_us += received.work_us
                self._take(received.messages, received.nbytes, self._clock() - started)
            elif not self._drafter.is_awaited():
                break
            if self._clock() >= deadline:  # also for a drafter that sends one frame after another
                break
        has_waited = not self._drafter.is_lagging
        late = self._drafter.give_up_waiting()
        self.statistics.late_rounds += len(late)
        if has_waited:  # else it is not known how long the answers would have taken
            for request in late:
                waited_s = self._clock() - started
                self._lengths.observe_answer(request.estimate, DraftOrigin.NONE, 0, 0.0, waited_s)
        self._drafter.check_silence()
        self._drafter.flush()
        waited_s = self._clock() - started
        step.wait_s += waited_s
        if self._tracer is not None:
            self._tracer.waited(waited_s)
        return [self._proposed(request_id).ids for request_id in request_ids]

    def insert_drafts(self, step: Step, request_ids: Sequence[str], slots: Sequence[int]) -> list[list[int] | None]:
        """Waits for proposals and replaces the step's placeholder draft tokens.

        The step was scheduled while the one before it ran. Returns the ids for each request, no more than it has slots;
        None for a request that has ended, for which there is nothing to do.
        """
        self.take_drafts(step, request_ids)
        if self._tracer is not None:
            self._tracer.step_starts()
        self._drafter.check_link(at_boundary=True)
        self._drafter.flush()
        ended = {request_id for request_id in request_ids if (r := self.requests.get(request_id)) and r.ended}
        drafts = {
            request_id: self._proposed(request_id, most)
            for request_id, most in zip(request_ids, slots, strict=True)
            if request_id not in ended
        }
        step.drafts = {request_id: draft for request_id, draft in drafts.items() if draft.ids}
        further = {request_id: draft.paths for request_id, draft in step.drafts.items() if draft.paths}
        if further:
            step.paths = self._paths.choose(further, self._lengths.token_price())
        return [None if request_id in ended else list(drafts[request_id].ids) for request_id in request_ids]

    def _proposed(self, request_id: str, most: int | None = None) -> Draft:
        request = self.requests.get(request_id)
        return Draft() if request is None else request.draft(request.max_drafts if most is None else most)

    def _attach_q(self, request: Request, draft: Draft) -> None:
        """Completes a draft that has been through vLLM's scheduler, which passes on ids only and may cut their end."""
        if not request.sampling.mode.samples_q:
            return
        if request.proposal is None or len(draft.ids) > len(request.proposal.token_ids):
            draft.ids[:] = [PLACEHOLDER_TOKEN_ID] * len(draft.ids)
        else:
            draft.q = request.proposal.q

    def _send_training_samples(self) -> None:
        """Sends them while the drafter is busy with its answers. An error here must not end the engine."""
        if self._recorder is None:
            return
        try:
            for sample in self._recorder.take_samples():
                self._drafter.teach(sample)
            self._drafter.flush()
        except Exception:
            logger.exception("training samples failed: no more are sent until this replica is restarted")
            self._recorder = None

    # State that others ask for.

    def is_structured(self, request_id: str) -> bool:
        """Returns whether a request has structured output."""
        return self.requests[request_id].params.structured_outputs is not None

    def has_no_next_token(self, request_id: str) -> None:
        """Ends a request here that the scheduler ends because no token can be chosen for it."""
        self.requests[request_id].ended = True

    def proposal_was_bad(self, request_id: str) -> None:
        """Counts a proposal that verification could not use: its request has decoded plainly this round."""
        self._drafter.unusable += 1
        self._drafter.degrade(self.requests[request_id], "unusable")
        if not self._warned_of_bad_proposals:
            self._warned_of_bad_proposals = True
            message = "request %s: a proposal was not usable; further ones are only counted"
            logger.warning(message, request_id, extra=about(request_id))

    def work(self) -> Work:
        """Returns what the target does now. Any thread may call this."""
        rate, plain_rate = self._lengths.rates()
        rows = sum(each.running and not each.ended and each.max_drafts > 0 for each in tuple(self.requests.values()))
        return Work(rows, rate, plain_rate)

    def reset_statistics(self) -> None:
        """Forgets the rounds of the warm-up."""
        self.statistics = RoundStatistics()
        self._deadline.reset()
        self._timed = None

    def status(self) -> dict[str, Any]:
        """Returns the status in plain values.

        It is asked for every couple of seconds, between two steps. A target that idles makes no steps, and takes over a
        new link here.
        """
        if not self.requests:
            self._drafter.check_link(at_boundary=True)
            self._drafter.flush()
        lengths = self._lengths.snapshot()
        return {
            **self.statistics.snapshot(),
            "dropped_proposals": self._drafter.stale + self._drafter.unusable,
            "refused_proposals": sum(self._drafter.refused.values()),
            **({"lengths": {**lengths, "chosen_lengths": self._chosen_lengths()}} if lengths else {}),
        }

    def metrics(self) -> dict[str, Any]:
        """Returns what is exported, in plain values: counts, histograms in seconds, the length controller's state.

        It is cheap, because the next step waits for it.
        """
        drafter = self._drafter
        return {
            **self.statistics.counts(),
            "histograms": self.statistics.histograms(),
            "picture_requests": self._picture_requests,
            "stale": drafter.stale,
            "unusable": drafter.unusable,
            "refused": {status.name.lower(): count for status, count in drafter.refused.items()},
            "chain": dict(self._chains),
            "wanted": self._chosen_lengths(),
            "degraded": dict(drafter.degraded),
            "length_controller_failures": self._lengths.failures,
            "lengths": self._lengths.snapshot(),
        }

    def _chosen_lengths(self) -> dict[str, int]:
        return {str(k): count for k, count in sorted(self._wanted.items())}

    # Requests that come and go.

    def _enter(self, arrival: Arrival) -> None:
        self._leave(arrival.request_id, CloseReason.ABORTED)
        prompt, has_pictures = arrival.prompt_token_ids, arrival.num_pictures > 0
        token_ids = [0] * arrival.num_prompt_tokens if prompt is None else list(prompt)
        request = Request.of(
            arrival.request_id,
            arrival.params,
            token_ids,
            self.deployment,
            arrival.adapter,
            shows_pictures=has_pictures,
        )
        self._picture_requests += has_pictures
        if prompt is None or (has_pictures and not self._is_text(token_ids)):
            request.max_drafts = 0
        if self._tracer is not None and (headers := carried(arrival.params).get("trace_headers")) is not None:
            request.trace = self._tracer.track(headers)
        if request.max_drafts:
            if self.deployment.num_paths > 1 and request.why_chain is not None:
                self._chains[request.why_chain] += 1
            group = acceptance_group(arrival.adapter, has_pictures)
            request.estimate = self._lengths.track(request.max_drafts, group)
        if self._recorder is not None:
            self._recorder.enter(request, arrival.adapter, shows_pictures=has_pictures)
        self.requests[arrival.request_id] = request
        self._follow(request)

    def _is_text(self, token_ids: Sequence[int]) -> bool:
        """Returns whether a drafter can read the ids: some models mark pictures with ids outside of any vocabulary."""
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

    # Answers, and time.

    def _read_answers(self, step: Step) -> None:
        """Reads the frames that came while the target verified."""
        deadline = self._clock() + self._deadline.longest_s  # a drafter may send one after another
        while (received := self._drafter.poll(0.0)) is not None:
            step.draft_work_us += received.work_us
            self._take(received.messages, received.nbytes, 0.0)
            if self._clock() >= deadline:
                break

    def _take(self, messages: Sequence[Message], nbytes: int, waited_s: float) -> None:
        proposals = [message for message in messages if isinstance(message, Proposals | PrefetchedProposal)]
        self.statistics.count_frame(sum(bool(message.token_ids) for message in proposals), nbytes)
        for request, answer in self._drafter.hear(proposals):
            if answer.status is ProposalStatus.OK:
                self._count_answer(request, answer.origin, len(answer.token_ids), answer.step_us, waited_s)
            else:
                self._observe_answer(request, answer.origin, 0, answer.step_us, waited_s)

    def _count_answer(self, request: Request, origin: DraftOrigin, count: int, step_us: int, waited_s: float) -> None:
        self.statistics.count_answer(origin, step_us)
        self._observe_answer(request, origin, count, step_us, waited_s)

    def _observe_answer(self, request: Request, origin: DraftOrigin, count: int, step_us: int, waited_s: float) -> None:
        if request.trace is not None:
            request.trace.origin = origin
        self._lengths.observe_answer(request.estimate, origin, count, step_us / 1e6, waited_s)

    def _keep_time(self, step: Step) -> None:
        step.started_s = self._clock()
        if self._tracer is not None:
            self._tracer.step_starts()
        done, self._timed = self._timed, step
        if done is not None and done.decodes_only:
            period_s = step.started_s - done.started_s
            self.statistics.add_times(period_s, done.target_s, done.draft_work_us / 1e6, done.wait_s)
            self._deadline.observe_step(period_s - done.wait_s)
            self._lengths.observe_step(done.num_tokens, period_s - done.wait_s)
