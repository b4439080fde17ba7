"""One benchmark from start to figures: the other side tuned and loaded, our server started, both asked in turns.

The turns alternate over the same prompts in one run, so that a machine that drifts hits both alike.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from outrider.cluster.config import ConfigError, OutriderConfig, parse_config
from outrider.cluster.placement import available_cores
from outrider.deploy.app import engine_on_gpu
from outrider.deploy.bench.arguments import SIDES, Load, with_cores
from outrider.deploy.bench.load import QUIET_CORES, Ask, Chunk, Dataset
from outrider.deploy.bench.machine import BenchError, check_memory, machine, versions
from outrider.deploy.bench.opponent import (
    AnotherServer,
    InProcess,
    Opponent,
    Stage,
    server_cores,
    server_settings,
    server_units,
    start_server,
)
from outrider.deploy.bench.report import Report, make_report, rounds_of
from outrider.deploy.bench.sides import (
    RESTING_CORES,
    OnProgress,
    OurSide,
    ServerProcess,
    Side,
    busy_cpu_seconds,
    settle,
)
from outrider.deploy.cli.serve import prepare
from outrider.deploy.client.sync_client import OutriderClient, OutriderError
from outrider.deploy.models.check import check_models
from outrider.deploy.processes import SharedMemoryWatch, StopSignal
from outrider.deploy.progress import Progress
from outrider.v1 import generation_pb2 as pb

WARM_UP_TOKENS = 32


NOTE_EVERY_CALLS = 10
POOL_POLL_S = 1.0


class BenchRun:
    """measure once, close once, from the main thread."""

    def __init__(
        self,
        args: argparse.Namespace,
        load: Load,
        dataset: Dataset,
        config: OutriderConfig | None,
        other: OutriderConfig | None,
        scratch: Path,
        progress: Progress,
        stop: StopSignal,
        memory: SharedMemoryWatch,
    ) -> None:
        """other: of the server to compare with, when it is one of ours.

        Raises ConfigError, BenchError: cores that cannot be had, too little memory, nobody at the address.
        """
        self._args, self._load, self._dataset, self._config = args, load, dataset, config
        self._progress, self._stop, self._memory = progress, stop, memory
        self._indices = dataset.spread(args.prompts)
        self._asks = load.asks(dataset, self._indices)
        self._warm_up = warm_up_asks(self._asks, load.concurrency)
        self._gpu = engine_on_gpu() if config is not None else False
        self._close: list[Callable[[], None]] = []
        self._waits = 0
        self._stage = Stage(args, load, scratch, self._gpu, progress, self._waiting, self._close)
        cores = self._our_cores()
        self._opponent: Opponent | None = None
        if other is not None:
            self._opponent = AnotherServer(self._stage, other)
        elif args.against and config is not None:
            self._opponent = InProcess(self._stage, config, cores)
        if args.against and config is not None:
            self._check_room(config, args.against != "plain")
        if args.address is not None:
            _status(args.address)

    def measure(self) -> Report:
        """Raises BenchError, ConfigError, OutriderError, Stopped."""
        started = datetime.now(UTC)
        here = machine(available_cores())
        opponent = self._opponent
        other = opponent.start(self._asks, self._warm_up) if opponent is not None else None
        client, server = self._start_ours()
        self._wait_for_the_pool(client)
        sides: list[Side] = [OurSide(client, self._load, server)]
        if other is not None:
            sides.append(other)
        alternation = Alternation(sides, self._progress, self._stop.wait)
        alternation.warm_up(self._warm_up)
        self._memory.note()
        before = client.status(), opponent.rounds() if opponent is not None else None
        chunks: list[Chunk] = []
        for chunk in alternation.run(chunks_of(self._asks, self._load.chunk, self._load.repeats)):
            chunks.append(chunk)
            self._memory.note()
        after = client.status()
        settings: dict[str, Any] = {
            "seed": self._load.seed,
            "machine": here,
            "versions": versions(),
            "dataset": {
                "path": str(self._dataset.path),
                "sha256": self._dataset.sha256,
                "prompts": len(self._indices),
                "of": len(self._dataset.prompts),
            },
            "load": asdict(self._load),
            "ours": server_settings(after, self._config, self._gpu, self._args.address),
        }
        units: dict[str, int | None] = {"ours": self._our_units()}
        rounds = {"ours": rounds_of(before[0].rounds, after.rounds) | {"link_rtt_us": after.link.rtt_us}}
        if opponent is not None:
            settings["other"] = opponent.settings()
            units["other"] = opponent.units()
            if before[1] is not None and (counted := opponent.rounds()) is not None:
                rounds["other"] = rounds_of(before[1], counted)
        unit = "accelerator" if self._gpu else "core"
        return make_report(chunks, settings, rounds, units, unit, started, datetime.now(UTC))

    def close(self) -> None:
        """Stop whatever was started, latest first."""
        if self._close:
            self._progress.say("shutting down")
        while self._close:
            self._close.pop()()

    def _start_ours(self) -> tuple[OutriderClient, ServerProcess | None]:
        if self._args.address is None:
            assert self._config is not None
            return start_server(self._stage, self._config, "our server", "ours")
        client = OutriderClient(self._args.address)
        self._close.append(client.close)
        return client, None

    def _wait_for_the_pool(self, client: OutriderClient) -> None:
        """A server of ours serves before the drafters of its pool are there; what is measured is drafted for."""
        drafter = None if self._config is None or self._args.address is not None else self._config.remote_drafter
        if drafter is None or not drafter.pooled:
            return
        while client.status().link.state != pb.LINK_STATE_UP:
            self._progress.wait("waiting for a drafter of the pool")
            self._stop.wait(POOL_POLL_S)

    def _check_room(self, config: OutriderConfig, speculate: bool) -> None:
        if not self._gpu:
            check_memory(config, speculate, psutil.virtual_memory().available)
        elif config.target.gpu_memory_utilization > 0.5:
            raise ConfigError(
                f"target.gpu_memory_utilization: {config.target.gpu_memory_utilization:g} of a GPU, and both sides "
                "stay loaded; write at most 0.45 into the configuration"
            )

    def _our_cores(self) -> tuple[int, ...]:
        """Every core our side uses. Somebody else's server: all there are, as far as is known."""
        if self._config is None or self._args.address is not None or self._gpu:
            return available_cores()
        return server_cores(self._config)

    def _our_units(self) -> int | None:
        if self._args.address is not None or self._config is None:
            return None
        return server_units(self._config, self._gpu)

    def _waiting(self, step: str = "") -> None:
        """While something loads: say so, and keep track of the shared memory of processes that may end early."""
        self._waits += 1
        if self._waits % NOTE_EVERY_CALLS == 0:
            self._memory.note()
        if step:
            self._progress.wait(step)


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


