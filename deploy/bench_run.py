"""One benchmark from start to figures: the other side tuned and loaded, our server started, both in turns."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from cluster.config import ConfigError, DraftModelConfig, OutriderConfig, parse_config
from cluster.cores import available_cores, plan_cores, preload_libraries
from deploy.app import engine_on_gpu
from deploy.bench_alternate import Alternation, chunks_of, warm_up_asks
from deploy.bench_answers import Chunk
from deploy.bench_arguments import Load, with_cores
from deploy.bench_dataset import Dataset
from deploy.bench_error import BenchError
from deploy.bench_machine import check_memory, machine, versions
from deploy.bench_other import Cores, InProcessEngine, engine_arguments
from deploy.bench_report import Report, make_report
from deploy.bench_rounds import lookahead, round_time, rounds_between
from deploy.bench_server import ServerProcess
from deploy.bench_sides import OtherSide, OurSide, Side
from deploy.bench_tune import Setting, Trial, best, one_core_fewer, prompts_to_try, try_out
from deploy.client import OutriderClient, OutriderError
from deploy.model_check import check_models
from deploy.processes import SharedMemoryWatch
from deploy.progress import Progress
from deploy.serve import prepare
from deploy.stop import StopSignal
from outrider.v1 import generation_pb2 as pb

NOTE_EVERY_CALLS = 10


def configuration(args: argparse.Namespace, progress: Progress) -> OutriderConfig | None:
    """Of our server, or with --address of the other side's models. None: there are none to load.

    Raises ConfigError by field.
    """
    if args.address is None:
        source = args.preset or args.config
        options = argparse.Namespace(
            config=source, target=args.target, drafter=args.drafter, dtype=args.dtype, grpc_port=0, http_port=0
        )
        return with_cores(prepare(options, progress), args.target_cores, args.drafter_cores)
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


class BenchRun:
    """measure once, close once, from the main thread."""

    def __init__(
        self,
        args: argparse.Namespace,
        load: Load,
        dataset: Dataset,
        config: OutriderConfig | None,
        scratch: Path,
        progress: Progress,
        stop: StopSignal,
        memory: SharedMemoryWatch,
    ) -> None:
        """Raises ConfigError, BenchError: cores that cannot be had, too little memory, nobody at the address."""
        self._args, self._load, self._dataset, self._config = args, load, dataset, config
        self._scratch, self._progress, self._stop, self._memory = scratch, progress, stop, memory
        self._indices = dataset.spread(args.prompts)
        self._asks = load.asks(dataset, self._indices)
        self._warm_up = warm_up_asks(self._asks, load.concurrency)
        self._gpu = engine_on_gpu() if config is not None else False
        self._our_cores = self._plan_our_cores()
        self._other_cores = self._plan_other_cores() if args.against else None
        self._other_setting: Setting | None = None
        self._close: list[Callable[[], None]] = []
        self._waits = 0
        if args.against and config is not None and not self._gpu:
            check_memory(config, args.against == "vllm", psutil.virtual_memory().available)
        if self._gpu and args.against and config is not None and config.target.gpu_memory_utilization > 0.5:
            raise ConfigError(
                f"target.gpu_memory_utilization: {config.target.gpu_memory_utilization:g} of a GPU, and both sides "
                "stay loaded; write at most 0.45 into the configuration"
            )
        if args.address is not None:
            _status(args.address)

    def measure(self) -> Report:
        """Raises BenchError, ConfigError, OutriderError, Stopped."""
        started = datetime.now(UTC)
        here = machine(available_cores())
        trials, other = self._start_other()
        client, server = self._start_ours()
        sides: list[Side] = [OurSide(client, self._load, server)]
        if other is not None:
            sides.append(OtherSide(other[0], self._load))
        alternation = Alternation(sides, self._progress, self._stop.wait)
        alternation.warm_up(self._warm_up)
        self._memory.note()
        before = client.status()
        chunks: list[Chunk] = []
        for chunk in alternation.run(chunks_of(self._asks, self._load.chunk, self._load.repeats)):
            chunks.append(chunk)
            self._memory.note()
        after = client.status()
        counted = rounds_between(before.rounds, after.rounds)
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
            "ours": self._our_settings(after),
        }
        units: dict[str, int | None] = {"ours": self._our_units()}
        if other is not None:
            settings["other"] = self._other_settings(*other, trials)
            units["other"] = self._other_units()
        rounds = {
            "rounds": counted,
            "lookahead": lookahead(counted),
            "round_time": round_time(after.rounds),
            "link_rtt_us": after.link.rtt_us,
        }
        unit = "accelerator" if self._gpu else "core"
        return make_report(chunks, settings, rounds, units, unit, started, datetime.now(UTC))

    def close(self) -> None:
        """Stop whatever was started, latest first."""
        if self._close:
            self._progress.say("shutting down")
        while self._close:
            self._close.pop()()

    def _start_ours(self) -> tuple[OutriderClient, ServerProcess | None]:
        server, address = None, self._args.address
        if address is None:
            assert self._config is not None
            server = ServerProcess(self._config, self._scratch, self._args.verbose)
            self._close.append(server.stop)
            self._progress.say("starting our server")
            address = server.start(self._waiting)
        client = OutriderClient(address)
        self._close.append(client.close)
        return client, server

    def _start_other(self) -> tuple[list[Trial], tuple[InProcessEngine, dict[str, Any]] | None]:
        """Trials, and the engine with its arguments as used; None without a side to compare with."""
        if self._args.against is None:
            return [], None
        if self._other_cores is not None and not any("tcmalloc" in name for name in preload_libraries()):
            self._progress.say("tcmalloc is not installed (libtcmalloc-minimal4): both sides run without it")
        setting, trials = self._choose()
        engine = self._engine(setting)
        arguments = engine.start(lambda: self._waiting(f"{setting} loading"))
        self._memory.note()
        self._progress.say(f"{setting} loaded")
        self._other_setting = setting
        return trials, (engine, arguments)

    def _choose(self) -> tuple[Setting, list[Trial]]:
        """Where the other side is at its best: first K, on all its cores, then whether a core fewer is faster."""
        ks = self._args.against_k if self._args.against == "vllm" else (None,)
        settings = [Setting(k, self._other_cores) for k in ks]
        fewer = one_core_fewer(self._other_cores) if self._args.other_cores is None else None
        if len(settings) == 1 and fewer is None:
            return settings[0], []
        concurrency = self._load.concurrency
        asks = prompts_to_try(self._asks, concurrency)
        report = self._progress.say, self._waiting
        trials = try_out(settings, self._engine, self._warm_up, asks, concurrency, *report)
        if fewer is not None:
            setting = Setting(best(trials).k, fewer)
            trials += try_out([setting], self._engine, self._warm_up, asks, concurrency, *report)
        return best(trials), trials

    def _engine(self, setting: Setting) -> InProcessEngine:
        assert self._config is not None
        arguments = engine_arguments(self._config, setting.k, self._args.other_compile)
        log = self._scratch / "other.log"
        engine = InProcessEngine(arguments, setting.cores, log, self._args.verbose)
        self._close.append(engine.stop)
        return engine

    def _plan_our_cores(self) -> tuple[int, ...]:
        """Every core our side uses. Somebody else's server: all there are, as far as is known."""
        if self._config is None or self._args.address is not None or self._gpu:
            return available_cores()
        plan = plan_cores(self._config, available_cores())
        return tuple(sorted({core for rank in plan.target + plan.drafter for core in rank}))

    def _plan_other_cores(self) -> Cores | None:
        """One set a rank: as given, or our cores shared out. None on GPUs."""
        if self._gpu or self._config is None:
            return None
        target = self._config.target.model_copy(update={"cores": None})
        plain = self._config.model_copy(update={"target": target, "drafter": None})
        if self._args.other_cores is None:
            return plan_cores(plain, self._our_cores).target
        try:
            return plan_cores(with_cores(plain, self._args.other_cores, None), available_cores()).target
        except ConfigError as error:
            raise ConfigError(f"--other-cores: {str(error).removeprefix('target.cores: ')}") from None

    def _our_units(self) -> int | None:
        if self._args.address is not None or self._config is None:
            return None
        if self._gpu:
            drafter = self._config.drafter
            drafting = drafter.tensor_parallel_size if isinstance(drafter, DraftModelConfig) else 0
            return self._config.target.tensor_parallel_size + drafting
        return len(self._our_cores)

    def _other_units(self) -> int:
        if self._other_cores is None:
            return self._config.target.tensor_parallel_size if self._config is not None else 1
        return len({core for rank in self._other_cores for core in rank})

    def _our_settings(self, status: pb.GetServerStatusResponse) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "name": f"Outrider, {', '.join(status.methods) or 'no drafter'}, K = {status.num_speculative_tokens}",
            "model": status.model,
            "num_speculative_tokens": status.num_speculative_tokens,
        }
        if self._args.address is not None:
            return settings | {"address": self._args.address}
        assert self._config is not None
        plan = None if self._gpu else plan_cores(self._config, available_cores())
        cores = {"target": plan.target, "drafter": plan.drafter} if plan is not None else None
        return settings | {"config": self._config.model_dump(mode="json"), "cores": cores}

    def _other_settings(
        self, engine: InProcessEngine, arguments: dict[str, Any], trials: list[Trial]
    ) -> dict[str, Any]:
        speculative = arguments.get("speculative_config")
        kind = f"vLLM in-process, K = {speculative['num_speculative_tokens']}" if speculative else "vLLM, no drafter"
        return {
            "name": kind,
            "side": self._args.against,
            "engine": arguments,
            "environment": engine.environment,
            "cores": self._other_setting.cores if self._other_setting is not None else None,
            "tried": [{**asdict(trial.setting), "tok_per_s": trial.tok_per_s} for trial in trials],
        }

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
