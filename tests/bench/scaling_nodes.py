"""Targets, drafters and nodes that follow the load, with Ray's own autoscaler: the figure of docs/deployment.md.

    python -m tests.bench.scaling_nodes --out scaling

Two kinds of node, told apart by their labels, one for targets and one for drafters. The autoscaler starts what waiting
placement groups ask for, and ends what nobody uses. Callers come and go by PHASES, each as soon as all has followed the
one before; every caller asks for one answer after the other, greedily, and each answer is compared with the target's
alone. Writes ``OUT.json`` and ``OUT.png``; fails if a request does, or an answer is another. It runs in namespaces of
its own, which takes the right to make some.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from outrider.actors.serve_adapter import PROXY_ENVIRONMENT
from outrider.cluster.config import parse_config
from outrider.cluster.placement import available_cores
from outrider.deploy.bench.machine import machine, versions
from outrider.deploy.client.sync_client import OutriderError
from outrider.deploy.ports import pick_free_port
from tests.clusters import Autoscaled, served_on
from tests.pools import ask_registry, scraped
from tests.serving import Deployment, build_models, engine, wait_until
from tests.wire import APART, furnish


@dataclass(frozen=True)
class Phase:
    callers: int
    seconds: float
    """At least, and until there are as many as this:"""

    targets: int
    drafters: int
    """Nodes of each kind likewise."""

    def is_followed(self, seen: dict[str, Any]) -> bool:
        targets, drafters = (self.targets, self.targets), (self.drafters, self.drafters)
        return (seen["targets"], seen["target_nodes"]) == targets and (
            (seen["drafters"], seen["drafter_nodes"]) == drafters
        )


PHASES = (
    Phase(1, 40, targets=1, drafters=1),
    Phase(16, 60, targets=2, drafters=2),
    Phase(1, 60, targets=1, drafters=1),
    Phase(0, 40, targets=1, drafters=0),
    Phase(1, 40, targets=1, drafters=1),
)
FOLLOWED_WITHIN_S = 400.0

SEATS = 4
TOKENS = 200
IDLE_NODE_S = 10.0
LOADED_WITHIN_S = 300.0
MOST = 2
"""Of targets, of drafters, and of nodes of each kind."""

ROLES = ("target", "drafter")


def scaled_config(target: Path, drafter: Path) -> dict[str, Any]:
    """As many drafters as targets with requests: more than a load of two cores would ask for."""
    scaling = {"downscale_delay_s": 20}
    return {
        "target": engine(target, max_num_seqs=SEATS, node_labels={"role": "target"}),
        "drafter": {
            "method": "draft_model",
            **engine(drafter, node_labels={"role": "drafter"}),
            "placement": "pool",
            "autoscaling": {"min": 0, "max": MOST, "targets_per_drafter": 1, "worth": 0, **scaling},
        },
        # Without a controller of lengths nobody knows what is gained: whoever works gets drafters.
        "speculation": {"num_speculative_tokens": 4, "adaptive": False},
        "link": {"link_deadline_ms": 10_000},
        "serving": {
            "gateway": "off",
            "grpc_port": pick_free_port(),
            "http_port": pick_free_port(),
            "max_ongoing_requests": 2 * SEATS,
            "autoscaling": {"min": 1, "max": MOST, "target_queue_s": 0.5, **scaling},
        },
    }


@dataclass(frozen=True)
class Request:
    began_s: float
    took_s: float
    first_token_s: float
    error: str = ""


@dataclass
class Load:
    """Callers, each a thread; all times are seconds since it was made."""

    app: Deployment
    requests: list[Request] = field(default_factory=list)
    answers: dict[tuple[int, ...], list[list[int]]] = field(default_factory=dict)
    callers: int = 0
    _began: float = field(default_factory=time.monotonic)
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def now_s(self) -> float:
        return time.monotonic() - self._began

    def of(self, callers: int) -> None:
        """From now on; those beyond it end what they have begun."""
        self.callers = callers
        for number in range(len(self._threads), callers):
            self._threads.append(threading.Thread(target=self._call, args=(number,), daemon=True))
            self._threads[-1].start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(LOADED_WITHIN_S)
            assert not thread.is_alive(), "a request hangs"

    def _call(self, number: int) -> None:
        prompt = [(number * 11 + position * 5) % 250 for position in range(40)]
        while not self._over.is_set():
            if number < self.callers:
                self._ask(prompt)
            else:
                self._over.wait(0.05)

    def _ask(self, prompt: list[int]) -> None:
        began, first, tokens, error = self.now_s(), 0.0, list[int](), ""
        try:
            with self.app.client.stream(prompt, temperature=0.0, max_tokens=TOKENS, ignore_eos=True) as messages:
                for message in messages:
                    first = first or self.now_s() - began
                    tokens += message.token_ids
        except OutriderError as refused:
            error = f"{refused.code.name}: {refused}"
        else:
            self.answers.setdefault(tuple(prompt), []).append(tokens)
        self.requests.append(Request(began, self.now_s() - began, first, error))


def look(load: Load) -> dict[str, Any]:
    """What there is now."""
    roles = [node["Labels"].get("role") for node in ray.nodes() if node["Alive"]]
    scrape, drafters = scraped(load.app), 0
    with suppress(ValueError, ray.exceptions.RayError):
        drafters = len(ask_registry(load.app, "drafters"))
    return {
        "at_s": load.now_s(),
        "callers": load.callers,
        "targets": scrape.value("outrider:autoscaling_replicas", state="running"),
        "targets_wanted": scrape.value("outrider:autoscaling_replicas", state="wanted"),
        "drafters": drafters,
        **{f"{role}_nodes": roles.count(role) for role in ROLES},
    }


def follow(load: Load, phase: Phase) -> Iterator[dict[str, Any]]:
    """What is seen, once a second."""
    load.of(phase.callers)
    began = load.now_s()
    while True:
        with suppress(OSError):  # of a scrape
            seen = look(load)
            yield seen
            if phase.is_followed(seen) and load.now_s() - began >= phase.seconds:
                return
        assert load.now_s() - began < phase.seconds + FOLLOWED_WITHIN_S, f"{phase} is not followed: {seen}"
        time.sleep(1.0)


def run(scale: float) -> dict[str, Any]:
    """In namespaces of its own. scale: of the phases' seconds."""
    directory = Path(tempfile.mkdtemp(prefix="scaling"))
    models = build_models(directory)
    os.environ.update(PROXY_ENVIRONMENT)
    kinds = {
        role: {"resources": {"CPU": 2}, "labels": {"role": role}, "node_config": {}, "max_workers": MOST}
        for role in ROLES
    }
    cluster = Autoscaled(directory, kinds, IDLE_NODE_S)
    seen: list[dict[str, Any]] = []
    with served_on(cluster, parse_config(scaled_config(models.target, models.drafter)), models) as app:
        wait_until(app.all_replicas_are_known, LOADED_WITHIN_S, "a target on a node that the autoscaler added", 0.5)
        load = Load(app)
        for phase in PHASES:
            for now in follow(load, replace(phase, seconds=scale * phase.seconds)):
                seen.append(now)
                print(json.dumps(now), flush=True)
        load.end()
        for prompt, answers in load.answers.items():
            for answer in answers:
                app.reference.check(prompt, answer, label="while everything changed")
    requests = [asdict(request) for request in load.requests]
    return {"machine": machine(available_cores()), "versions": versions(), "seen": seen, "requests": requests}


