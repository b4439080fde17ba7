"""Requests that cannot be served: refused with the field and the fix, and the server goes on."""

import math

import grpc
import pytest

from outrider.deploy.client.sync_client import OutriderError
from tests.serving import MAX_MODEL_LEN, K, is_idle
from tests.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = list(b"good")

BAD = {
    "empty text": ("", {}, "prompt"),
    "no token ids": ([], {}, "prompt"),
    "prompt over max_model_len": ([65] * (MAX_MODEL_LEN + 1), {}, "prompt"),
    "prompt that leaves no room": ([65] * MAX_MODEL_LEN, {}, "prompt"),
    "text over max_model_len": ("a" * 5000, {}, "prompt"),
    "id out of vocabulary": ([1, VOCAB_SIZE], {}, "token_ids"),
    "id far out of vocabulary": ([2**32 - 1], {}, "token_ids"),
    "unknown model": (PROMPT, {"model": "gpt-17"}, "model"),
    "negative temperature": (PROMPT, {"temperature": -0.1}, "sampling.temperature"),
    "NaN temperature": (PROMPT, {"temperature": math.nan}, "sampling.temperature"),
    "infinite temperature": (PROMPT, {"temperature": math.inf}, "sampling.temperature"),
    "negative top_p": (PROMPT, {"top_p": -0.5}, "sampling.top_p"),
    "zero top_p": (PROMPT, {"top_p": 0.0}, "sampling.top_p"),
    "NaN top_p": (PROMPT, {"top_p": math.nan}, "sampling.top_p"),
    "negative top_k": (PROMPT, {"top_k": -2}, "sampling.top_k"),
    "NaN min_p": (PROMPT, {"min_p": math.nan}, "sampling.min_p"),
    "min_p over 1": (PROMPT, {"min_p": 1.1}, "sampling.min_p"),
    "no answers wanted": (PROMPT, {"n": 0}, "sampling.n"),
    "greedy answers all the same": (PROMPT, {"n": 2, "temperature": 0.0}, "sampling.n"),
    "too many logprobs": (PROMPT, {"logprobs": 21}, "sampling.logprobs"),
    "too many prompt logprobs": (PROMPT, {"prompt_logprobs": 21}, "sampling.prompt_logprobs"),
    "empty bad word": (PROMPT, {"bad_words": [""]}, "sampling.bad_words"),
    "allowed id out of vocabulary": (PROMPT, {"allowed_token_ids": [VOCAB_SIZE]}, "sampling.allowed_token_ids"),
    "biased id out of vocabulary": (PROMPT, {"logit_bias": {VOCAB_SIZE: 1.0}}, "sampling.logit_bias"),
    "schema that is not JSON": (PROMPT, {"json_schema": "{"}, "sampling.structured_outputs.json"),
    "schema of no known type": (PROMPT, {"json_schema": {"type": 5}}, "sampling.structured_outputs.json"),
    "regex that does not parse": (PROMPT, {"regex": "[a"}, "sampling.structured_outputs.regex"),
    "grammar that does not parse": (PROMPT, {"grammar": "root ::= ("}, "sampling.structured_outputs.grammar"),
    "nothing to choose from": (PROMPT, {"choice": []}, "sampling.structured_outputs.choice"),
    "grammar with rejection": (
        PROMPT,
        {"regex": "a+", "verification": "rejection"},
        "speculation.verification",
    ),
    "negative repetition penalty": (PROMPT, {"repetition_penalty": -1.0}, "sampling.repetition_penalty"),
    "NaN presence penalty": (PROMPT, {"presence_penalty": math.nan}, "sampling.presence_penalty"),
    "NaN frequency penalty": (PROMPT, {"frequency_penalty": math.nan}, "sampling.frequency_penalty"),
    "no tokens wanted": (PROMPT, {"max_tokens": 0}, "sampling.max_tokens"),
    "min_tokens over max_tokens": (PROMPT, {"min_tokens": 9, "max_tokens": 8}, "sampling.min_tokens"),
    "empty stop string": (PROMPT, {"stop": [""]}, "sampling.stop"),
    "stop id out of vocabulary": (PROMPT, {"stop_token_ids": [VOCAB_SIZE]}, "sampling.stop_token_ids"),
    "min_tokens over max_model_len": (PROMPT, {"min_tokens": MAX_MODEL_LEN}, "sampling.min_tokens"),
    "K = 0": (PROMPT, {"num_speculative_tokens": 0}, "speculation.num_speculative_tokens"),
    "K over the limit": (PROMPT, {"num_speculative_tokens": K + 1}, "speculation.num_speculative_tokens"),
    "chat template for token ids": (PROMPT, {"apply_chat_template": True}, "apply_chat_template"),
    "request id too long": (PROMPT, {"request_id": "x" * 129}, "request_id"),
    "text that no tokens could spell": ("a" * 1_000_000, {}, "prompt"),
    "request id with spaces": (PROMPT, {"request_id": "a b"}, "request_id"),
    "request id beyond ASCII": (PROMPT, {"request_id": "Öl"}, "request_id"),
    "repetition penalty beyond float32": (PROMPT, {"repetition_penalty": 1e308}, "sampling.repetition_penalty"),
    "words forbidden that are the only ones allowed": (
        PROMPT,
        {"allowed_token_ids": [97], "bad_words": ["a"]},
        "sampling.allowed_token_ids",
    ),
}


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused_by_field_and_the_server_goes_on(ngram_pair, case, streaming):
    prompt, options, field = BAD[case]

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


def test_nothing_of_them_is_left(ngram_pair):
    assert is_idle(ngram_pair.status())


def test_the_longest_prompt_there_is_room_for_is_served(ngram_pair):
    prompt = [65 + i % 26 for i in range(MAX_MODEL_LEN - 1)]
    answer = ngram_pair.client.generate(prompt, temperature=0.0)
    assert answer.usage.total_tokens == MAX_MODEL_LEN
    ngram_pair.reference.check(prompt, answer.token_ids, label="longest prompt")
