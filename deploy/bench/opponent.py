"""What our side is measured against: vLLM's engine in-process, or another server of ours, started and described.

vLLM's engine runs at the settings at which it is fastest: each is tried on a few prompts before the run, engine by
engine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import yaml

from outrider.cluster.config import ConfigError, DraftModelConfig, OutriderConfig
from outrider.cluster.placement import available_cores, plan_cores, preload_libraries
from outrider.deploy.bench.arguments import Load, with_cores
from outrider.deploy.bench.load import Ask
from outrider.deploy.bench.sides import (
    Cores,
    InProcessEngine,
    OtherSide,
    OurSide,
    ServerProcess,
    Side,
    engine_arguments,
)
from outrider.deploy.client.sync_client import OutriderClient
from outrider.deploy.progress import Progress
from outrider.v1 import generation_pb2 as pb


@dataclass(frozen=True)
class Setting:
    k: int | None
    """None: no speculation."""

    cores: Cores | None
    """Of the model's threads, by rank. None on GPUs."""

    def __str__(self) -> str:
        drafts = "no speculation" if self.k is None else f"K = {self.k}"
        if self.cores is None:
            return f"in-process vLLM, {drafts}:"
        return f"in-process vLLM, {drafts}, cores {'|'.join(','.join(map(str, rank)) for rank in self.cores)}:"


@dataclass(frozen=True)
class Trial:
    setting: Setting
    tok_per_s: float


