"""One benchmark from start to figures: the other side tuned and loaded, our server started, both in turns."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from cluster.config import ConfigError, OutriderConfig, parse_config
from cluster.cores import available_cores
from deploy.app import engine_on_gpu
from deploy.bench.alternate import Alternation, chunks_of, warm_up_asks
from deploy.bench.answers import Chunk
from deploy.bench.arguments import SIDES, Load, with_cores
from deploy.bench.dataset import Dataset
from deploy.bench.error import BenchError
from deploy.bench.machine import check_memory, machine, versions
from deploy.bench.opponent import (
    AnotherServer,
    InProcess,
    Opponent,
    Stage,
    server_cores,
    server_settings,
    server_units,
    start_server,
)
from deploy.bench.report import Report, make_report
from deploy.bench.rounds import rounds_of
from deploy.bench.server import ServerProcess
from deploy.bench.sides import OurSide, Side
from deploy.client.sync_client import OutriderClient, OutriderError
from deploy.commands.serve import prepare
from deploy.models.check import check_models
from deploy.processes import SharedMemoryWatch
from deploy.progress import Progress
from deploy.stop import StopSignal
from outrider.v1 import generation_pb2 as pb

NOTE_EVERY_CALLS = 10


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


def _status(address: str) -> pb.GetServerStatusResponse:
    try:
        with OutriderClient(address) as client:
            return client.status()
    except OutriderError as error:
        raise BenchError(f"--address: {error.message}") from None
