"""Runs the draft loop: messages in from every linked verifier, batched steps of model work, proposals out.

`deliver` runs on the link's receive thread, `run` on the loop's own thread. A lock guards every sequence, and nobody
holds it while the model works. In the order of events:

1. deliver: `Open` brings a request's text, and the proposer opens a sequence.
2. deliver: a `Commit` extends its text. What has been drafted ahead for this outcome is the answer. It is sent at once,
   whatever step runs meanwhile, so a hit takes the time of a look-up. Else the sequence is due.
3. run: the proposer plans its most urgent work: a step over the sequences that are due and, as far as there is room,
   ahead for the others; or a piece of a prompt. Without work the loop waits for a message.
4. run: the work is executed, without the lock.
5. run: its results are taken, and the answers and prefetched proposals that they complete are sent.
6. deliver: a `Close`, or the end of its link, and the sequence is forgotten.

Whatever a proposer has to send lies in its outbox, which is drained after each of these.
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

from outrider.actors.drafter.proposer import Proposer, Sequence, SequenceKey
from outrider.actors.learning.texts import Text
from outrider.actors.learning.training_samples import SampleCollector
from outrider.cluster.link import Link, LinkBroken
from outrider.cluster.link.messages import (
    Close,
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


class ProposalSink(Protocol):
    """Sends one link's proposals."""

    def send(self, proposals: abc.Sequence[Proposals | PrefetchedProposal], work_us: int) -> None:
        """work_us: how long the target has waited for drafting, at most, microseconds."""


