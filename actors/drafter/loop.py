"""The draft loop: messages in from every linked verifier, batched steps of model work, proposals out.

`deliver` runs on the link's receive thread, `run` on the loop's own; a lock guards every sequence, and nobody holds it
while the model works. In the order in which it happens:

1. deliver: `Open` brings a prompt, in pieces; when it is whole, the proposer opens the sequence.
2. deliver: a `Commit` extends its text. What has been drafted ahead for this outcome is the answer, sent at once,
   whatever step runs meanwhile: a hit is answered in the time of a look-up, unless the proposer finds that the step
   that runs is worth a wait. Else the sequence is due.
3. run: the proposer plans its most urgent work: a step over those that are due and, as far as there is room, ahead for
   the others; a piece of a prompt; a pause, where a target is about to ask; or nothing, until something arrives.
4. run: the work is executed, without the lock.
5. run: its results are taken, among them the answers nobody had foreseen, which are sent.
6. deliver: a `Close`, or the end of its link, and the sequence is forgotten.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import abc
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

from outrider.actors.drafter.hang_watch import STEP
from outrider.actors.drafter.proposer import Proposer
from outrider.actors.drafter.sequence import Answer, Foreseen, Sequence, SequenceKey
from outrider.actors.learning.texts import Text
from outrider.actors.learning.training_samples import SampleCollector
from outrider.cluster.link import Link, LinkBroken
from outrider.cluster.link.codec import pack
from outrider.cluster.link.messages import (
    Close,
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


class ProposalSink(Protocol):
    """Where one link's proposals go."""

    def send(self, proposals: abc.Sequence[Proposals | PrefetchedProposal], work_us: int) -> None: ...


