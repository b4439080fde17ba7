"""A stream of requests that shifts from one domain to another: a server whose drafter learns, and its frozen twin.

    python -m tests.bench.learning_shift --target T --drafter D --minutes 8 --out shift

Both answer the same prompts in turns, in float32, greedy or, above temperature 0, with seeds and drafts coupled to
them: the same tokens, or it says how many were not. Acceptance by turn and temperature, tokens a second as a ratio of
pairs, rounds without drafts around each change of version, and a plot. What the trainer has left of the cores it has
from both alike.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.deploy.bench.machine import machine, versions
from outrider.deploy.ports import pick_free_port
from tests.bench.domain_prompts import prompts
from tests.bench.emulated_speed import working_directory
from tests.bench.emulation import served
from tests.bench.emulation.paired import ratio_of_pairs
from tests.bench.real_pair import Turn, answer
from tests.support.cluster.scrape import parse

PREFIX = "<|im_start|>user\n"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
WINDOW = 8
"""Turns after which it is said how it goes."""

POINTS = 16
"""Points of the plot, about."""


@dataclass(frozen=True)
class Pair:
    """One turn of each."""

    minute: float
    domain: str
    version: int
    """The version that drafts when the learning side's turn is over."""

    learning: Turn
    frozen: Turn


@dataclass(frozen=True)
class Swap:
    """Another version drafts than a turn before: it was taken in this turn, or after the one before.

    without, frozen_without: rounds without drafts of a request of this turn, in the mean, on either side."""

    minute: float
    version: int
    without: float
    frozen_without: float


def acceptance(turns: list[Turn]) -> float:
    drafted = sum(turn.counts["drafted"] for turn in turns)
    return sum(turn.counts["accepted"] for turn in turns) / drafted if drafted else 0.0


def at(turns: list[Turn], temperatures: list[float], temperature: float) -> float:
    """Acceptance of the requests with this temperature."""
    drafts = [
        (drafted, accepted)
        for turn in turns
        for of, drafted, accepted in zip(itertools.cycle(temperatures), turn.drafted, turn.accepted, strict=False)
        if of == temperature
    ]
    drafted, accepted = (sum(of) for of in zip(*drafts, strict=True))
    return accepted / drafted if drafted else 0.0


def length(turns: list[Turn]) -> float:
    """Tokens a drafted round."""
    return 1 + sum(t.counts["accepted"] for t in turns) / max(sum(t.counts["drafted_rounds"] for t in turns), 1)


def without_drafts(turns: list[Turn]) -> float:
    """Rounds of a request's, in the mean. Its first one is among them where drafts are late for it."""
    asked = sum(len(turn.texts) for turn in turns)
    rounds = sum(turn.counts["rounds"] - turn.counts["drafted_rounds"] for turn in turns)
    return rounds / asked if asked else 0.0


def swaps(pairs: list[Pair]) -> list[Swap]:
    """Version 0 drafts before the first turn."""
    versions_before = [0, *(pair.version for pair in pairs)]
    return [
        Swap(pair.minute, pair.version, without_drafts([pair.learning]), without_drafts([pair.frozen]))
        for before, pair in zip(versions_before, pairs, strict=False)
        if pair.version != before
    ]


def said_of_swaps(pairs: list[Pair]) -> list[str]:
    """What a swap costs is what its turns have more than the others, and than the frozen side's."""
    found = swaps(pairs)
    minutes = {swap.minute for swap in found}
    lines = []
    for name, of in (
        (f"{len(found)} turns with another version", [pair for pair in pairs if pair.minute in minutes]),
        ("the others", [pair for pair in pairs if pair.minute not in minutes]),
    ):
        ours, theirs = (without_drafts([getattr(pair, side) for pair in of]) for side in ("learning", "frozen"))
        lines.append(f"rounds without drafts a request, {name}: learning {ours:.2f}, frozen {theirs:.2f}")
    if found:
        most = max(found, key=lambda swap: swap.without - swap.frozen_without)
        lines.append(
            f"the most, version {most.version} at minute {most.minute:.1f}: learning {most.without:.2f}, "
            f"frozen {most.frozen_without:.2f}"
        )
    return lines


def rounds_a_second(turns: list[Turn]) -> list[float]:
    """What a server does whatever its drafts are worth."""
    return [turn.counts["drafted_rounds"] / turn.seconds for turn in turns]