def prompts_to_try(asks: Sequence[Ask], concurrency: int) -> list[Ask]:
    """Evenly spread, enough to fill the concurrency twice."""
    count = min(len(asks), max(2 * concurrency, 4))
    return [asks[place * len(asks) // count] for place in range(count)]


def one_core_fewer(cores: Cores | None) -> Cores | None:
    """A core of each rank left to vLLM's scheduler process, which polls while the model works; vLLM's own automatic
    binding does that. None where a rank has no second core."""
    if cores is None or min(map(len, cores)) < 2:
        return None
    return tuple(rank[:-1] for rank in cores)


def try_out(
    settings: Sequence[Setting],
    make: Callable[[Setting], InProcessEngine],
    warm_up: Sequence[Ask],
    asks: Sequence[Ask],
    concurrency: int,
    say: Callable[[str], None],
    waiting: Callable[[str], None],
) -> list[Trial]:
    """In the order of ``settings``. make: an engine that is not started. say: gets each result; waiting: is called
    with what is going on, now and then. Raises BenchError."""
    trials = []
    for setting in settings:
        engine = make(setting)
        try:
            engine.start(partial(waiting, f"{setting} loading"))
            engine.run(warm_up, concurrency, lambda done, tokens: None)
            seconds, answers = engine.run(asks, concurrency, partial(_trying, waiting, setting))
        finally:
            engine.stop()
        trials.append(Trial(setting, sum(len(answer.token_ids) for answer in answers) / seconds))
        say(f"{setting} {trials[-1].tok_per_s:.2f} tok/s on {len(asks)} prompts")
    return trials


def _trying(waiting: Callable[[str], None], setting: Setting, done: int, tokens: int) -> None:
    waiting(f"{setting} trying")


def best(trials: Sequence[Trial]) -> Setting:
    """The fastest; of equals the first."""
    return max(trials, key=lambda trial: trial.tok_per_s).setting


@dataclass(frozen=True)
class Stage:
    """What a run lends to whatever it starts."""

    args: argparse.Namespace
    load: Load
    scratch: Path
    gpu: bool
    progress: Progress
    waiting: Callable[[str], None]
    """Called now and then while something loads, with what."""

    close: list[Callable[[], None]]
    """Called at the end, latest first."""


class Opponent(Protocol):
    def start(self, asks: Sequence[Ask], warm_up: Sequence[Ask]) -> Side:
        """Load it, at its best setting for asks. Raises BenchError, OutriderError, Stopped."""

    def settings(self) -> dict[str, Any]:
        """For the report, once started. ``name`` heads its column."""

    def units(self) -> int:
        """Cores or accelerators that it may use."""

    def rounds(self) -> pb.RoundStatistics | None:
        """Counted since its start; None: it counts none."""


class InProcess:
    """vLLM's AsyncLLM in a process of its own, with the same target, and the same drafter in it with ``vllm``."""

    def __init__(self, stage: Stage, config: OutriderConfig, our_cores: tuple[int, ...]) -> None:
        """Raises ConfigError for cores that cannot be had."""
        self._stage, self._config = stage, config
        self._cores = None if stage.gpu else self._plan_cores(our_cores)
        self._setting: Setting | None = None
        self._trials: list[Trial] = []
        self._arguments: dict[str, Any] = {}
        self._environment: dict[str, str] = {}

    def start(self, asks: Sequence[Ask], warm_up: Sequence[Ask]) -> Side:
        stage = self._stage
        if self._cores is not None and not any("tcmalloc" in name for name in preload_libraries()):
            stage.progress.say("tcmalloc is not installed (libtcmalloc-minimal4): both sides run without it")
        setting = self._setting = self._choose(asks, warm_up)
        engine = self._engine(setting)
        self._arguments = engine.start(lambda: stage.waiting(f"{setting} loading"))
        self._environment = engine.environment
        stage.progress.say(f"{setting} loaded")
        return OtherSide(engine, stage.load)

    def settings(self) -> dict[str, Any]:
        speculative = self._arguments.get("speculative_config")
        kind = f"vLLM in-process, K = {speculative['num_speculative_tokens']}" if speculative else "vLLM, no drafter"
        return {
            "name": kind,
            "side": self._stage.args.against,
            "engine": self._arguments,
            "environment": self._environment,
            "cores": self._setting.cores if self._setting is not None else None,
            "tried": [{**asdict(trial.setting), "tok_per_s": trial.tok_per_s} for trial in self._trials],
        }

    def units(self) -> int:
        if self._cores is None:
            return self._config.target.num_ranks
        return len({core for rank in self._cores for core in rank})

    def rounds(self) -> pb.RoundStatistics | None:
        return None

    def _choose(self, asks: Sequence[Ask], warm_up: Sequence[Ask]) -> Setting:
        """Where it is at its best: first K, on all its cores, then whether a core fewer is faster."""
        stage, args = self._stage, self._stage.args
        ks = args.against_k if args.against == "vllm" else (None,)
        settings = [Setting(k, self._cores) for k in ks]
        fewer = one_core_fewer(self._cores) if args.other_cores is None else None
        if len(settings) == 1 and fewer is None:
            return settings[0]
        concurrency = stage.load.concurrency
        tried = prompts_to_try(asks, concurrency)
        report = stage.progress.say, stage.waiting
        self._trials = try_out(settings, self._engine, warm_up, tried, concurrency, *report)
        if fewer is not None:
            setting = Setting(best(self._trials).k, fewer)
            self._trials += try_out([setting], self._engine, warm_up, tried, concurrency, *report)
        return best(self._trials)

    def _engine(self, setting: Setting) -> InProcessEngine:
        stage = self._stage
        arguments = engine_arguments(self._config, setting.k, stage.args.other_compile)
        engine = InProcessEngine(arguments, setting.cores, stage.scratch / "other.log", stage.args.verbose)
        stage.close.append(engine.stop)
        return engine

    def _plan_cores(self, our_cores: tuple[int, ...]) -> Cores:
        """One set a rank: as given, or our cores shared out."""
        target = self._config.target.model_copy(update={"cores": None})
        plain = self._config.model_copy(update={"target": target, "drafter": None})
        if self._stage.args.other_cores is None:
            return plan_cores(plain, our_cores).target
        try:
            return plan_cores(with_cores(plain, self._stage.args.other_cores, None), available_cores()).target
        except ConfigError as error:
            raise ConfigError(f"--other-cores: {str(error).removeprefix('target.cores: ')}") from None


class AnotherServer:
    """A server of ours from another configuration file, loaded beside the first."""

    def __init__(self, stage: Stage, config: OutriderConfig) -> None:
        self._stage, self._config = stage, config
        self._client: OutriderClient | None = None

    def start(self, asks: Sequence[Ask], warm_up: Sequence[Ask]) -> Side:
        client, server = start_server(self._stage, self._config, "the other server", "other")
        self._client = client
        return OurSide(client, self._stage.load, server, "other")

    def settings(self) -> dict[str, Any]:
        assert self._client is not None
        return {
            **server_settings(self._client.status(), self._config, self._stage.gpu),
            "side": str(self._stage.args.against),
            "tried": [],
        }

    def units(self) -> int:
        return server_units(self._config, self._stage.gpu)

    def rounds(self) -> pb.RoundStatistics | None:
        return self._client.status().rounds if self._client is not None else None


def start_server(stage: Stage, config: OutriderConfig, what: str, name: str) -> tuple[OutriderClient, ServerProcess]:
    """name: of its directory in the run's scratch. Raises BenchError, OutriderError."""
    directory = stage.scratch / name
    directory.mkdir()
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    server = ServerProcess(str(path), *(["--verbose"] if stage.args.verbose else []))
    stage.close.append(server.stop)
    stage.progress.say(f"starting {what}")
    client = OutriderClient(server.start(lambda: stage.waiting("")))
    stage.close.append(client.close)
    return client, server


def server_settings(
    status: pb.GetServerStatusResponse, config: OutriderConfig | None, gpu: bool, address: str | None = None
) -> dict[str, Any]:
    """Of a server of ours, for the report. config None: only its address is known."""
    settings: dict[str, Any] = {
        "name": f"Outrider, {', '.join(status.methods) or 'no drafter'}, K = {status.num_speculative_tokens}",
        "model": status.model,
        "num_speculative_tokens": status.num_speculative_tokens,
    }
    if address is not None or config is None:
        return settings | {"address": address}
    plan = None if gpu else plan_cores(config, available_cores())
    cores = {"target": plan.target, "drafter": plan.drafter} if plan is not None else None
    return settings | {"config": config.model_dump(mode="json"), "cores": cores}


def server_cores(config: OutriderConfig) -> tuple[int, ...]:
    """Every core that a server on this machine uses. Raises ConfigError for cores that cannot be had."""
    plan = plan_cores(config, available_cores())
    return tuple(sorted({core for rank in plan.target + plan.drafter for core in rank}))


def server_units(config: OutriderConfig, gpu: bool) -> int:
    """Cores, or accelerators."""
    if not gpu:
        return len(server_cores(config))
    drafter = config.drafter
    return config.target.num_ranks + (drafter.tensor_parallel_size if isinstance(drafter, DraftModelConfig) else 0)
