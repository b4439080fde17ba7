"""Measures what parts of Outrider are worth, or another tree's code: servers carry the same load in turns.

    python -m tests.bench.ablation --without lengths,side-branches --texts stated,shift,mixed --batches 1,8,32
    python -m tests.bench.ablation --without side-branches --profiles 70b-8b,32b-0.6b --out result.json
    python -m tests.bench.ablation --b '{"speculation": {"verification": "block"}}' --temperatures 1
    python -m tests.bench.ablation --old-tree ../before --pairs 12

A is this tree as it is by default (or with --a). Against it stand: a server without each of the parts named, one with
--b, and one of --old-tree, by the command in its own .venv; models, load and clock are this tree's on all. The servers
of a cell stay up, and only the load goes from one to the next, A B C A B C ...; a ratio is A's speed over the other's,
with its 95% interval over the turns. Models take their time on emulated devices, see docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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

PARTS: dict[str, Sections] = {
    "running-ahead": {"target": {"async_scheduling": False}},
    "lengths": {"speculation": {"adaptive": False}},
    "draft-ahead": {"speculation": {"draft_ahead": False}},
    "side-branches": {"speculation": {"max_side_branches": 0}},
    "more-than-2-side-branches": {"speculation": {"max_side_branches": 2}},
}
"""What can be taken away, by name: how to configure its absence."""

DRAFTERS = {"usual": 1.0, "slow": 4.0}
"""Times as long a draft step as the profile's."""

STARTS_AT_ONCE = 2

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
    """A and one other in one cell. a, b: a RoundTimes for each turn, without the host's dilation."""

    cell: Cell
    b_is: str
    ceiling: Ceiling
    """At the K of A."""

    ratio: Interval
    a: list[RoundTimes]
    b: list[RoundTimes]


class Server:
    """One of those compared, with models and traces of its own."""

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


def compare(args: argparse.Namespace, a: Server, others: list[Server], directory: Path) -> Iterator[Compared]:
    most = max(args.batches)
    for number, (profile, drafter, text) in enumerate(itertools.product(args.profiles, args.drafters, args.texts)):
        cells = [Cell(profile, drafter, text, batch, t) for batch in args.batches for t in args.temperatures]

        def start(server: Server, place: Path, cell: Cell = cells[0]) -> contextlib.ExitStack:
            place.mkdir()
            with contextlib.ExitStack() as stack:
                stack.enter_context(server.up(place, cell, args.k, most, args.dilation))
                return stack.pop_all()

        with contextlib.ExitStack() as stack:
            with ThreadPoolExecutor(STARTS_AT_ONCE) as pool:
                starts = [pool.submit(start, server, directory / f"{number}-{server.name}") for server in (a, *others)]
            started = [future for future in starts if future.exception() is None]
            for future in started:
                stack.enter_context(future.result())
            for future in starts:
                future.result()  # raises what kept one from starting
            for cell in cells:
                yield from _in_turns(args, a, others, cell)


def _in_turns(args: argparse.Namespace, a: Server, others: list[Server], cell: Cell) -> list[Compared]:
    servers = (a, *others)
    for server in servers:  # what a server learns of a text, it has learnt before the first turn
        server.carry(cell, 1, args.tokens, args.dilation)
    found: dict[str, list[RoundTimes]] = {server.name: [] for server in servers}
    for _ in range(args.pairs):
        for server in servers:
            found[server.name].append(server.carry(cell, args.rounds, args.tokens, args.dilation))
    profile = PROFILES[cell.profile].times(1.0, DRAFTERS[cell.drafter])
    best = ceiling(sides_of(profile)["outrider"], profile.target, TEXTS[cell.text], cell.batch, a.k(args.k))
    speeds = {name: [times.tokens / times.seconds for times in of] for name, of in found.items()}
    return [
        Compared(cell, b.name, best, ratio_of_pairs(speeds[a.name], speeds[b.name]), found[a.name], found[b.name])
        for b in others
    ]


def table(compared: list[Compared]) -> str:
    """Markdown, one line a cell and contender. Of both: over all turns together."""
    columns = (
        "B", "profile", "drafter", "text", "batch", "T", "pairs", "A/B [95%]", "tok/s A, B",
        "ceiling A: covered, expected", "tokens a round A, B",
        "main/side/miss/none % A", "B", "overhead ms on hits A, B", "on misses",
    )  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for c in compared:
        both = (c.a, c.b)
        speed = (sum(t.tokens for t in of) / sum(t.seconds for t in of) for of in both)
        a_round = (sum(t.tokens for t in of) / sum(t.rounds for t in of) / c.cell.batch for of in both)
        cells = (
            c.b_is, c.cell.profile, c.cell.drafter, c.cell.text, c.cell.batch, f"{c.cell.temperature:g}",
            len(c.a), c.ratio, ", ".join(f"{value:.1f}" for value in speed),
            f"{c.ceiling.covered:.1f}, {c.ceiling.expected:.1f}",
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
    add_contenders(parser)
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
    a, *others = contenders(parser, args)
    said = [f"{server.name}: {server.sections or 'as by default'} {server.tree or ''}" for server in (a, *others)]
    print("\n".join([*said, f"dilation {args.dilation:g}, {environment()}"]), flush=True)
    done: list[Compared] = []
    with working_directory(args.keep) as directory:
        for compared in compare(args, a, others, directory):
            done.append(compared)
            print(table(done) if len(done) == 1 else table([compared]).splitlines()[-1], flush=True)
            if args.out:
                settings = {name: value for name, value in vars(args).items() if name not in ("keep", "out")}
                document = {"settings": settings, "environment": environment(), "cells": [asdict(c) for c in done]}
                args.out.write_text(json.dumps(document, indent=1, default=str))


def add_contenders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--without", type=names(PARTS), default=[], help=f"one B for each part it lacks: {', '.join(PARTS)}"
    )
    parser.add_argument("--a", type=json.loads, default={}, help="further configuration of A, sections as JSON")
    parser.add_argument("--b", type=json.loads, default={}, help="another B, with this configuration")
    parser.add_argument("--old-tree", type=Path, help="another B: this checkout's code, run by its own .venv")


def contenders(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Server]:
    """A first. Ends the program when there is nobody to compare it with."""
    servers = [Server("a", None, args.a)]
    servers += [Server(f"without-{part}", None, merged(args.a, PARTS[part])) for part in args.without]
    if args.b:
        servers.append(Server("b", None, args.b))
    if args.old_tree is not None:
        servers.append(Server("old-tree", args.old_tree, args.a))
    if len(servers) == 1:
        parser.error("--without, --b or --old-tree: with whom is A to be compared?")
    return servers


def merged(sections: Sections, further: Sections) -> Sections:
    return {name: {**sections.get(name, {}), **further.get(name, {})} for name in {*sections, *further}}


if __name__ == "__main__":
    main()
