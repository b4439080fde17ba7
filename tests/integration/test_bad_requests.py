"""Requests that cannot be served: refused with the field and the fix, and the server goes on."""

import math

import grpc
import pytest

from outrider.deploy.client.sync_client import OutriderError
from tests.support.cluster.serving import HANG_GUARD_S, MAX_MODEL_LEN, K, wait_until_idle

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = list(b"good")

BAD = {
    "prompt that leaves no room": ([65] * MAX_MODEL_LEN, {}, "prompt"),
    "unknown model": (PROMPT, {"model": "gpt-17"}, "model"),
    "NaN temperature": (PROMPT, {"temperature": math.nan}, "sampling.temperature"),
    "regex that does not parse": (PROMPT, {"regex": "[a"}, "sampling.structured_outputs.regex"),
    "K over the limit": (PROMPT, {"num_speculative_tokens": K + 1}, "speculation.num_speculative_tokens"),
    "text that no tokens could spell": ("a" * 1_000_000, {}, "prompt"),
    "words forbidden that are the only ones allowed": (
        PROMPT,
        {"allowed_token_ids": [97], "bad_words": ["a"]},
        "sampling.allowed_token_ids",
    ),
}
"""One of each kind, by whoever finds it: the ingress, vLLM, the compilers of grammars. The table is in tests/unit."""


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused_by_field_and_the_server_goes_on(ngram_pair, case):
    """Every second one is asked for as a stream."""
    prompt, options, field = BAD[case]
    streaming = list(BAD).index(case) % 2 == 1

    def ask():
        return (
            list(ngram_pair.client.stream(prompt, **options))
            if streaming
            else ngram_pair.client.generate(prompt, **options)
        )

    with pytest.raises(OutriderError) as caught:
        ask()
    error = caught.value
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT, error
    assert error.message.startswith(f"{field}"), error
    assert ";" in error.message, "the fix comes after the problem"
    assert "Traceback" not in error.message
    assert "\n" not in error.message
    answer = ngram_pair.client.generate(PROMPT, temperature=0.0, max_tokens=4)
    ngram_pair.reference.check(PROMPT, answer.token_ids, label=case)
    wait_until_idle(ngram_pair, HANG_GUARD_S)


@pytest.mark.parametrize("room", [1, 40])
def test_an_answer_ends_where_the_model_s_length_does(ngram_pair, room):
    prompt = [65 + i % 26 for i in range(MAX_MODEL_LEN - room)]
    answer = ngram_pair.client.generate(prompt, temperature=0.0, ignore_eos=True)
    assert answer.usage.total_tokens == MAX_MODEL_LEN
    ngram_pair.reference.check(prompt, answer.token_ids, label=f"room for {room}")
