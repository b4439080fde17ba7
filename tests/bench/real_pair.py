"""What parts of Outrider are worth on real models, or another tree's code: servers that answer the same prompts in
turns.

    python -m tests.bench.real_pair --target T --drafter D --dataset HumanEval.jsonl.gz --without lengths
    python -m tests.bench.real_pair ... --old-tree ../before --pairs 10 --concurrency 1,8

A and the others are as in tests.bench.ablation. In each turn all answer the same prompts, which no turn before had; a
ratio is A's speed over the other's, with its 95% interval over the turns.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.deploy.client.sync_client import OutriderClient
from outrider.deploy.distill.prompts import read_prompts, spread
from outrider.v1 import generation_pb2 as pb
from tests.bench.ablation import add_contenders, contenders, merged
from tests.bench.emulated_speed import environment, numbers, working_directory
from tests.bench.emulation import served
from tests.bench.emulation.paired import Interval, ratio_of_pairs

COUNTS = (
    "rounds", "drafted_rounds", "drafted", "accepted", "late_rounds", "main_line_hits", "side_branch_hits", "misses"
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One side's answers to one pair's prompts."""

    tokens: int
    seconds: float
    counts: dict[str, int]
    """The verifier's counts over the turn."""

    texts: list[str]

    drafted: list[int]
    """Draft tokens for each text."""

    accepted: list[int]


@dataclass(frozen=True)
class Compared:
    b_is: str
    concurrency: int
    ratio: Interval
    a: list[Turn]
    b: list[Turn]


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
    drafts = [answer.metrics.speculative_decoding for answer in answers]
    return Turn(
        tokens, seconds, counts, [answer.text for answer in answers],
        [of.num_draft_tokens for of in drafts], [of.num_accepted_draft_tokens for of in drafts],
    )  # fmt: skip


def line(c: Compared) -> str:
    sides = (c.a, c.b)
    speed = (sum(t.tokens for t in of) / sum(t.seconds for t in of) for of in sides)
    total = [{name: sum(t.counts[name] for t in of) for name in COUNTS} for of in sides]
    length = (1 + of["accepted"] / max(of["rounds"], 1) for of in total)
    hits = (
        " / ".join(f"{100 * of[name] / max(of['drafted_rounds'], 1):.0f}" for name in COUNTS[-3:]) for of in total
    )  # fmt: skip
    same = sum(x == y for a, b in zip(c.a, c.b, strict=True) for x, y in zip(a.texts, b.texts, strict=True))
    asked = sum(len(t.texts) for t in c.a)
    cells = (
        c.b_is, c.concurrency, len(c.a), c.ratio, ", ".join(f"{value:.2f}" for value in speed),
        ", ".join(f"{value:.2f}" for value in length), *hits, f"{same} of {asked}",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


COLUMNS = (
    "B",
    "concurrency",
    "pairs",
    "A/B [95%]",
    "tok/s A, B",
    "tokens a round",
    "main/side/miss % A",
    "B",
    "same text",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--dataset", type=Path, required=True, help="JSONL with a field prompt, .gz or not")
    add_contenders(parser)
    parser.add_argument("--concurrency", type=numbers, default=[1])
    parser.add_argument("--pairs", type=numbers, default=[8], help="one number, or one for each concurrency")
    parser.add_argument("--prompts", type=int, default=2, help="a turn, times the concurrency")
    parser.add_argument("--max-tokens", type=numbers, default=[48], help="one number, or one for each concurrency")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--k", type=int, default=4, help="num_speculative_tokens, where --a and --b say nothing else")
    parser.add_argument("--out", type=Path, help="every turn as JSON")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for name, found in (("--max-tokens", args.max_tokens), ("--pairs", args.pairs)):
        if len(found) not in (1, len(args.concurrency)):
            parser.error(f"{name}: one number, or as many as --concurrency has")
    lengths, num_pairs = (of * (len(args.concurrency) if len(of) == 1 else 1) for of in (args.max_tokens, args.pairs))
    cells = list(zip(args.concurrency, lengths, num_pairs, strict=True))
    servers = contenders(parser, args)
    engine = {"dtype": args.dtype, "max_model_len": 2048, "kv_cache_memory_bytes": 1 << 29}
    common = {
        "target": {"model": args.target, **engine},
        "drafter": {"method": "draft_model", "model": args.drafter, **engine},
        "speculation": {"num_speculative_tokens": args.k},
        "serving": {"gateway": {"grpc_port": 0, "http_port": 0}},
        "link": {"round_deadline_ms": 2000, "link_deadline_ms": 10000},
    }
    said = [f"{server.name}: {server.sections or 'as by default'} {server.tree or ''}" for server in servers]
    print("\n".join([*said, f"{common}", f"{environment()}"]), flush=True)
    done: list[Compared] = []
    with working_directory(None) as directory, contextlib.ExitStack() as stack:
        clients: dict[str, OutriderClient] = {}
        for server in servers:
            config = merged(common, server.sections)
            clients[server.name] = stack.enter_context(served.serving(config, directory, server.name, server.tree))
            served.wait_until_drafting(clients[server.name], max(args.concurrency))
        print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
        turns = sum(concurrency * args.prompts * (pairs + 1) for concurrency, _, pairs in cells)
        texts = iter([prompt.text for prompt in spread(read_prompts(args.dataset).prompts, turns)])
        for concurrency, max_tokens, pairs in cells:
            found: dict[str, list[Turn]] = {name: [] for name in clients}
            for pair in range(pairs + 1):
                asked = list(itertools.islice(texts, concurrency * args.prompts))
                if len(asked) < concurrency * args.prompts:
                    raise SystemExit(f"--dataset: {turns} prompts are needed for so many pairs")
                for name, client in clients.items():
                    turn = answer(client, asked, concurrency, max_tokens, [args.temperature])
                    if pair:  # the first is to warm up, and to learn from
                        found[name].append(turn)
            speeds = {name: [turn.tokens / turn.seconds for turn in of] for name, of in found.items()}
            for name in [name for name in clients if name != "a"]:
                ratio = ratio_of_pairs(speeds["a"], speeds[name])
                done.append(Compared(name, concurrency, ratio, found["a"], found[name]))
                print(line(done[-1]), flush=True)
            if args.out:
                document = {"settings": vars(args), "cells": [asdict(compared) for compared in done]}
                args.out.write_text(json.dumps(document, indent=1, default=str))


if __name__ == "__main__":
    main()
