"""Tests that co-located heads which no guide in guides/test_guides.py has give the target's own greedy tokens."""

import pytest

from tests.support.models import tiny_heads
from tests.support.models.offline_llm import run_jobs
from tests.support.models.reference import Reference

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("one_thread"),
]

NUM_TOKENS = 40
PROMPTS = [list(b"Hello world, this is"), list(b"one two one two one two one two one two")]
METHODS = ("medusa", "dflash")
"""Their heads are tiny and random: what they draft is seldom right."""


def test_greedy_tokens_are_those_of_the_target_alone(models, tmp_path):
    def job(method):
        head = getattr(tiny_heads, f"build_{method}")(tmp_path / method)
        return {
            "arguments": {
                "model": str(models.target), "dtype": "float32", "enforce_eager": True, "max_model_len": 256,
                "max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20,
                "speculative_config": {"method": method, "model": str(head), "num_speculative_tokens": 3},
            },
            "prompts": PROMPTS,
            "params": {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True},
        }  # fmt: skip

    reference = Reference(models.target)
    for method, found in zip(METHODS, run_jobs([job(method) for method in METHODS]), strict=True):
        assert "error" not in found, f"{method}: {found}"
        for prompt, answer in zip(PROMPTS, found["tokens"], strict=True):
            reference.check(prompt, answer, label=method)
        assert found["counters"]["vllm:spec_decode_num_drafts"] > 0, method
