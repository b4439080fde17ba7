"""Both sides in turns over the same prompts, in one run, so that a machine that drifts hits both alike."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from deploy.bench.answers import QUIET_CORES, Ask, Chunk
from deploy.bench.sides import RESTING_CORES, OnProgress, Side, busy_cpu_seconds, settle
from deploy.progress import Progress

WARM_UP_TOKENS = 32


def chunks_of(asks: Sequence[Ask], size: int, repeats: int) -> list[list[Ask]]:
    """The turns: ``repeats`` passes over the prompts, cut evenly into as many pieces as hold at most ``size`` each.

    Evenly, because a short last piece would leave part of the concurrency unused and count as much as the others.
    """
    count = -(-len(asks) // size)
    bounds = [len(asks) * piece // count for piece in range(count + 1)]
    one_pass = [list(asks[start:end]) for start, end in itertools.pairwise(bounds)]
    return one_pass * repeats


def warm_up_asks(asks: Sequence[Ask], concurrency: int) -> list[Ask]:
    """Prompts like the real ones, of which no prefix can be cached for them."""
    return [
        replace(ask, text=f"{place} warm-up {ask.text}", max_tokens=min(ask.max_tokens, WARM_UP_TOKENS))
        for place, ask in enumerate(asks[: max(concurrency, 2)])
    ]


@dataclass(frozen=True)
class _Usage:
    """CPU seconds so far. None: of processes that are not known."""

    machine: float
    working: float | None
    resting: float | None
    """Of the sides whose turn it is not; None also where there are none."""

    @classmethod
    def now(cls, side: Side, others: Sequence[Side]) -> _Usage:
        known = [seconds for other in others if (seconds := other.cpu_seconds()) is not None]
        own = time.process_time()
        working = side.cpu_seconds()
        return cls(busy_cpu_seconds(), None if working is None else working + own, sum(known) if known else None)

    def since(self, before: _Usage, elapsed_s: float) -> tuple[float | None, float | None]:
        """(resting, foreign) cores, on average."""
        resting = foreign = None
        if self.resting is not None and before.resting is not None:
            resting = max(self.resting - before.resting, 0.0) / elapsed_s
        if self.working is not None and before.working is not None:
            ours = (self.working - before.working) / elapsed_s + (resting or 0.0)
            foreign = max((self.machine - before.machine) / elapsed_s - ours, 0.0)
        return resting, foreign


@dataclass
class Alternation:
    """The run of all sides, ours first. One side alone takes every turn."""

    sides: Sequence[Side]
    progress: Progress
    sleep: Callable[[float], None]
    """Waits, or raises when the run is to end."""

    def warm_up(self, asks: Sequence[Ask]) -> None:
        for side in self.sides:
            self.progress.say(f"warming up: {side.name}")
            side.run(asks, lambda done, tokens: None)

    def run(self, chunks: Sequence[Sequence[Ask]]) -> Iterator[Chunk]:
        """Each chunk by each side in turn, ours first. Yields what was measured as soon as it is. Raises BenchError."""
        started = time.monotonic()
        for pair, asks in enumerate(chunks):
            for side in self.sides:
                settle(self.sides, self.sleep)
                yield self._turn(side, pair, asks, f"chunk {pair + 1} of {len(chunks)}, {side.name}:")
            spent_s = time.monotonic() - started
            if left := len(chunks) - pair - 1:
                self.progress.say(f"about {spent_s / (pair + 1) * left:.0f} s left")

    def _turn(self, side: Side, pair: int, asks: Sequence[Ask], label: str) -> Chunk:
        others = [other for other in self.sides if other is not side]
        before, started = _Usage.now(side, others), time.monotonic()
        seconds, answers = side.run(asks, self._reporter(label, len(asks)))
        resting, foreign = _Usage.now(side, others).since(before, time.monotonic() - started)
        chunk = Chunk(side.name, pair, seconds, tuple(answers), resting, foreign)
        self.progress.say(f"{label} {chunk.tokens} tokens, {chunk.tok_per_s:.2f} tok/s")
        if resting is not None and resting >= RESTING_CORES:
            self.progress.say(f"WARNING: the other engine used {resting:.2f} cores meanwhile; it should have rested")
        if foreign is not None and foreign >= QUIET_CORES:
            self.progress.say(f"WARNING: other programs used {foreign:.2f} cores meanwhile; this figure is spoilt")
        return chunk

    def _reporter(self, label: str, count: int) -> OnProgress:
        return lambda done, tokens: self.progress.wait(label, f"{done} of {count} answers, {tokens} tokens")
