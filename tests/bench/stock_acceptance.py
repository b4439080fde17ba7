"""What stock vLLM's own ``draft_model`` accepts of a drafter's drafts, for the prompts that `outrider acceptance` asks.

    python -m tests.bench.stock_acceptance TARGET DRAFTER --dataset F --limit 40 --k 3 --max-tokens 96

Nothing of Outrider runs in the engine. Hold it against `outrider acceptance TARGET DRAFTER --draft-vocab-size 0` with
the same options, which measures the whole output head, as vLLM uses it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.deploy.distill import models
from outrider.deploy.distill.prompts import read_prompts, spread, tokens_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    from vllm import LLM, SamplingParams

    prompts = spread(read_prompts(args.dataset).prompts, args.limit)
    room = 2048 - args.max_tokens
    tokens = tokens_of(prompts, models.load_tokenizer(args.target), room, False, "lower --max-tokens", "--dataset")
    engine = LLM(
        str(args.target), dtype=args.dtype, max_model_len=2048, kv_cache_memory_bytes=1 << 29, enforce_eager=True,
        enable_prefix_caching=False, per_request_spec_decode_metrics="summary",
        speculative_config={
            "method": "draft_model", "model": str(args.drafter), "num_speculative_tokens": args.k,
        },
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    answers = [output.outputs[0] for output in engine.generate([{"prompt_token_ids": ids} for ids in tokens], params)]
    counted = [answer.spec_decode_metrics.to_dict() for answer in answers]
    drafted = sum(each["num_draft_tokens"] for each in counted)
    accepted = sum(each["num_accepted_draft_tokens"] for each in counted)
    said = sum(len(answer.token_ids) for answer in answers)
    print(f"{len(answers)} answers, {said} tokens: {accepted} of {drafted} drafts accepted, {accepted / drafted:.3f}")


if __name__ == "__main__":
    main()