class LinkSink:
    """Over the link itself. A broken one swallows them: its sequences are on their way out."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def send(self, proposals: abc.Sequence[Proposals | PrefetchedProposal], work_us: int) -> None:
        with suppress(LinkBroken):
            self._link.post(pack(list(proposals), self._link.capacity_words), work_us=work_us)


class DraftLoop:
    """attach, detach and deliver may be called from any thread; run belongs to one."""

    def __init__(
        self,
        proposer: Proposer[Any],
        clock: abc.Callable[[], float] = time.perf_counter,
        lessons: SampleCollector | None = None,
    ) -> None:
        """lessons: where what targets teach goes; None: nowhere."""
        self._lessons = lessons
        self.sequences: dict[SequenceKey, Sequence] = {}
        self._proposer = proposer
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._arrived = False
        self._stopped = False
        self._sinks: dict[int, ProposalSink] = {}
        self._numbers = itertools.count()
        self._at_work: dict[int | str, int] = {}
        self.steps = 0
        self.rounds = 0
        self.drafted = 0

    def deliver(self, link_id: int, messages: abc.Sequence[Message]) -> None:
        """Apply a link's messages and send what can be answered at once."""
        self._at_work[link_id] = next(self._numbers)
        arrived = self._clock()
        answers: list[Answer] = []
        with self._lock:
            if link_id in self._sinks:  # else it broke meanwhile
                for message in messages:
                    answers += self._apply((link_id, message.request), message, arrived)
                answers += self._proposer.delivered()
                self._wake()
            outgoing = self._outgoing(answers)
        _send(outgoing)
        self._at_work.pop(link_id, None)

    def limit_vocabulary(self, size: int) -> None:
        """Before a link to a target with so many tokens delivers anything. Raises ValueError."""
        with self._lock:
            self._proposer.limit_vocabulary(size)

    def start(self, warm_up: abc.Callable[[], None], on_failure: abc.Callable[[], None]) -> None:
        """Runs on a thread of its own until stop(), after `warm_up` there, and returns when that is done.

        Steps run on the thread that has warmed up because cuBLAS keeps handles and workspaces for each thread.

        Args:
            warm_up: has the proposer to itself.
            on_failure: called when the loop has failed. Everything that the process drafts is suspect then.

        Raises:
            Whatever `warm_up` raises; the loop does not run then.
        """
        warmed: Future[None] = Future()

        def warm_up_and_run() -> None:
            try:
                warm_up()
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                warmed.set_exception(error)
                return
            warmed.set_result(None)
            try:
                self.run()
            except BaseException:
                logger.exception("the draft loop failed; this drafter ends and will be restarted")
                on_failure()

        threading.Thread(target=warm_up_and_run, name="draft-loop", daemon=True).start()
        warmed.result()

    def run(self) -> None:
        """Until stop(). An exception of the proposer ends the loop: its state can no longer be trusted."""
        while not self._stopped:
            self._at_work[STEP] = next(self._numbers)
            with self._lock:
                self._arrived = False
                work, answers = self._proposer.plan()
                outgoing = self._outgoing(answers)
            _send(outgoing)
            if work is None:
                self._wait_for_news()
                continue
            work.execute()
            with self._lock:
                self.steps += work.is_step
                answers = self._proposer.complete(work)
                outgoing = self._outgoing(answers, self._proposer.foreseen())
            _send(outgoing)
        self._at_work.pop(STEP, None)

    def _apply(self, key: SequenceKey, message: Message, arrived: float) -> list[Answer]:
        if isinstance(message, Commit):
            return self._commit(key, message, arrived)
        if isinstance(message, Open):
            return self._open(key, message)
        if isinstance(message, Name):
            self._sequence(key).name = message.request_id
        elif isinstance(message, Close):
            self._close(key)
        elif isinstance(message, TrainingSample):
            self._learn(key, message)
        return []

    def _learn(self, key: SequenceKey, lesson: TrainingSample) -> None:
        sequence = self.sequences.get(key)
        if self._lessons is not None and sequence is not None and sequence.is_open:
            self._lessons.add(key, sequence.text, lesson, sequence.is_greedy)

    def _open(self, key: SequenceKey, piece: Open) -> list[Answer]:
        sequence = self._sequence(key)
        if piece.offset != sequence.next_offset:
            problem = "sequence %s: prompt part at %d, expected %d: ignored"
            logger.warning(problem, key, piece.offset, sequence.next_offset, extra=sequence.about())
            return []
        if sequence.is_open:
            name = sequence.name
            self._close(key)
            sequence = self._sequence(key)
            sequence.name = name
        return self._proposer.open(sequence) if sequence.add_prompt(piece) else []

    def _commit(self, key: SequenceKey, commit: Commit, arrived: float) -> list[Answer]:
        sequence = self.sequences.get(key)
        if sequence is None or not sequence.is_open or sequence.committed_len != commit.base_committed_len:
            # The verifier must open it again.
            stranger = Sequence(key)
            return [stranger.no_drafts(ProposalStatus.UNKNOWN_REQUEST, commit.base_committed_len)]
        answers = self._proposer.commit(sequence, commit)
        is_asked = commit.num_wanted > 0 and not commit.has_drafts
        sequence.asked_len, sequence.asked_at = (commit.committed_len if is_asked else None), arrived
        if commit.has_drafts:
            self.rounds += 1
            self.drafted += commit.num_wanted
        return answers

    def _sequence(self, key: SequenceKey) -> Sequence:
        if key not in self.sequences:
            self.sequences[key] = self._proposer.new_sequence(key)
        return self.sequences[key]

    def _close(self, key: SequenceKey) -> None:
        sequence = self.sequences.pop(key, None)
        if sequence is not None and sequence.is_open:
            if self._lessons is not None:
                self._lessons.close(key, sequence.text, sequence.is_greedy)
            self._proposer.close(sequence)

    def _outgoing(
        self, answers: abc.Sequence[Answer], foreseen: abc.Sequence[Foreseen] = ()
    ) -> list[tuple[ProposalSink, list[Proposals | PrefetchedProposal], int]]:
        """What to send on each link, to be sent without the lock. The work that counts is what a target waited for."""
        now = self._clock()
        step_us = self._proposer.step_us() if answers or foreseen else 0
        by_link: dict[int, list[Proposals | PrefetchedProposal]] = {}
        waited: dict[int, float] = {}
        for sequence, proposals in answers:
            link_id, _ = sequence.key
            proposals.step_us = step_us
            by_link.setdefault(link_id, []).append(proposals)
            if proposals.status is ProposalStatus.OK:
                self.rounds += 1
                self.drafted += len(proposals.token_ids)
            over = proposals.status not in (ProposalStatus.NOT_READY, ProposalStatus.READY)
            if over and proposals.base_committed_len == sequence.asked_len:  # else it answers one that is overtaken
                sequence.asked_len = None
                waited[link_id] = max(waited.get(link_id, 0.0), now - sequence.asked_at)
        for sequence, ahead in foreseen:
            ahead.step_us = step_us
            by_link.setdefault(sequence.key[0], []).append(ahead)
        return [
            (sink, proposals, int(waited.get(link_id, 0.0) * 1e6))
            for link_id, proposals in by_link.items()
            if (sink := self._sinks.get(link_id)) is not None
        ]

    def _wait_for_news(self) -> None:
        self._at_work.pop(STEP, None)
        with self._lock:
            while not (self._arrived or self._stopped):
                self._changed.wait()

    def _wake(self) -> None:
        self._arrived = True
        self._changed.notify()

    # Links come and go, and who watches.

    def attach(self, link_id: int, sink: ProposalSink) -> None:
        with self._lock:
            self._sinks[link_id] = sink

    def detach(self, link_id: int) -> None:
        """The link is gone and its sequences with it."""
        with self._lock:
            self._sinks.pop(link_id, None)
            for key in [key for key in self.sequences if key[0] == link_id]:
                self._close(key)
            self._proposer.unlink(link_id)
            self._wake()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._wake()

    def taught(self) -> list[Text]:
        """What targets have taught since the last time. Any thread."""
        with self._lock:
            return [] if self._lessons is None else self._lessons.take()

    @property
    def dropped_lessons(self) -> int:
        return 0 if self._lessons is None else self._lessons.dropped

    def change(self, proposer_change: abc.Callable[[], None]) -> None:
        """Something of the proposer's own, which may give it work. Any thread."""
        with self._lock:
            proposer_change()
            self._wake()

    def wake(self) -> None:
        """The proposer has work that did not come over a link."""
        with self._lock:
            self._wake()

    def at_work(self) -> dict[int | str, int]:
        """What is under way, numbered anew each time: the loop's own work as STEP, and messages by their link. Takes no
        lock, for who holds it may be what stands still."""
        return dict(self._at_work)

    def usage(self) -> dict[str, float]:
        with self._lock:
            counts = {"rounds": self.rounds, "drafted": self.drafted, "steps": self.steps, "links": len(self._sinks)}
            return {**self._proposer.usage(), **counts}

    def metrics(self) -> dict[str, Any]:
        """What it holds and what it has counted since its start."""
        with self._lock:
            counted = self._proposer.counters()
        return {**self.usage(), **counted}


def _send(outgoing: list[tuple[ProposalSink, list[Proposals | PrefetchedProposal], int]]) -> None:
    for sink, proposals, work_us in outgoing:
        sink.send(proposals, work_us)