def windows(pairs: list[Pair]) -> list[list[Pair]]:
    """Groups turns that follow one another in one domain, as many each; the last of a domain may have more."""
    size, found = max(len(pairs) // POINTS, 1), []
    for _, group in itertools.groupby(pairs, lambda pair: pair.domain):
        of = list(group)
        starts = list(range(0, len(of), size))
        if len(starts) > 1 and len(of) - starts[-1] < size:
            starts.pop()
        found += [of[start:end] for start, end in zip(starts, [*starts[1:], len(of)], strict=True)]
    return found


def scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        found = parse(response.read().decode(), time.monotonic())
    names = ("drafter_version", "learning_steps_total", "learning_tokens_total", "learning_adopted_total",
             "learning_withdrawn_total", "learning_failures_total")  # fmt: skip
    return {name: found.sum(f"outrider:{name}") for name in names}


def table(pairs: list[Pair], domains: list[str], temperatures: list[float]) -> list[str]:
    columns = (
        "", "turns", "accepted, learning", "frozen", "tokens a round, learning", "frozen", "tok/s, ratio [95%]",
        *(f"{side} at {temperature:g}" for temperature in temperatures for side in ("learning", "frozen")),
    )  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for number, domain in enumerate(domains):
        of = [pair for pair in pairs if pair.domain == f"{number} {domain}"]
        quarter = len(of) // 4
        for name, part in (("first quarter", of[:quarter]), ("last quarter", of[len(of) - quarter :]), ("all", of)):
            if len(part) < 2:  # no interval
                continue
            ours, theirs = [pair.learning for pair in part], [pair.frozen for pair in part]
            ratio = ratio_of_pairs([t.tokens / t.seconds for t in ours], [t.tokens / t.seconds for t in theirs])
            lines.append(
                f"| {domain}, {name} | {len(part)} | {acceptance(ours):.3f} | {acceptance(theirs):.3f} | "
                f"{length(ours):.2f} | {length(theirs):.2f} | {ratio} | "
                + " | ".join(f"{at(side, temperatures, t):.3f}" for t in temperatures for side in (ours, theirs))
                + " |"
            )
    return lines


def draw(pairs: list[Pair], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    points = windows(pairs)
    minutes = [window[-1].minute for window in points]
    for name, colour in (("learning", "#1f6f8b"), ("frozen", "#d9822b")):
        values = [acceptance([getattr(pair, name) for pair in window]) for window in points]
        axes.plot(minutes, values, "o-", ms=3, color=colour, label=f"{name} drafter")
    for before, after in itertools.pairwise(pairs):
        if before.domain != after.domain:
            axes.axvline(after.minute, color="grey", lw=1)
        if before.version != after.version:
            axes.axvline(after.minute, color="#1f6f8b", lw=0.5, alpha=0.35, ymax=0.05)
    seen: set[str] = set()
    for pair in pairs:
        if pair.domain not in seen:
            seen.add(pair.domain)
            axes.text(pair.minute, axes.get_ylim()[1], " " + pair.domain.split(" ", 1)[1], va="bottom", fontsize=9)
    axes.set_xlabel("minutes of the stream; short marks below: another version drafts")
    axes.set_ylabel("accepted of all drafts")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--domains", default="code,math,general")
    parser.add_argument("--minutes", type=float, default=8.0, help="of each domain")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=floats, default=[0.0], help="of one request after the other: 0,0.7")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--learn", type=json.loads, default={}, help="drafter.learn, as JSON")
    parser.add_argument("--out", type=Path, required=True, help="OUT.json and OUT.png")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    engine = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28}
    domains = args.domains.split(",")
    ports = {name: pick_free_port() for name in ("learning", "frozen")}

    def config(name: str, learn: dict[str, Any] | None) -> dict[str, Any]:
        drafter = {"method": "draft_model", "model": args.drafter, **engine}
        return {
            "target": {"model": args.target, **engine},
            "drafter": drafter if learn is None else {**drafter, "learn": learn},
            "speculation": {"num_speculative_tokens": args.k, "adaptive": False, "verification": "coupled"},
            "serving": {"gateway": {"grpc_port": 0, "http_port": ports[name]}},
            "link": {"round_deadline_ms": 5000, "link_deadline_ms": 30000},
        }

    pairs: list[Pair] = []
    how = args.concurrency, args.max_tokens, args.temperatures
    with (
        working_directory(None) as directory,
        served.serving(config("learning", args.learn), directory, "learning") as learning,
        served.serving(config("frozen", None), directory, "frozen") as frozen,
    ):
        for client in (learning, frozen):
            served.wait_until_drafting(client, args.concurrency)
        started = time.monotonic()
        for number, domain in enumerate(domains):
            texts = [f"{PREFIX}{text}{SUFFIX}" for text in prompts(domain, 2000, seed=1 + number)]
            until, at = time.monotonic() + 60 * args.minutes, 0
            while time.monotonic() < until:
                asked = [texts[(at + index) % len(texts)] for index in range(args.concurrency)]
                at += args.concurrency
                learned = answer(learning, asked, *how)
                # Before the frozen side's turn: what is taken while that one answers costs no round.
                version = int(scraped(ports["learning"])["drafter_version"])
                sides = [learned, answer(frozen, asked, *how)]
                minute = (time.monotonic() - started) / 60
                pairs.append(Pair(minute, f"{number} {domain}", version, *sides))
                if len(pairs) % WINDOW == 0:
                    recent = pairs[-WINDOW:]
                    print(
                        f"{minute:5.1f} min, {domain}: learning {acceptance([p.learning for p in recent]):.3f}, "
                        f"frozen {acceptance([p.frozen for p in recent]):.3f}, version {version}",
                        flush=True,
                    )
        ended = scraped(ports["learning"])
    texts_of = [(a, b) for pair in pairs for a, b in zip(pair.learning.texts, pair.frozen.texts, strict=True)]
    same = sum(a == b for a, b in texts_of)
    ratio = ratio_of_pairs(*([getattr(p, s).tokens / getattr(p, s).seconds for p in pairs] for s in ports))
    steps = ratio_of_pairs(*(rounds_a_second([getattr(p, s) for p in pairs]) for s in ports))
    print("\n".join(table(pairs, domains, args.temperatures)))
    print("\n".join(said_of_swaps(pairs)))
    print(f"drafted rounds a second, learning over frozen: {steps}")
    print(f"same text: {same} of {len(texts_of)}; tokens a second, learning over frozen: {ratio}; {ended}")
    document = {
        "settings": {key: str(value) for key, value in vars(args).items()},
        "machine": machine(()),
        "versions": versions(),
        "ended": ended,
        "swaps": [asdict(swap) for swap in swaps(pairs)],
        "pairs": [asdict(pair) for pair in pairs],
    }
    args.out.with_suffix(".json").write_text(json.dumps(document, indent=1, default=str))
    draw(pairs, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
