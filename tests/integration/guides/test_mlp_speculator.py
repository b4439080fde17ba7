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


@pytest.fixture(scope="module")
def greedy(models):
    reference = Reference(models.target)
    return [reference.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def job(models, greedy, tmp_path_factory):
    """Makes jobs of the target alone, or with heads that know the greedy answers by heart."""
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, greedy, strict=True)]
    fitted = tiny_heads.fit_mlp_speculator(tmp_path_factory.mktemp("heads") / "fitted", models.target, texts)
    plain = {
        "model": str(models.target),
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 16 << 20,
    }
    guide = {"method": "mlp", "model": str(fitted), "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}

    def make(params, **speculation):
        drafter = {"speculative_config": {**guide, **speculation}} if speculation else {}
        return {"arguments": {**plain, **drafter}, "prompts": PROMPTS, "params": params}

    return make


@pytest.mark.exhaustive
def test_greedy_tokens_are_the_targets_own(job, greedy):
    (found,) = run_jobs([job(GREEDY, adaptive=True)])
    assert "error" not in found, found
    assert found["tokens"] == greedy
    assert found["counters"]["vllm:spec_decode_num_drafts"] > 0
    accepted = found["counters"]["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert min(accepted) > 0, f"heads that know these answers by heart: {accepted}"


@pytest.mark.exhaustive
def test_sampled_tokens_are_the_targets_own_where_coupled_and_drafted_where_rejected(job):
    ways = [job(SEEDED, adaptive=False, verification=way) for way in ("coupled", "rejection")]
    found = run_jobs([job(SEEDED), *ways])
    assert all("error" not in each for each in found), found
    alone, coupled, rejection = found
    assert coupled["tokens"] == alone["tokens"]
    assert [len(tokens) for tokens in rejection["tokens"]] == [NUM_TOKENS] * len(PROMPTS)
    for each in (coupled, rejection):
        assert each["counters"]["vllm:spec_decode_num_drafts"] > 0
