"""Runs one benchmark: finds the best setting of the other server, starts both, and measures them in turns."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outrider.cluster.config import OutriderConfig
from outrider.cluster.placement import available_cores, plan_cores
from outrider.deploy.app import engine_on_gpu
from outrider.deploy.bench.arguments import candidates, with_cores
from outrider.deploy.bench.load import Load, Turn
from outrider.deploy.bench.machine import BenchError, machine, versions
from outrider.deploy.bench.report import FORMAT, Report, ratios, same_answers, side
from outrider.deploy.bench.servers import (
    OutriderServer,
    RunningServer,
    Server,
    VllmServer,
    command_line,
    engine_arguments,
)
from outrider.deploy.cli.serve import prepare
from outrider.deploy.progress import Progress

SETTLE_S = 2.0
"""Pause between turns. vLLM's worker queues poll for one second after their last message."""

WARM_UP = 1_000_000
"""First turn number of trials and warm-ups, whose prompts no measured turn has."""


@dataclass
class Side:
    """Holds a server with its settings and turns."""

    server: Server
    settings: dict[str, Any]  # for the report; its ``name`` heads a column
    tokenizer: str | None = None
    url: str = ""
    turns: list[Turn] = field(default_factory=list)


class Run:
    """Measures once. ``close`` ends the servers."""

    def __init__(self, args: argparse.Namespace, load: Load, scratch: Path, progress: Progress) -> None:
        """Checks the configurations. Raises ConfigError."""
        self._args, self._load, self._scratch, self._progress = args, load, scratch, progress
        self._gpu = engine_on_gpu()
        self._stack = ExitStack()
        self.close = self._stack.close
        self._config = self._other_config = None
        if args.address is None:
            ours = _served(args, args.preset or args.config, progress)
            self._config = with_cores(ours, target=args.target_cores, drafter=args.drafter_cores)
        if (args.against or "").endswith((".yaml", ".yml")):
            self._other_config = _served(args, args.against, progress)

    def measure(self) -> Report:
        """Returns the report. Raises BenchError, ConfigError."""
        started, here = datetime.now(UTC), machine(available_cores())
        sides = {"ours": self._our_side()}
        if self._args.against is not None:
            sides["other"] = self._other_side()
        for name, each in sides.items():
            self._start(name, each)
        self._take_turns(sides)
        both = [each.turns for each in sides.values()]
        return {
            "format": FORMAT,
            "started": started.isoformat(timespec="seconds"),
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": here,
            "versions": versions(),
            "load": self._load.options,
            "ratios": ratios(*both) if len(both) == 2 else None,
            "same_answers": same_answers(*both) if len(both) == 2 else None,
            **{name: {"settings": each.settings, **side(each.turns)} for name, each in sides.items()},
        }

    def _take_turns(self, sides: Mapping[str, Side]) -> None:
        rounds, began = self._args.rounds, time.monotonic()
        for number in range(rounds):
            for name, each in sides.items():
                time.sleep(SETTLE_S)
                self._progress.say(f"round {number + 1} of {rounds}, {name}")
                each.turns.append(turn := self._load.turn(each.url, number, each.tokenizer))
                self._progress.say(f"  {turn.figures['output_throughput']:.2f} tok/s")
            if left := rounds - number - 1:
                spent_s = time.monotonic() - began
                self._progress.say(f"about {spent_s / (number + 1) * left:.0f} s left")

    def _start(self, name: str, each: Side) -> None:
        """Starts a server and warms it up."""
        if not isinstance(each.server, RunningServer):
            self._stack.callback(each.server.stop)
            self._stack.callback(self._progress.say, f"shutting down {name}")
        self._progress.say(f"starting {name}: {each.settings['name']}")
        each.url = each.server.start(lambda: self._progress.wait(f"{name} loading"))
        self._load.turn(each.url, WARM_UP, each.tokenizer, self._few)

    @property
    def _few(self) -> int:
        return min(self._load.num_prompts, max(2 * self._load.concurrency, 4))

    def _our_side(self) -> Side:
        return _running(self._args.address) if self._config is None else self._outrider(self._config, "ours")

    def _other_side(self) -> Side:
        if self._other_config is not None:
            return self._outrider(self._other_config, "other")
        if self._config is None or self._args.against not in ("plain", "vllm"):
            return _running(self._args.against)
        first, *others = self._rival_cores(self._config)
        ways = candidates(self._args, self._config)
        if len(ways) == 1 and not others:
            return self._rival(ways[0], first)
        tried = self._try_out([(way, first) for way in ways])
        tried += self._try_out([(max(tried, key=_speed)["speculative"], cores) for cores in others])
        best = max(tried, key=_speed)
        rival = self._rival(best["speculative"], best["cores"])
        rival.settings["tried"] = tried
        return rival

    def _try_out(self, settings: Sequence[tuple[dict[str, Any] | None, str | None]]) -> list[dict[str, Any]]:
        """Measures the rival at each setting. Settings that vLLM refuses are left out; BenchError if all are."""
        tried: list[dict[str, Any]] = []
        refused: list[dict[str, Any]] = []
        for speculative, cores in settings:
            if (kind := {**(speculative or {}), "num_speculative_tokens": 0, "cores": cores}) in refused:
                continue
            rival = self._rival(speculative, cores)
            name = rival.settings["name"]
            try:
                url = rival.server.start(lambda name=name: self._progress.wait(f"{name} loading"))  # type: ignore[misc]
                self._load.turn(url, WARM_UP, rival.tokenizer, self._few)
                speed = self._load.turn(url, WARM_UP + 1, rival.tokenizer, self._few).figures["output_throughput"]
            except BenchError as error:
                refused.append(kind)
                self._progress.say(f"{name} is left out: {error}")
                continue
            finally:
                rival.server.stop()
            tried.append({"name": name, "speculative": speculative, "cores": cores, "tok_per_s": speed})
            self._progress.say(f"{name}: {speed:.2f} tok/s on {self._few} prompts")
        if settings and not tried:
            raise BenchError(f"--against {self._args.against}: vLLM refused every setting; the lines above say why")
        return tried

    def _rival(self, speculative: dict[str, Any] | None, cores: str | None) -> Side:
        assert self._config is not None
        arguments = engine_arguments(self._config, speculative, self._gpu)
        options = [*command_line(arguments), *self._args.other_args]
        server = VllmServer(options, cores, self._scratch / "vllm.log")
        settings = {"name": _name(speculative), "cores": cores, "options": options, "environment": server.environment}
        return Side(server, settings, self._config.target.model)

    def _outrider(self, config: OutriderConfig, name: str) -> Side:
        plan = None if self._gpu else plan_cores(config, available_cores())
        method = getattr(config.drafter, "method", "no drafter")
        k = config.speculation.num_speculative_tokens
        settings = {
            "name": f"Outrider, {method}" + (f", K = {k}" if config.drafter is not None else ""),
            "config": config.model_dump(mode="json"),
            "cores": None if plan is None else {"target": plan.target, "drafter": plan.drafter},
        }
        server = OutriderServer(config, self._scratch / f"{name}.yaml", self._args.verbose)
        return Side(server, settings, config.target.model)

    def _rival_cores(self, config: OutriderConfig) -> Sequence[str | None]:
        """Returns the given cores, or all of our server's divided among the rival's ranks. Raises ConfigError."""
        if self._gpu or self._args.other_cores:
            return self._args.other_cores or [None]
        plan = plan_cores(config, available_cores())
        ours = sorted({core for rank in plan.target + plan.drafter for core in rank})
        target = config.target.model_copy(update={"cores": None})
        alone = plan_cores(config.model_copy(update={"target": target, "drafter": None}), ours).target
        return ["|".join(",".join(map(str, rank)) for rank in alone)]


def _running(url: str) -> Side:
    return Side(RunningServer(url), {"name": url})


def _speed(tried: Mapping[str, Any]) -> float:
    return float(tried["tok_per_s"])


def _name(speculative: Mapping[str, Any] | None) -> str:
    if speculative is None:
        return "vLLM, no drafts"
    one_pass = ", one pass" if speculative.get("parallel_drafting") else ""
    return f"vLLM, {speculative['method']}{one_pass}, K = {speculative['num_speculative_tokens']}"


def _served(args: argparse.Namespace, source: str, progress: Progress) -> OutriderConfig:
    served: dict[str, Any] = {"config_file": source, "config": None, "flags": [], "grpc_port": 0, "http_port": 0}
    return prepare(argparse.Namespace(**{**vars(args), **served}), progress)
