"""Without a drafter steps overlap: all that a choice depends on, for requests that come, wait and go, is as where each
step is read before the next."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.test_sampling_parameters import EOS, GREEDY, PROMPT, SAMPLED, SCHEMA
from tests.support.cluster.serving import HANG_GUARD_S, wait_until_idle

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ASKED = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "penalties": {**SAMPLED, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "penalties, greedy": {**GREEDY, "repetition_penalty": 5.0},
    "bad words": {**SAMPLED, "allowed_token_ids": list(range(97, 101)), "bad_words": ["ab", "ca", "d"]},
    "min tokens": {**SAMPLED, "logit_bias": {EOS: 6.0}, "ignore_eos": False, "min_tokens": 9},
    "stop": {**SAMPLED, "logit_bias": {EOS: 3.0}, "ignore_eos": False},
    "logprobs": {**SAMPLED, "logprobs": 3, "prompt_logprobs": 1},
    "json": {**SAMPLED, "json_schema": SCHEMA, "ignore_eos": False},
    "regex": {**GREEDY, "regex": r"[a-e]{1,20}", "min_tokens": 10, "ignore_eos": False},
    "one token": {**SAMPLED, "max_tokens": 1},
    "three answers": {**SAMPLED, "n": 3, "presence_penalty": 1.0},
    "constraints": {**SAMPLED, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
}


def ask(deployment, name):
    """All that an answer says."""
    answer = deployment.client.generate(
        PROMPT, speculation=False, **{"max_tokens": 48, "ignore_eos": True, **ASKED[name]}
    )
    return [
        (
            list(completion.token_ids),
            completion.text,
            completion.finish_reason,
            [(entry.token_id, pytest.approx(entry.logprob, abs=1e-3), len(entry.top)) for entry in completion.logprobs],
        )
        for completion in answer.completions
    ]


@pytest.fixture(scope="module")
def expected(deployments):
    """Answers of a deployment whose steps do not overlap, one at a time."""
    pair = deployments.use("pair")
    return {name: ask(pair, name) for name in ASKED}


@pytest.mark.parametrize("name", ASKED)
def test_alone(expected, no_drafter, name):
    assert ask(no_drafter, name) == expected[name]


def test_all_at_once_while_others_come_and_go(expected, no_drafter):
    names = [*ASKED] * 4
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda name: ask(no_drafter, name), names))
    for name, answer in zip(names, answers, strict=True):
        assert answer == expected[name], name
    wait_until_idle(no_drafter, HANG_GUARD_S)
