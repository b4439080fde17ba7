"""A stream of requests that shifts from one domain to another: a server whose drafter learns, and its frozen twin.

    python -m tests.bench.learning_shift --target T --drafter D --minutes 8 --out shift

Both answer the same prompts in turns, in float32, greedy or, above temperature 0, with seeds and drafts coupled to
them: the same tokens, or it says how many were not. It prints acceptance by quarter of a domain, and tokens a second as
a ratio of pairs, and plots them. What the trainer has left of the cores it has from both alike.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.deploy.bench.machine import machine, versions
from outrider.deploy.client.sync_client import OutriderClient
from outrider.deploy.ports import pick_free_port
from outrider.v1 import generation_pb2 as pb
from tests.bench.domain_prompts import prompts
from tests.bench.emulated_speed import working_directory
from tests.bench.emulation import served
from tests.bench.emulation.paired import ratio_of_pairs
from tests.support.cluster.scrape import parse

PREFIX = "<|im_start|>user\n"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
WINDOW = 8
"""Turns after which it is said how it goes."""

POINTS = 16
"""Points of the plot, about."""

COUNTS = ("rounds", "drafted_rounds", "drafted", "accepted")


@dataclass(frozen=True)
class Turn:
    """One side's answers to one pair's prompts."""

    tokens: int
    seconds: float
    counts: dict[str, int]
    """The verifier's counts over the turn."""

    texts: list[str]


@dataclass(frozen=True)
class Pair:
    """One turn of each."""

    minute: float
    domain: str
    version: int
    """The version that drafts when the learning side's turn is over."""

    learning: Turn
    frozen: Turn


def answer(
    client: OutriderClient, texts: Sequence[str], concurrency: int, max_tokens: int, temperatures: Sequence[float]
) -> Turn:
    """temperatures: of one text after the other, from the start again where there are more texts."""

    def ask(text: str, temperature: float) -> pb.GenerateResponse:
        return client.generate(text, temperature=temperature, seed=0, max_tokens=max_tokens, ignore_eos=True)

    before = client.status().rounds
    with ThreadPoolExecutor(concurrency) as pool:
        started = time.perf_counter()
        answers = list(pool.map(ask, texts, itertools.cycle(temperatures)))
        seconds = time.perf_counter() - started
    after = client.status().rounds
    counts = {name: getattr(after, name) - getattr(before, name) for name in COUNTS}
    tokens = sum(answer.usage.completion_tokens for answer in answers)
    return Turn(tokens, seconds, counts, [answer.text for answer in answers])


def acceptance(turns: list[Turn]) -> float:
    drafted = sum(turn.counts["drafted"] for turn in turns)
    return sum(turn.counts["accepted"] for turn in turns) / drafted if drafted else 0.0


def length(turns: list[Turn]) -> float:
    """Tokens a drafted round."""
    return 1 + sum(t.counts["accepted"] for t in turns) / max(sum(t.counts["drafted_rounds"] for t in turns), 1)


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


def table(pairs: list[Pair], domains: list[str]) -> list[str]:
    columns = (
        "", "turns", "accepted, learning", "frozen", "tokens a round, learning", "frozen", "tok/s, ratio [95%]",
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
                f"{length(ours):.2f} | {length(theirs):.2f} | {ratio} |"
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
    print("\n".join(table(pairs, domains)))
    print(f"drafted rounds a second, learning over frozen: {steps}")
    print(f"same text: {same} of {len(texts_of)}; tokens a second, learning over frozen: {ratio}; {ended}")
    document = {
        "settings": {key: str(value) for key, value in vars(args).items()},
        "machine": machine(()),
        "versions": versions(),
        "ended": ended,
        "pairs": [asdict(pair) for pair in pairs],
    }
    args.out.with_suffix(".json").write_text(json.dumps(document, indent=1, default=str))
    draw(pairs, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
