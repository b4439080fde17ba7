"""Several verified paths of a draft tree: the tokens are those of a run without speculation, and paths really ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.models.offline_llm import run_jobs
from tests.support.models.tiny_models import build_one_pass, build_tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.usefixtures("one_thread")]

MAX_MODEL_LEN = 192
BLOCK = 128
"""Tokens of a KV block of the target, on CPU."""

BLOCK_BYTES = 2 * 2 * 2 * BLOCK * 32 * 4
"""Of keys and values, 2 layers, 2 heads of 32 float32 numbers."""

GREEDY, SEEDED = {"temperature": 0.0, "max_tokens": 64}, {"temperature": 1.0, "seed": 7, "max_tokens": 64}
TWO_ANSWERS = {**SEEDED, "n": 2, "presence_penalty": 0.5, "min_p": 0.02, "max_tokens": 24}


def prompts(count: int) -> list[list[int]]:
    """Lengths around the end of a block, and long enough to reach the end of the model's context; a quarter twice."""
    made = [list(b"%03d the future of %d is " % (n, n * n)) + [97 + n % 7] * (90 + n % 60) for n in range(count)]
    return [*made, *made[: count // 4]]


def job(models: Any, drafter: Path | None, count: int, **arguments: Any) -> dict[str, Any]:
    engine = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "kv_cache_memory_bytes": 32 << 20}
    if drafter is not None:
        arguments["speculative_config"] = {
            "method": "draft_model",
            "model": str(drafter),
            "num_speculative_tokens": 4,
            "kv_cache_memory_bytes": 16 << 20,
            "num_paths": 4,
            "adaptive": False,
        }
    return {
        "arguments": {**engine, "model": str(models.target), **arguments},
        "prompts": prompts(count),
        "params": GREEDY,
        "further": [SEEDED, TWO_ANSWERS],
    }


VARIANTS = {
    "one rank": (40, {}),
    "200 prompts": (160, {}),
    "two ranks": (40, {"tensor_parallel_size": 2}),
    "KV for fewer requests than run": (64, {"max_num_seqs": 64, "kv_cache_memory_bytes": 40 * BLOCK_BYTES}),
}


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.exhaustive] if name != "one rank" else []) for name in VARIANTS]
)
def test_tokens_are_those_of_a_run_without_speculation(variant: str, models: Any, tmp_path: Path) -> None:
    count, arguments = VARIANTS[variant]
    worse = build_tiny_llama(tmp_path / "worse", noise_of=models.target, noise=0.1)
    drafter = build_one_pass(tmp_path / "one-pass", worse)
    plain, found = run_jobs([job(models, None, count), job(models, drafter, count, **arguments)])
    rounds = found["rounds"]
    assert rounds["path_rounds"] > 100, rounds
    assert rounds["path_rows"] > rounds["path_rounds"], "a request had two further paths at once"
    assert rounds["path_tokens"] > 20, "paths beside the main line were accepted"
    assert found["tokens"] == plain["tokens"]
    assert found["further"] == plain["further"]
