"""What a part of Outrider is worth, or another tree's code: two servers that carry the same load in turns.

    python -m tests.bench.ablation --part lengths --texts stated,shift,mixed --batches 1,8,32 --out lengths.json
    python -m tests.bench.ablation --part side-branches-8-0 --profiles 70b-8b,32b-0.6b
    python -m tests.bench.ablation --a '{"speculation": {"verification": "block"}}' --temperatures 1
    python -m tests.bench.ablation --old-tree ../before --pairs 12

A is this tree with the first of a part's settings (or --a), B with the second (or --b), or the code of --old-tree, by
the command in its own .venv. Models, load and clock are this tree's on both. Both servers of a cell stay up, and only
the load goes from one to the other, A B A B ...; a ratio is A's speed over B's, with its 95% interval over the pairs.
Models take their time on emulated devices, see docs/emulation.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.deploy.client.sync_client import OutriderClient
from tests.bench.emulated_speed import environment, numbers, working_directory
from tests.bench.emulation import served
from tests.bench.emulation.load import Load
from tests.bench.emulation.measurement import Ceiling, ceiling, sides_of
from tests.bench.emulation.pair import EmulatedPair, write_pair
from tests.bench.emulation.paired import Interval, ratio_of_pairs
from tests.bench.emulation.profiles import PROFILES, TEXTS
from tests.bench.emulation.progress import FullRounds
from tests.bench.emulation.rounds import ORIGINS, RoundTimes, rounds_of
from tests.bench.emulation.trace import read_trace

Sections = dict[str, dict[str, Any]]

PARTS: dict[str, tuple[Sections, Sections]] = {
    "lengths": ({"speculation": {"adaptive": True}}, {"speculation": {"adaptive": False}}),
    "draft-ahead": ({"speculation": {"draft_ahead": True}}, {"speculation": {"draft_ahead": False}}),
    **{
        f"side-branches-{more}-{fewer}": (
            {"speculation": {"max_side_branches": more}},
            {"speculation": {"max_side_branches": fewer}},
        )
        for more, fewer in ((8, 2), (8, 0), (2, 0))
    },
}
"""What can be switched, by name: with it, and without."""

DRAFTERS = {"usual": 1.0, "slow": 4.0}
"""Times as long a draft step as the profile's."""

_LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Cell:
    profile: str
    drafter: str
    text: str
    batch: int
    temperature: float


@dataclass(frozen=True)
class Compared:
    """One cell's pairs. a, b: a RoundTimes for each pair, without the host's dilation."""

    cell: Cell
    ceiling: Ceiling
    """At the K of A."""

    ratio: Interval
    a: list[RoundTimes]
    b: list[RoundTimes]


class Server:
    """One of the two, with models and traces of its own."""

    def __init__(self, name: str, tree: Path | None, sections: Sections) -> None:
        self.name, self.tree, self.sections = name, tree, sections
        self._pair: EmulatedPair | None = None
        self._client: OutriderClient | None = None

    @contextlib.contextmanager
    def up(self, directory: Path, cell: Cell, k: int, most: int, dilation: float) -> Iterator[None]:
        """While it serves a cell's profile, drafter and text. most: the largest batch to come."""
        profile = PROFILES[cell.profile].times(dilation, DRAFTERS[cell.drafter])
        self._pair = write_pair(directory, profile, TEXTS[cell.text])
        config = served.configuration(self._pair, k, most, self.sections)
        with served.serving(config, directory, tree=self.tree) as self._client:
            served.wait_until_drafting(self._client, most)
            yield

    def carry(self, cell: Cell, rounds: int, tokens: int, dilation: float) -> RoundTimes:
        assert self._pair is not None
        assert self._client is not None
        load, traces = Load(cell.batch, rounds, tokens, cell.temperature), self._pair.traces
        done = served.carry(self._client, load, FullRounds(traces, load, _LOOK_EVERY_S).are_enough)
        target, drafter = (read_trace(traces, role, done.started_s, done.ended_s) for role in ("target", "drafter"))
        return RoundTimes.of(rounds_of(target, drafter, cell.batch, TEXTS[cell.text]), 1.0 / dilation)

    def k(self, default: int) -> int:
        return int(self.sections.get("speculation", {}).get("num_speculative_tokens", default))


def compare(args: argparse.Namespace, a: Server, b: Server, directory: Path) -> Iterator[Compared]:
    most = max(args.batches)
    for number, (profile, drafter, text) in enumerate(itertools.product(args.profiles, args.drafters, args.texts)):
        cells = [Cell(profile, drafter, text, batch, t) for batch in args.batches for t in args.temperatures]
        with contextlib.ExitStack() as stack:
            for server in (a, b):
                place = directory / f"{number}-{server.name}"
                place.mkdir()
                stack.enter_context(server.up(place, cells[0], args.k, most, args.dilation))
            for cell in cells:
                yield _in_turns(args, a, b, cell)


