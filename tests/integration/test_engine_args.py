"""Engine arguments of vLLM's own, on engines that run: they have their effect, and the tokens stay the same."""

import pytest
import torch

from tests.support.cluster.serving import TARGET_ENGINE_ARGS, drafted, engine, num_accepted

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = b"Blocks of sixty-four tokens are what this prompt is cached in, so one of its two is found again. " + b"." * 8
NUM_TOKENS = 32


def test_a_target_runs_with_them_and_answers_the_same(ngram_pair):
    """vLLM's blocks have 128 tokens on CPU: of a prompt of this length it would find nothing again."""
    block_size = TARGET_ENGINE_ARGS["block_size"]
    assert block_size < len(PROMPT) < 2 * block_size
    answers = [ngram_pair.client.generate(list(PROMPT), temperature=0.0, max_tokens=NUM_TOKENS) for _ in range(2)]
    for answer in answers:
        ngram_pair.reference.check(PROMPT, answer.token_ids, label="engine arguments")
    assert [answer.usage.cached_tokens for answer in answers] == [0, block_size]


@pytest.mark.exhaustive
@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's CPU attention reads fp8 by AVX-512 or AMX")
def test_an_fp8_kv_cache_gives_what_plain_vllm_gives_with_one(deployments, models, plain_vllm):
    """Drafts and plain steps write the same rounded keys and values."""
    given = {"kv_cache_dtype": "fp8"}
    deployments.add(
        "fp8_kv",
        {
            "target": engine(models.target, engine_args=given),
            "drafter": {"method": "draft_model", **engine(models.drafter)},
            "speculation": {"num_speculative_tokens": 4, "adaptive": False},
        },
    )
    fp8_kv = deployments.use("fp8_kv")
    (expected,), (full,) = plain_vllm([PROMPT], NUM_TOKENS, **given), plain_vllm([PROMPT], NUM_TOKENS)
    assert expected != full, "fp8 has no effect on this text, and the test none"
    for speculation in (True, False):

        def ask(speculation=speculation):
            answer = fp8_kv.client.generate(
                list(PROMPT), temperature=0.0, max_tokens=NUM_TOKENS, speculation=speculation
            )
            assert list(answer.token_ids) == expected, f"{speculation=}"
            return answer

        drafted(ask, num_accepted) if speculation else ask()