def plot(result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    load, replicas, nodes, latency = figure.subplots(4, sharex=True)
    at = [each["at_s"] for each in result["seen"]]

    def steps(axes: Any, name: str, label: str, colour: str, style: str = "-") -> None:
        axes.step(at, [each[name] for each in result["seen"]], style, where="post", color=colour, label=label)

    steps(load, "callers", "callers", "black")
    steps(replicas, "targets_wanted", "targets wanted", "tab:blue", ":")
    steps(replicas, "targets", "targets", "tab:blue")
    steps(replicas, "drafters", "drafters", "tab:orange")
    steps(nodes, "target_nodes", "nodes for targets", "tab:blue")
    steps(nodes, "drafter_nodes", "nodes for drafters", "tab:orange")
    answered = [each for each in result["requests"] if not each["error"]]
    latency.plot(
        [each["began_s"] for each in answered], [each["took_s"] for each in answered], ".", ms=3, color="tab:grey",
        label=f"seconds of an answer of {TOKENS} tokens",
    )  # fmt: skip
    latency.set_xlabel("seconds")
    for axes in (load, replicas, nodes, latency):
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper right")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def report(result: dict[str, Any]) -> str:
    took = sorted(each["took_s"] for each in result["requests"] if not each["error"])
    errors = [each["error"] for each in result["requests"] if each["error"]]
    most = {name: max(each[name] or 0 for each in result["seen"]) for name in ("targets", "drafters", "target_nodes")}
    return (
        f"{len(took)} answers, {len(errors)} failed {errors[:3]}; at most {most}; seconds of an answer: median "
        f"{took[len(took) // 2]:.2f}, 95th percentile {took[int(0.95 * len(took))]:.2f}, longest {took[-1]:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="without an ending")
    parser.add_argument("--scale", type=float, default=1.0, help="of the phases' seconds; 0: no longer than it takes")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.inside:
        given = ["-m", "tests.bench.scaling_nodes", "--inside", *sys.argv[1:]]
        ended = subprocess.run(
            [*APART, sys.executable, *given], env={**os.environ, "RAY_AUTH_MODE": "token"}, check=False
        )
        sys.exit(ended.returncode)
    furnish()
    result = run(arguments.scale)
    arguments.out.with_suffix(".json").write_text(json.dumps(result))
    plot(result, arguments.out.with_suffix(".png"))
    print(report(result))
    if any(each["error"] for each in result["requests"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