def _in_turns(args: argparse.Namespace, a: Server, b: Server, cell: Cell) -> Compared:
    found: dict[str, list[RoundTimes]] = {a.name: [], b.name: []}
    for server in (a, b):  # what a server learns of a text, it has learnt before the first pair
        server.carry(cell, 1, args.tokens, args.dilation)
    for _ in range(args.pairs):
        for server in (a, b):
            found[server.name].append(server.carry(cell, args.rounds, args.tokens, args.dilation))
    profile = PROFILES[cell.profile].times(1.0, DRAFTERS[cell.drafter])
    side, text = sides_of(profile)["outrider"], TEXTS[cell.text]
    speeds = [[times.tokens / times.seconds for times in of] for of in found.values()]
    return Compared(
        cell=cell,
        ceiling=ceiling(side, profile.target, text, cell.batch, a.k(args.k)),
        ratio=ratio_of_pairs(*speeds),
        a=found[a.name],
        b=found[b.name],
    )


def table(compared: list[Compared]) -> str:
    """Markdown, one line a cell. Of both: over all pairs together."""
    columns = (
        "profile", "drafter", "text", "batch", "T", "pairs", "A/B [95%]", "tok/s A, B", "ceiling A: covered, expected",
        "tokens a round A, B", "main/side/miss/none % A", "B", "overhead ms on hits A, B", "on misses",
    )  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for c in compared:
        both = (c.a, c.b)
        speed = (sum(t.tokens for t in of) / sum(t.seconds for t in of) for of in both)
        a_round = (sum(t.tokens for t in of) / sum(t.rounds for t in of) / c.cell.batch for of in both)
        cells = (
            c.cell.profile, c.cell.drafter, c.cell.text, c.cell.batch, f"{c.cell.temperature:g}", len(c.a), c.ratio,
            ", ".join(f"{value:.1f}" for value in speed), f"{c.ceiling.covered:.1f}, {c.ceiling.expected:.1f}",
            ", ".join(f"{value:.2f}" for value in a_round), *(_shares(of) for of in both),
            *(", ".join(_overhead(of, name) for of in both) for name in ("hit", "miss")),
        )  # fmt: skip
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _shares(of: list[RoundTimes]) -> str:
    counts = [sum(times.origins[name] for times in of) for name in ORIGINS]
    return " / ".join(f"{100 * count / max(sum(counts), 1):.0f}" for count in counts)


def _overhead(of: list[RoundTimes], name: str) -> str:
    """Mean of the pairs' medians."""
    medians = [times.overhead_by_origin[name].median for times in of if name in times.overhead_by_origin]
    return f"{sum(medians) / len(medians):.1f}" if medians else "–"


def names(known: Any) -> Any:
    def of(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"{min(unknown)!r} is none of {', '.join(known)}")
        return chosen

    return of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, help="what A has and B has not")
    parser.add_argument("--a", type=json.loads, default={}, help="further configuration of A, sections as JSON")
    parser.add_argument("--b", type=json.loads, default={}, help="of B")
    parser.add_argument("--old-tree", type=Path, help="B is this checkout's code, run by its own .venv")
    parser.add_argument("--profiles", type=names(PROFILES), default=["70b-8b"], help=", ".join(PROFILES))
    parser.add_argument(
        "--drafters", type=names(DRAFTERS), default=["usual"], help="slow: its steps take 4 times as long"
    )
    parser.add_argument("--texts", type=names(TEXTS), default=["stated"], help=", ".join(TEXTS))
    parser.add_argument("--batches", type=numbers, default=[1], help="concurrent requests")
    parser.add_argument("--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0.0])
    parser.add_argument("--k", type=int, default=4, help="num_speculative_tokens, where --a and --b say nothing else")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=300, help="of the whole batch, at least, of each half of a pair")
    parser.add_argument("--tokens", type=int, default=256, help="a request")
    parser.add_argument("--dilation", type=float, default=1.0, help="times as long as the profile's")
    parser.add_argument("--keep", type=Path, help="work in this new directory and leave logs and traces there")
    parser.add_argument("--out", type=Path, help="every pair of every cell as JSON")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with_it, without = PARTS[args.part] if args.part else ({}, {})
    a = Server("a", None, merged(with_it, args.a))
    b = Server("b", args.old_tree, merged(without, args.b))
    if a.sections == b.sections and a.tree == b.tree:
        print("A and B are the same: what comes out is the instrument's own spread", flush=True)

    print(
        f"A {a.sections}\nB {b.sections} {args.old_tree or ''}\ndilation {args.dilation:g}, {environment()}", flush=True
    )
    done: list[Compared] = []
    with working_directory(args.keep) as directory:
        for compared in compare(args, a, b, directory):
            done.append(compared)
            print(table(done) if len(done) == 1 else table([compared]).splitlines()[-1], flush=True)
            if args.out:
                settings = {name: value if name != "old_tree" else str(value) for name, value in vars(args).items()}
                document = {
                    "settings": {name: value for name, value in settings.items() if name not in ("keep", "out")},
                    "a": a.sections,
                    "b": b.sections,
                    "environment": environment(),
                    "cells": [asdict(c) for c in done],
                }
                args.out.write_text(json.dumps(document, indent=1))


def merged(sections: Sections, further: Sections) -> Sections:
    return {name: {**sections.get(name, {}), **further.get(name, {})} for name in {*sections, *further}}


if __name__ == "__main__":
    main()
