"""Acceptance of every way to verify, on a dataset of prompts: as served, and computed along the same texts.

    outrider serve CONFIG.yaml &
    python tests/bench/acceptance_by_mode.py served --dataset HumanEval.jsonl.gz --out served.json
    (stop the server)
    python tests/bench/acceptance_by_mode.py along served.json --target TARGET --drafter DRAFTER --out along.json
    python tests/bench/acceptance_by_mode.py table served.json along.json

``served`` asks a running server for each prompt in each mode and temperature, and counts what was accepted. ``along``
needs no server: it feeds both models the texts that rejection mode gave (so they are the target's own), and computes at
each token the probability that a draft would have been accepted there: with vLLM's default (the drafter's likeliest
token, one-hot), coupled, and rejection with the drafter's top-n and with its whole distribution. The two agree where
they measure the same, up to sampling noise; ``along`` has far less of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from outrider.deploy.bench.load import read_dataset

MODES = ("rejection", "block", "coupled")
TEMPERATURES = (1.0, 0.7)
TOP_N = (16, 64, 256)
COUPLED_SEEDS = 4


def served(args: argparse.Namespace) -> dict[str, Any]:
    from outrider.deploy.client.sync_client import OutriderClient

    rows = []
    dataset = read_dataset(args.dataset)
    chosen = [dataset.prompts[index] for index in dataset.spread(args.count)]
    with OutriderClient(args.address) as client, ThreadPoolExecutor(len(MODES) * len(TEMPERATURES)) as pool:
        k = client.status().num_speculative_tokens

        def ask(prompt: str, temperature: float, mode: str) -> dict[str, Any]:
            answer = client.generate(
                prompt, temperature=temperature, verification=mode, max_tokens=args.max_tokens, prompt_logprobs=0
            )
            return {
                "mode": mode,
                "temperature": temperature,
                "prompt_token_ids": [entry.token_id for entry in answer.prompt_logprobs],
                "token_ids": list(answer.token_ids),
                "histogram": list(answer.metrics.speculative_decoding.acceptance_histogram),
            }

        for index, prompt in enumerate(chosen):
            started = time.perf_counter()
            kinds = itertools.product(TEMPERATURES, MODES)
            rows += [job.result() for job in [pool.submit(ask, prompt, *kind) for kind in kinds]]
            print(f"{index + 1} of {len(chosen)} prompts, {time.perf_counter() - started:.0f} s", flush=True)
    return {"k": k, "rows": rows}


def per_token(histograms: list[list[int]], k: int) -> tuple[float, float]:
    """Accepted drafts per draft that was decided on (those after a rejection were not), and acceptance length."""
    totals = [sum(column) for column in zip(*histograms, strict=True)]
    accepted = sum(j * count for j, count in enumerate(totals))
    return accepted / max(accepted + sum(totals[:k]), 1), 1 + accepted / max(sum(totals), 1)


def along(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    rows = [row for row in json.loads(args.served.read_text())["rows"] if row["mode"] == "rejection"]
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval() for path in (args.target, args.drafter)
    ]
    sums: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for index, row in enumerate(rows):
            text = torch.tensor([row["prompt_token_ids"] + row["token_ids"]])
            start, end = len(row["prompt_token_ids"]) - 1, text.shape[1] - 1
            target, drafter = (model(text).logits[0, start:end].float() for model in models)
            size = min(target.shape[1], drafter.shape[1])
            found = acceptances(target[:, :size], drafter[:, :size], row["temperature"], start + 1)
            total = sums.setdefault(str(row["temperature"]), {})
            for name, value in {**found, "tokens": float(end - start)}.items():
                total[name] = total.get(name, 0.0) + value
            print(f"{index + 1} of {len(rows)} texts", flush=True)
    return {t: {n: v if n == "tokens" else v / total["tokens"] for n, v in total.items()} for t, total in sums.items()}


def acceptances(target: Any, drafter: Any, temperature: float, position: int) -> dict[str, float]:
    """Sums over the rows of the probability that a draft is accepted. target, drafter: float32 [R, V] logits."""
    import torch

    from outrider.actors.verification.coupled import coupled_choice

    p, q = (target / temperature).softmax(-1), (drafter / temperature).softmax(-1)
    found = {"one-hot": p.gather(1, drafter.argmax(-1, keepdim=True)).sum(), "full q": torch.minimum(p, q).sum()}
    for n in TOP_N:
        kept, ids = q.topk(n, dim=-1)
        found[f"top-{n}"] = torch.minimum(p.gather(1, ids), kept / kept.sum(-1, keepdim=True)).sum()
    places = torch.arange(position, position + len(p))
    heat = torch.full((len(p),), temperature)
    same = torch.zeros(())
    for seed in range(COUPLED_SEEDS):
        seeds = torch.full((len(p),), seed + 1)
        ours, theirs = (coupled_choice(x, heat, None, x.amax(-1), seeds, places) for x in (target, drafter))
        same += (ours == theirs).sum()
    found["coupled"] = same / COUPLED_SEEDS
    return {name: float(value) for name, value in found.items()}


def table(args: argparse.Namespace) -> None:
    data, computed = json.loads(args.served.read_text()), json.loads(args.along.read_text())
    print("As served:\n\n| T | mode | answers | tokens | per-token acceptance | acceptance length |")
    print("|---|---|---|---|---|---|")
    for temperature in TEMPERATURES:
        for mode in MODES:
            rows = [row for row in data["rows"] if (row["mode"], row["temperature"]) == (mode, temperature)]
            rate, length = per_token([row["histogram"] for row in rows], data["k"])
            tokens = sum(len(row["token_ids"]) for row in rows)
            print(f"| {temperature:g} | {mode} | {len(rows)} | {tokens} | {rate:.3f} | {length:.2f} |")
    columns = ["one-hot", "coupled", *(f"top-{n}" for n in TOP_N), "full q"]
    print(f"\nAlong the texts:\n\n| T | tokens | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 2)}")
    for temperature, values in computed.items():
        shown = " | ".join(f"{values[name]:.3f}" for name in columns)
        print(f"| {float(temperature):g} | {values['tokens']:.0f} | {shown} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("served")
    command.add_argument("--dataset", type=Path, required=True, help="JSONL, gzipped or not, with a field prompt")
    command.add_argument("--address", default="127.0.0.1:9000")
    command.add_argument("--count", type=int, default=12, help="prompts, evenly spread over the dataset")
    command.add_argument("--max-tokens", type=int, default=128)
    command.add_argument("--out", type=Path, required=True)
    command = commands.add_parser("along")
    command.add_argument("served", type=Path)
    for name in ("--target", "--drafter"):
        command.add_argument(name, required=True, help="checkpoint directory")
    command.add_argument("--out", type=Path, required=True)
    command = commands.add_parser("table")
    command.add_argument("served", type=Path)
    command.add_argument("along", type=Path)
    args = parser.parse_args()
    if args.command == "table":
        table(args)
    else:
        args.out.write_text(json.dumps(served(args) if args.command == "served" else along(args)))


if __name__ == "__main__":
    main()
