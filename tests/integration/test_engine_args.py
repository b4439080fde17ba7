"""Engine arguments of vLLM's own, on engines that run: they have their effect, and the tokens stay the same."""

import pytest

from tests.serving import TARGET_ENGINE_ARGS

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
