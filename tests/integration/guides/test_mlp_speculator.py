"""An MLP speculator, as the guides to it write, drafts in the verifier's process: the tokens are the target's own."""

from __future__ import annotations

import pytest

from tests.support.models import tiny_heads
from tests.support.models.offline_llm import run_jobs
from tests.support.models.reference import Reference

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.usefixtures("one_thread")]

PROMPTS = [list(b"The future of AI is"), list(b"one two one two one two one two")]
NUM_TOKENS = 32
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
SEEDED = {**GREEDY, "temperature": 0.8, "top_p": 0.9, "seed": 11}


def test_tokens_are_the_targets_own_in_every_way_to_verify(models, tmp_path):
    reference = Reference(models.target)
    greedy = [reference.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, greedy, strict=True)]
    fitted = tiny_heads.fit_mlp_speculator(tmp_path / "fitted", models.target, texts)
    plain = {
        "model": str(models.target),
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 16 << 20,
    }
    guide = {"method": "mlp", "model": str(fitted), "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}

    def job(params, **speculation):
        drafter = {"speculative_config": {**guide, **speculation}} if speculation else {}
        return {"arguments": {**plain, **drafter}, "prompts": PROMPTS, "params": params}

    found = run_jobs(
        [
            job(GREEDY, adaptive=True),
            job(SEEDED),
            job(SEEDED, adaptive=False, verification="coupled"),
            job(SEEDED, adaptive=False, verification="rejection"),
        ]
    )
    assert all("error" not in each for each in found), found
    drafted, alone, coupled, rejection = found
    assert drafted["tokens"] == greedy
    accepted = drafted["counters"]["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert min(accepted) > 0, f"heads that know these answers by heart: {accepted}"
    assert coupled["tokens"] == alone["tokens"]
    assert [len(tokens) for tokens in rejection["tokens"]] == [NUM_TOKENS] * len(PROMPTS)
    for each in (drafted, coupled, rejection):
        assert each["counters"]["vllm:spec_decode_num_drafts"] > 0