class LinkSink:
    """Sends proposals over the link itself. A broken link drops them: its sequences are about to be closed."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def send(self, proposals: abc.Sequence[Proposals | PrefetchedProposal], work_us: int) -> None:
        with suppress(LinkBroken):
            self._link.post(pack(proposals), work_us=work_us)


class _Batch:
    """Collects what is sent on one link after one event."""

    def __init__(self) -> None:
        self.messages: list[Proposals | PrefetchedProposal] = []
        self.waited_s = 0.0


class DraftLoop:
    """Applies messages to sequences and works for them. Any thread may call attach, detach and deliver; run belongs to
    one thread."""

    def __init__(
        self,
        proposer: Proposer[Any],
        clock: abc.Callable[[], float] = time.perf_counter,
        training_samples: SampleCollector | None = None,
    ) -> None:
        """training_samples: collects the targets' training samples; None: they are dropped."""
        self._training_samples = training_samples
        self.sequences: dict[SequenceKey, Sequence] = {}
        self._proposer = proposer
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._arrived = False
        self._stopped = False
        self._sinks: dict[int, ProposalSink] = {}
        self._numbers = itertools.count()
        self._at_work: dict[int | None, int] = {}
        """Numbers of each link's messages that are applied, and of the loop's own work under None."""

        self.steps = 0
        self.rounds = 0
        self.drafted = 0

    def deliver(self, link_id: int, messages: abc.Sequence[Message]) -> None:
        """Applies a link's messages and sends what can be answered at once."""
        self._at_work[link_id] = next(self._numbers)
        arrived = self._clock()
        with self._lock:
            if link_id in self._sinks:  # else it broke meanwhile
                for message in messages:
                    self._apply((link_id, message.request), message, arrived)
                self._wake()
            outgoing = self._outgoing()
        self._send(outgoing)
        self._at_work.pop(link_id, None)

    def limit_vocabulary(self, size: int) -> None:
        """Drafts no id from `size` on. Call it before a link to a target with so many tokens delivers anything.

        Raises:
            ValueError: the proposer cannot do without these ids.
        """
        with self._lock:
            self._proposer.limit_vocabulary(size)

    def start(self, warm_up: abc.Callable[[], None], on_failure: abc.Callable[[], None]) -> None:
        """Starts a thread that calls `warm_up`, then runs the loop until stop(). Returns when it has warmed up.

        Steps run on the thread that has warmed up because cuBLAS keeps handles and workspaces for each thread.

        Args:
            warm_up: called while nothing else uses the proposer. What it raises is raised here, and the loop does not
                run then.
            on_failure: called when the loop has failed. Nothing that the process drafts can be trusted then.
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
        """Works until stop(). An exception of the proposer ends the loop: its state can no longer be trusted."""
        while not self._stopped:
            self._at_work[None] = next(self._numbers)
            with self._lock:
                self._arrived = False
                work = self._proposer.plan()
                outgoing = self._outgoing()
            self._send(outgoing)
            if work is None:
                self._wait_for_news()
                continue
            work.execute()
            with self._lock:
                self.steps += work.is_step
                self._proposer.complete(work)
                outgoing = self._outgoing()
            self._send(outgoing)
        self._at_work.pop(None, None)

    def _apply(self, key: SequenceKey, message: Message, arrived: float) -> None:
        if isinstance(message, Commit):
            self._commit(key, message, arrived)
        elif isinstance(message, Open):
            self._open(key, message)
        elif isinstance(message, Close):
            self._close(key)
        elif isinstance(message, TrainingSample):
            self._learn(key, message)

    def _learn(self, key: SequenceKey, sample: TrainingSample) -> None:
        sequence = self.sequences.get(key)
        if self._training_samples is not None and sequence is not None:
            self._training_samples.add(key, sequence.text, sample, sequence.is_greedy)

    def _open(self, key: SequenceKey, message: Open) -> None:
        if key not in self.sequences:  # a handle is never used twice
            sequence = self.sequences[key] = self._proposer.new_sequence(key)
            sequence.take_prompt(message)
            self._proposer.open(sequence)

    def _commit(self, key: SequenceKey, commit: Commit, arrived: float) -> None:
        sequence = self.sequences.get(key)
        if sequence is None or sequence.committed_len != commit.base_committed_len:
            # The verifier must open it again.
            unknown = Sequence(key)
            answer = unknown.no_drafts(ProposalStatus.UNKNOWN_REQUEST, commit.base_committed_len)
            self._proposer.outbox.add(unknown, answer)
            return
        self._proposer.commit(sequence, commit)
        is_asked = commit.num_wanted > 0 and not commit.has_drafts
        sequence.asked_len, sequence.asked_at = (commit.committed_len if is_asked else None), arrived
        if commit.has_drafts:
            self.rounds += 1
            self.drafted += commit.num_wanted

    def _close(self, key: SequenceKey) -> None:
        sequence = self.sequences.pop(key, None)
        if sequence is not None:
            if self._training_samples is not None:
                self._training_samples.close(key, sequence.text, sequence.is_greedy)
            self._proposer.close(sequence)

    def _outgoing(self) -> dict[int, _Batch]:
        """Drains the outbox. Returns what to send on each link, without the lock."""
        now, batches = self._clock(), dict[int, _Batch]()
        for sequence, message in self._proposer.outbox.drain():
            batch = batches.setdefault(sequence.key[0], _Batch())
            message.step_us = self._proposer.step_us()
            batch.messages.append(message)
            if isinstance(message, PrefetchedProposal):
                continue
            if message.status is ProposalStatus.OK:
                self.rounds += 1
                self.drafted += len(message.token_ids)
            is_final = message.status not in (ProposalStatus.NOT_READY, ProposalStatus.READY)
            if is_final and message.base_committed_len == sequence.asked_len:  # else it answers an overtaken commit
                sequence.asked_len = None
                batch.waited_s = max(batch.waited_s, now - sequence.asked_at)
        return batches

    def _send(self, outgoing: dict[int, _Batch]) -> None:
        for link_id, batch in outgoing.items():
            if (sink := self._sinks.get(link_id)) is not None:
                sink.send(batch.messages, int(batch.waited_s * 1e6))

    def _wait_for_news(self) -> None:
        self._at_work.pop(None, None)
        with self._lock:
            while not (self._arrived or self._stopped):
                self._changed.wait()

    def _wake(self) -> None:
        self._arrived = True
        self._changed.notify()

    # Links, and what others ask of the loop.

    def attach(self, link_id: int, sink: ProposalSink) -> None:
        """Takes messages of this link from now on; its proposals go to the sink."""
        with self._lock:
            self._sinks[link_id] = sink

    def detach(self, link_id: int) -> None:
        """Closes all sequences of a link that is gone."""
        with self._lock:
            self._sinks.pop(link_id, None)
            for key in [key for key in self.sequences if key[0] == link_id]:
                self._close(key)
            self._wake()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._wake()

    def take_training_texts(self) -> list[Text]:
        """Returns the training texts since the last call. Any thread."""
        with self._lock:
            return [] if self._training_samples is None else self._training_samples.take()

    @property
    def dropped_texts(self) -> int:
        return 0 if self._training_samples is None else self._training_samples.dropped

    def change(self, proposer_change: abc.Callable[[], None]) -> None:
        """Calls a function that changes the proposer, under the lock. Any thread."""
        with self._lock:
            proposer_change()
            self._wake()

    def at_work(self) -> set[int]:
        """Returns a number for each step and each link's messages that are under way, never the same again. Takes no
        lock, since the thread that holds it may be the one that hangs."""
        return {*self._at_work.copy().values()}

    def metrics(self) -> dict[str, Any]:
        """Returns what the proposer holds and has counted, and counts of rounds, drafts, steps and links."""
        with self._lock:
            counts = {"rounds": self.rounds, "drafted": self.drafted, "steps": self.steps, "links": len(self._sinks)}
            return {**self._proposer.usage(), **counts, **self._proposer.counters()}
