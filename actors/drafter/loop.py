"""The drafter's loop: messages in from every linked verifier, batched steps of model work, proposals out.

A link's receive thread applies what arrives at once, and answers from what has been drafted ahead without waiting for
the step that runs: a hit is answered in the time of a look-up. The loop's own thread plans a step, runs it, and takes
its results, among them the answers nobody had foreseen.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.actors.drafter.hang_watch import STEP
from outrider.actors.drafter.strategy import Draft, DraftStrategy, SequenceKey, UnknownSequence
from outrider.actors.observability.sequence_names import NAMES
from outrider.cluster.link.messages import Close, Commit, DraftSampling, Message, Name, Open, Proposals, ProposalStatus

logger = logging.getLogger(__name__)


class ProposalSink(Protocol):
    """Where one link's proposals go."""

    def send(self, proposals: Sequence[Proposals], work_us: int) -> None: ...


@dataclass(slots=True)
class _Opening:
    """A prompt that arrives in pieces. sampling: the first piece's, the only one with the biases."""

    token_ids: list[int] = field(default_factory=list)
    sampling: DraftSampling = field(default_factory=DraftSampling)


class DraftLoop:
    """attach, detach and deliver may be called from any thread; run belongs to one."""

    def __init__(self, strategy: DraftStrategy, clock: Callable[[], float] = time.perf_counter) -> None:
        self._strategy = strategy
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._arrived = False
        self._stopped = False
        self._sinks: dict[int, ProposalSink] = {}
        self._keys: dict[int, set[SequenceKey]] = {}
        self._opening: dict[SequenceKey, _Opening] = {}
        self._asked: dict[SequenceKey, tuple[int, float]] = {}
        """Of the commit that is not yet answered: the length it led to, and when it came."""

        self._numbers = itertools.count()
        self._at_work: dict[int | str, int] = {}
        self.steps = 0
        self.rounds = 0
        self.drafted = 0

    def attach(self, link_id: int, sink: ProposalSink) -> None:
        with self._lock:
            self._sinks[link_id], self._keys[link_id] = sink, set()

    def detach(self, link_id: int) -> None:
        """The link is gone and its sequences with it."""
        with self._lock:
            self._sinks.pop(link_id, None)
            for key in self._keys.pop(link_id, ()):
                self._forget(key)
            self._wake()

    def deliver(self, link_id: int, messages: Sequence[Message]) -> None:
        """Apply a link's messages and send what can be answered at once."""
        answers: list[Draft] = []
        arrived = self._clock()
        self._at_work[link_id] = next(self._numbers)
        with self._lock:
            if link_id in self._sinks:  # else it broke meanwhile
                for message in messages:
                    answers += self._apply((link_id, message.request), message, arrived)
                self._wake()
            outgoing = self._outgoing(answers)
        _send(outgoing)
        self._at_work.pop(link_id, None)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._wake()

    def wake(self) -> None:
        """The strategy has work that did not come over a link."""
        with self._lock:
            self._wake()

    def at_work(self) -> dict[int | str, int]:
        """What is under way, numbered anew each time: the loop's own work as STEP, and messages by their link. Takes no
        lock, for who holds it may be what stands still."""
        return dict(self._at_work)

    def usage(self) -> dict[str, float]:
        with self._lock:
            counts = {"rounds": self.rounds, "drafted": self.drafted, "steps": self.steps, "links": len(self._sinks)}
            return {**self._strategy.usage(), **counts}

    def metrics(self) -> dict[str, Any]:
        """What it holds and what it has counted since its start."""
        with self._lock:
            counted = self._strategy.counters()
        return {**self.usage(), **counted}

    def run(self) -> None:
        """Until stop(). An exception of the strategy ends the loop: its state can no longer be trusted."""
        while True:
            self._at_work[STEP] = next(self._numbers)
            with self._lock:
                if self._stopped:
                    self._at_work.pop(STEP)
                    return
                self._arrived = False
                work, answers = self._strategy.plan()
                outgoing = self._outgoing(answers)
            _send(outgoing)
            if work is None:
                self._at_work.pop(STEP)
                with self._lock:
                    while not self._arrived:
                        self._changed.wait()
                continue
            work.execute()
            with self._lock:
                self.steps += work.is_step
                outgoing = self._outgoing(self._strategy.complete(work))
            _send(outgoing)

    def _wake(self) -> None:
        self._arrived = True
        self._changed.notify()

    def _apply(self, key: SequenceKey, message: Message, arrived: float) -> list[Draft]:
        if isinstance(message, Commit):
            try:
                answers = self._strategy.commit(key, message)
            except UnknownSequence:
                answers = [Draft(key, message.base_committed_len, [], ProposalStatus.UNKNOWN_REQUEST)]
            self._asked.pop(key, None)
            if message.num_wanted:
                self._asked[key] = message.committed_len, arrived
            return answers
        if isinstance(message, Open):
            return self._open(key, message)
        if isinstance(message, Name):
            self._keys[key[0]].add(key)
            NAMES.learn(key, message.request_id)
        if isinstance(message, Close):
            self._keys[key[0]].discard(key)
            self._forget(key)
        return []

    def _open(self, key: SequenceKey, message: Open) -> list[Draft]:
        opening = self._opening.setdefault(key, _Opening())
        tokens = opening.token_ids
        self._keys[key[0]].add(key)
        if message.offset != len(tokens):
            problem = "sequence %s: prompt part at %d, expected %d: ignored"
            logger.warning(problem, key, message.offset, len(tokens), extra=NAMES.about(key))
            return []
        if message.offset == 0:
            opening.sampling = message.sampling
        tokens.extend(message.token_ids)
        if len(tokens) < message.prompt_len:
            return []
        del self._opening[key]
        ready = self._strategy.open(key, tokens, message.num_speculative_tokens, opening.sampling)
        return [] if ready is None else [ready]

    def _forget(self, key: SequenceKey) -> None:
        self._strategy.close(key)
        self._opening.pop(key, None)
        NAMES.forget(key)
        self._asked.pop(key, None)

    def _outgoing(self, drafts: Sequence[Draft]) -> list[tuple[ProposalSink, list[Proposals], int]]:
        """What to send on each link, to be sent without the lock. The work that counts is what a target waited for."""
        now = self._clock()
        by_link: dict[int, list[Proposals]] = {}
        waited: dict[int, float] = {}
        step_us = self._strategy.step_us() if drafts else 0
        for draft in drafts:
            link_id, request = draft.key
            if draft.status is ProposalStatus.OK:
                self.rounds += 1
                self.drafted += len(draft.token_ids)
            length, since = self._asked.get(draft.key, (-1, now))
            over = draft.status not in (ProposalStatus.NOT_READY, ProposalStatus.READY)
            if over and length == draft.base_committed_len:  # else it answers a commit that is overtaken
                del self._asked[draft.key]
                waited[link_id] = max(waited.get(link_id, 0.0), now - since)
            by_link.setdefault(link_id, []).append(
                Proposals(
                    request,
                    draft.base_committed_len,
                    draft.token_ids,
                    draft.status,
                    draft.q,
                    draft.origin,
                    step_us,
                )
            )
        return [
            (sink, proposals, int(waited.get(link_id, 0.0) * 1e6))
            for link_id, proposals in by_link.items()
            if (sink := self._sinks.get(link_id)) is not None
        ]


def _send(outgoing: list[tuple[ProposalSink, list[Proposals], int]]) -> None:
    for sink, proposals, work_us in outgoing:
        sink.send(proposals, work_us)
