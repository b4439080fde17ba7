"""Runs whole steps of the drafter's engine on the virtual GPU: `python -m tests.cuda_build.draft_steps MODEL`.

Every draw is greedy and compared with Transformers' model on the CPU. Prints a line of JSON for each variant.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

REFERENCE = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)  # on PyTorch as it is

from tests.cuda_build import h100  # noqa: F401 - before vLLM, which is then imported on the virtual GPU
from tests.cuda_build.virtual_gpu import GPU, no_engine_left
from tests.draft_engine_rounds import GraphHits

from outrider.actors.drafter.draft_model import DraftModelProposer
from outrider.actors.drafter.engine import Draw, StepPlan, StepRow
from outrider.actors.drafter.load import warm_up
from outrider.actors.drafter.planner import LookaheadLimits
from outrider.actors.vllm_adapter.draft_engine import DraftEngine
from outrider.actors.vllm_adapter.engine_args import drafter_vllm_config
from outrider.cluster.config import DraftModelConfig
from outrider.cluster.link.messages import DraftSampling

VARIANTS: dict[str, dict[str, Any]] = {
    "FlashAttention 3, bf16, graphs": {"dtype": "bfloat16", "attention_backend": "FLASH_ATTN", "graphs": True},
    "FlashAttention 3, fp8 KV, graphs": {
        "dtype": "bfloat16", "attention_backend": "FLASH_ATTN", "kv_cache_dtype": "fp8", "graphs": True,
    },
    "Triton attention, float32": {"dtype": "float32", "attention_backend": "TRITON_ATTN"},
    "Triton attention, fp8 KV": {"dtype": "bfloat16", "attention_backend": "TRITON_ATTN", "kv_cache_dtype": "fp8"},
}  # fmt: skip

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "fp8": 2.0}
"""By how much the logit of a drawn token may be below the best one of the reference."""

MAX_ROWS, NUM_BLOCKS = 12, 96


def engine_of(model: str, dtype: str, graphs: bool = False, **engine_args: Any) -> DraftEngine:
    if graphs:
        engine_args["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    config = DraftModelConfig(
        method="draft_model",
        model=model,
        dtype=dtype,
        max_model_len=128,
        max_num_seqs=4,
        max_draft_rows=MAX_ROWS,
        max_num_batched_tokens=64,
        engine_args={
            "enable_prefix_caching": False,
            "enforce_eager": not graphs,
            "num_gpu_blocks_override": NUM_BLOCKS,
            **engine_args,
        },
    )
    vllm_config = drafter_vllm_config(config, None, None)
    return DraftEngine(vllm_config, in_process=True)


class Texts:
    """Sequences whose KV blocks are chosen here, and what the reference says of each."""

    def __init__(self, engine: DraftEngine, reference: Any, tolerance: float) -> None:
        self._engine, self._reference, self._tolerance = engine, reference, tolerance
        self._free = list(range(1, NUM_BLOCKS))
        self._size = engine.block_sizes[0]
        self.draws, self.problems = 0, []

    def text(self, tokens: list[int], fed: int = 0, blocks: list[int] | None = None) -> dict[str, Any]:
        if blocks is None:
            blocks = [self._free.pop(0) for _ in range(-(-80 // self._size))]
        return {"tokens": tokens, "fed": fed, "blocks": blocks}

    def branch(self, of: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[int, int]]]:
        """A text with a copy of its last block."""
        last = (of["fed"] - 1) // self._size
        blocks = [*of["blocks"][:last], *(self._free.pop(0) for _ in of["blocks"][last:])]
        made = self.text(of["tokens"][: of["fed"]], of["fed"], blocks)
        return made, [(of["blocks"][last], blocks[last])]

    def step(self, name: str, feeds: list[tuple[dict[str, Any], int, bool]], copies: Any = ()) -> None:
        """feeds: a text, how many of its next tokens are fed, and whether the token after them is drawn."""
        rows = []
        for text, count, draws in feeds:
            start, end = text["fed"], text["fed"] + count
            each = [Draw(DraftSampling(), end, start, alternatives=2)] if draws else []
            rows.append(StepRow(text["tokens"][start:end], start, (text["blocks"],), each))
            text["fed"] = end
        drawn = self._engine.run(StepPlan(rows, copies=list(copies)))
        for (text, _, draws), found in zip(feeds, drawn, strict=True):
            if not draws:
                continue
            logits = self._reference(torch.tensor([text["tokens"][: text["fed"]]])).logits[0, -1]
            gap = float(logits.max() - logits[found[0].token])
            self.draws += 1
            if gap > self._tolerance:
                self.problems.append(f"{name}: {found[0].token}, whose logit is {gap:.3f} below the best")
            text["tokens"] = [*text["tokens"][: text["fed"]], found[0].token]


def run_steps(texts: Texts) -> None:
    rng = random.Random(5)

    def words(count: int) -> list[int]:
        return [rng.randrange(32, 127) for _ in range(count)]

    long = texts.text(words(40))
    texts.step("a chunk of a prompt, without a draw", [(long, 24, False)])
    several = [texts.text(words(count)) for count in (3, 5, 17, 16, 1, 9, 30)]
    texts.step(
        "prompts beside the rest of one",
        [(long, 16, True), *((each, len(each["tokens"]), True) for each in several[:3])],
    )
    texts.step(
        "prompts beside a token each",
        [(each, len(each["tokens"]) - each["fed"], True) for each in [long, *several[:5]]],
    )
    rows = [long, *several[:5]]
    for count in (6, 3, 1, 5, 4, 6):
        texts.step(f"{count} rows of one token", [(each, 1, True) for each in rows[:count]])
    branch, copies = texts.branch(rows[2])
    branch["tokens"] = [*branch["tokens"], 65]
    texts.step(
        "a branch, whose last block is a copy", [(rows[2], 1, True), (branch, 1, True), (rows[0], 1, True)], copies
    )
    back = rows[1]
    back["tokens"], back["fed"] = [*back["tokens"][: back["fed"] - 2], 70], back["fed"] - 2
    texts.step("back by two tokens", [(back, 1, True), (rows[3], 1, True)])
    texts.step("more tokens than a graph has", [(several[5], 9, True), (several[6], 30, True)])


def main(model: str) -> int:
    """Returns an exit status."""
    wrong = 0
    for name, options in VARIANTS.items():
        if len(sys.argv) > 2 and sys.argv[2] not in name:
            continue
        GPU.launches.clear()
        engine = engine_of(model, **options)
        hits = GraphHits(engine)
        tolerance = TOLERANCE[options.get("kv_cache_dtype", options["dtype"])]
        texts = Texts(engine, REFERENCE, tolerance)
        with torch.inference_mode():
            run_steps(texts)
        if options.get("graphs") and "kv_cache_dtype" not in options:
            # Every way to draw, and side branches, as before a drafter accepts links.
            warm_up(DraftModelProposer(engine, 32, LookaheadLimits(True, 2, MAX_ROWS)), draft_top_n=8)
        graphs = {f"graph {each}": count for each, count in hits.take().items()}
        report = {"variant": name, "tokens": texts.draws, "problems": texts.problems}
        print(json.dumps({**report, "launches": {**GPU.launches, **graphs}}), flush=True)
        wrong += len(texts.problems)
        engine._core.shutdown()
        no_engine_left()
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
