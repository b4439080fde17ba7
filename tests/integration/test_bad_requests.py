"""Requests that cannot be served: refused with the field and the fix, and the server goes on."""

import math

import grpc
import pytest

from deploy.client import OutriderError
from tests.serving import MAX_MODEL_LEN, K, is_idle
from tests.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]

PROMPT = list(b"good")

BAD = {
    "empty text": ("", {}, "text"),
    "no token ids": ([], {}, "token_ids"),
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
    "min_p with a drafter": (PROMPT, {"min_p": 0.1}, "sampling.min_p"),
    "negative repetition penalty": (PROMPT, {"repetition_penalty": -1.0}, "sampling.repetition_penalty"),
    "NaN presence penalty": (PROMPT, {"presence_penalty": math.nan}, "sampling.presence_penalty"),
    "NaN frequency penalty": (PROMPT, {"frequency_penalty": math.nan}, "sampling.frequency_penalty"),
    "no tokens wanted": (PROMPT, {"max_tokens": 0}, "sampling.max_tokens"),
    "min_tokens over max_tokens": (PROMPT, {"min_tokens": 9, "max_tokens": 8}, "sampling.min_tokens"),
    "empty stop string": (PROMPT, {"stop": [""]}, "sampling.stop"),
    "stop id out of vocabulary": (PROMPT, {"stop_token_ids": [VOCAB_SIZE]}, "sampling"),
    "K = 0": (PROMPT, {"num_speculative_tokens": 0}, "speculation.num_speculative_tokens"),
    "K over the limit": (PROMPT, {"num_speculative_tokens": K + 1}, "speculation.num_speculative_tokens"),
    "chat template that is not there": ("hello", {"apply_chat_template": True}, "apply_chat_template"),
    "request id with spaces": (PROMPT, {"request_id": "a b"}, "request_id"),
}


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused_by_field_and_the_server_goes_on(pair, case, streaming):
    prompt, options, field = BAD[case]

    def ask():
        return list(pair.client.stream(prompt, **options)) if streaming else pair.client.generate(prompt, **options)

    with pytest.raises(OutriderError) as caught:
        ask()
    error = caught.value
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT, error
    assert error.message.startswith(f"{field}"), error
    assert ";" in error.message, "the fix comes after the problem"
    assert "Traceback" not in error.message
    assert "\n" not in error.message
    answer = pair.client.generate(PROMPT, temperature=0.0, max_tokens=4)
    pair.reference.check(PROMPT, answer.token_ids, label=case)


def test_nothing_of_them_is_left(pair):
    assert is_idle(pair.status())


def test_the_longest_prompt_there_is_room_for_is_served(pair):
    prompt = [65 + i % 26 for i in range(MAX_MODEL_LEN - 1)]
    answer = pair.client.generate(prompt, temperature=0.0)
    assert answer.usage.total_tokens == MAX_MODEL_LEN
    pair.reference.check(prompt, answer.token_ids, label="longest prompt")
