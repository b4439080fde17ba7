"""The drafter's loop: messages in from every linked verifier, one batched draft, proposals out.

One thread owns the strategy. Commits come before prefill, so a long prompt delays a proposal by one chunk at most.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from actors.drafting.strategy import Draft, DraftStrategy, SequenceKey, UnknownSequence
from actors.messages import Close, Commit, DraftSampling, Message, Open, Proposals, ProposalStatus

logger = logging.getLogger(__name__)

_ROUNDS_BETWEEN_PREFILLS = 4
"""Under commits without a pause, prefill still gets one chunk per this many rounds."""


class ProposalSink(Protocol):
    """Where one link's proposals go."""

    def send(self, proposals: Sequence[Proposals], work_us: int) -> None: ...


@dataclass(slots=True)
class _LinkEvent:
    """messages None: the link is gone and its sequences with it. sink set: a new link."""

    link_id: int
    messages: Sequence[Message] | None = None
    sink: ProposalSink | None = None


@dataclass(slots=True)
class _Opening:
    """A prompt that arrives in pieces. sampling: the first piece's, the only one with the biases."""

    token_ids: list[int] = field(default_factory=list)
    sampling: DraftSampling = field(default_factory=DraftSampling)


class DraftLoop:
    """attach, detach and deliver may be called from any thread; run owns everything else."""

    def __init__(self, strategy: DraftStrategy, clock: Callable[[], float] = time.perf_counter) -> None:
        self._strategy = strategy
        self._clock = clock
        self._events: queue.SimpleQueue[_LinkEvent | None] = queue.SimpleQueue()
        self._sinks: dict[int, ProposalSink] = {}
        self._keys: dict[int, set[SequenceKey]] = {}
        self._opening: dict[SequenceKey, _Opening] = {}
        self._due: dict[SequenceKey, None] = {}
        self._awaiting_prefill: set[SequenceKey] = set()
        self._rounds_since_prefill = 0
        self.rounds = 0
        self.drafted = 0

    def attach(self, link_id: int, sink: ProposalSink) -> None:
        self._events.put(_LinkEvent(link_id, sink=sink))

    def detach(self, link_id: int) -> None:
        self._events.put(_LinkEvent(link_id))

    def deliver(self, link_id: int, messages: Sequence[Message]) -> None:
        self._events.put(_LinkEvent(link_id, messages))

    def stop(self) -> None:
        self._events.put(None)

    def usage(self) -> dict[str, float]:
        return {**self._strategy.usage(), "rounds": self.rounds, "drafted": self.drafted, "links": len(self._sinks)}

    def run(self) -> None:
        """Until stop(). An exception of the strategy ends the loop: its state can no longer be trusted."""
        idle = True
        while True:
            events = self._take_events(block=idle)
            if None in events:
                return
            for event in events:
                self._apply(event)
            idle = False
            if self._due:
                self._answer(list(self._due))
                if self._rounds_since_prefill < _ROUNDS_BETWEEN_PREFILLS:
                    continue
            # What did not fit in the last batch is still due.
            idle = not self._prefill_one_chunk() and not self._due

    def _take_events(self, block: bool) -> list[_LinkEvent | None]:
        events: list[_LinkEvent | None] = []
        if block:
            events.append(self._events.get())
        while True:
            try:
                events.append(self._events.get_nowait())
            except queue.Empty:
                return events

    def _apply(self, event: _LinkEvent | None) -> None:
        assert event is not None
        if event.sink is not None:
            self._sinks[event.link_id], self._keys[event.link_id] = event.sink, set()
        elif event.messages is None:
            self._sinks.pop(event.link_id, None)
            for key in self._keys.pop(event.link_id, ()):
                self._forget(key)
        elif event.link_id in self._sinks:  # else: it broke while this was queued
            for message in event.messages:
                self._apply_message((event.link_id, message.request), message)

    def _apply_message(self, key: SequenceKey, message: Message) -> None:
        if isinstance(message, Open):
            self._open(key, message)
        elif isinstance(message, Commit):
            try:
                self._strategy.commit(key, message.base_committed_len, list(message.token_ids))
                self._due[key] = None
            except UnknownSequence:
                answer = Draft(key, message.base_committed_len, [], ProposalStatus.UNKNOWN_REQUEST)
                self._send([answer], work_us=0)
        elif isinstance(message, Close):
            self._keys[key[0]].discard(key)
            self._forget(key)

    def _open(self, key: SequenceKey, message: Open) -> None:
        opening = self._opening.setdefault(key, _Opening())
        tokens = opening.token_ids
        self._keys[key[0]].add(key)
        if message.offset != len(tokens):
            logger.warning("sequence %s: prompt part at %d, expected %d: ignored", key, message.offset, len(tokens))
            return
        if message.offset == 0:
            opening.sampling = message.sampling
        tokens.extend(message.token_ids)
        if len(tokens) == message.prompt_len:
            del self._opening[key]
            if self._strategy.open(key, tokens, message.num_speculative_tokens, opening.sampling):
                self._send([Draft(key, len(tokens), [], ProposalStatus.READY)], work_us=0)

    def _forget(self, key: SequenceKey) -> None:
        self._strategy.close(key)
        self._opening.pop(key, None)
        self._due.pop(key, None)
        self._awaiting_prefill.discard(key)

    def _answer(self, keys: list[SequenceKey]) -> None:
        started = self._clock()
        drafts = self._strategy.draft(keys)
        work_us = int((self._clock() - started) * 1e6)
        for draft in drafts:
            self._due.pop(draft.key, None)
            if draft.status is ProposalStatus.NOT_READY:
                self._awaiting_prefill.add(draft.key)
        self._rounds_since_prefill += 1
        self.rounds += 1
        self.drafted += sum(len(draft.token_ids) for draft in drafts)
        self._send(drafts, work_us)

    def _send(self, drafts: Sequence[Draft], work_us: int) -> None:
        by_link: dict[int, list[Proposals]] = {}
        for draft in drafts:
            link_id, request = draft.key
            proposal = Proposals(request, draft.base_committed_len, draft.token_ids, draft.status, draft.q)
            by_link.setdefault(link_id, []).append(proposal)
        for link_id, proposals in by_link.items():
            if link_id in self._sinks:
                self._sinks[link_id].send(proposals, work_us)

    def _prefill_one_chunk(self) -> bool:
        """Returns whether there was anything to prefill."""
        self._rounds_since_prefill = 0
        ready = self._strategy.prefill()
        if ready is None:
            return False
        for draft in ready:
            if draft.key in self._awaiting_prefill:
                self._awaiting_prefill.discard(draft.key)
                self._due[draft.key] = None
        self._send(ready, work_us=0)
        return True