def configuration(args: argparse.Namespace, progress: Progress) -> OutriderConfig | None:
    """Of our server, or with --address of the other side's models. None: there are none to load.

    Raises ConfigError by field.
    """
    if args.address is None:
        return with_cores(_served(args, args.preset or args.config, progress), args.target_cores, args.drafter_cores)
    if args.target_cores or args.drafter_cores:
        raise ConfigError("--address: that server has its cores; leave --target-cores and --drafter-cores out")
    if args.target is None:
        if args.drafter is not None or args.dtype is not None:
            raise ConfigError(
                "--address: that server has its models; --drafter and --dtype need --against and --target"
            )
        return None
    tree: dict[str, Any] = {"target": {"model": args.target, "dtype": args.dtype or "auto"}}
    if args.drafter is not None:
        tree["drafter"] = {"method": "draft_model", "model": args.drafter, "dtype": args.dtype or "auto"}
    config = parse_config(tree, "command line")
    check_models(config)
    return config


def other_configuration(args: argparse.Namespace, progress: Progress) -> OutriderConfig | None:
    """Of the other server with --against FILE; None with anything else. Raises ConfigError by field."""
    return _served(args, args.against, progress) if args.against not in (None, *SIDES) else None


def _served(args: argparse.Namespace, source: str, progress: Progress) -> OutriderConfig:
    options = argparse.Namespace(
        config=source, target=args.target, drafter=args.drafter, dtype=args.dtype, grpc_port=0, http_port=0
    )
    return prepare(options, progress)


def _status(address: str) -> pb.GetServerStatusResponse:
    try:
        with OutriderClient(address) as client:
            return client.status()
    except OutriderError as error:
        raise BenchError(f"--address: {error.message}") from None
