"""Request fields that are said to work have an effect, drafted tokens included."""

import openai
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

MODEL = "tiny"
PROMPT = "Once upon a time there was a field"
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
N = 12
EOS = 256
END_AT_ONCE = {str(EOS): 100}


@pytest.fixture
def client(pair):
    with openai.OpenAI(base_url=f"{pair.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client, **body):
    body = {"return_token_ids": True, "temperature": 0, "max_tokens": N, **body}
    return client.completions.create(model=MODEL, prompt=PROMPT, extra_body=body)


def chat(client, **body):
    body = {"temperature": 0, "max_tokens": N, "return_prompt_text": True, **body}
    return client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=body)


@pytest.fixture
def greedy(client):
    """The greedy answer."""
    return complete(client).choices[0]


def ids(answer):
    return answer.choices[0].token_ids


def reason(answer):
    return answer.choices[0].finish_reason


EFFECTS = {
    "max_tokens": ({"max_tokens": 5}, lambda a, g: len(ids(a)) == 5),
    "top_k": ({"temperature": 1, "top_k": 1}, lambda a, g: ids(a) == g.token_ids),
    "top_k of more than 31 bits": (
        {"temperature": 1, "top_k": 2**31, "ignore_eos": True},
        lambda a, g: len(ids(a)) == N,
    ),
    "top_p": ({"temperature": 1, "top_p": 1e-6}, lambda a, g: ids(a) == g.token_ids),
    "min_p": ({"temperature": 1, "min_p": 1.0}, lambda a, g: ids(a) == g.token_ids),
    "logit_bias": ({"logit_bias": {"65": 100}}, lambda a, g: set(ids(a)) == {65}),
    "allowed_token_ids": ({"allowed_token_ids": [65, 66]}, lambda a, g: set(ids(a)) <= {65, 66}),
    "stop_token_ids": (
        {"logit_bias": {"65": 100}, "stop_token_ids": [65]},
        lambda a, g: (reason(a), ids(a)) == ("stop", [65]),
    ),
    "an end token": ({"logit_bias": END_AT_ONCE}, lambda a, g: (reason(a), len(ids(a))) == ("stop", 1)),
    "ignore_eos": ({"logit_bias": END_AT_ONCE, "ignore_eos": True}, lambda a, g: len(ids(a)) == N),
    "min_tokens": ({"logit_bias": END_AT_ONCE, "min_tokens": 7}, lambda a, g: len(ids(a)) == 8),
    "skip_special_tokens": (
        {"logit_bias": END_AT_ONCE, "ignore_eos": True, "skip_special_tokens": False},
        lambda a, g: "<eos>" in a.choices[0].text,
    ),
    "frequency_penalty": (
        {"logit_bias": {"65": 8, "66": 8}, "frequency_penalty": 2.0, "max_tokens": 40},
        lambda a, g: len(set(ids(a))) > 1,
    ),
    "repetition_penalty": ({"repetition_penalty": 3.0}, lambda a, g: ids(a) != g.token_ids),
    "presence_penalty": ({"presence_penalty": 2.0, "max_tokens": 100}, lambda a, g: len(set(ids(a))) > 10),
    "bad_words": ({"bad_words": ["{first}"]}, lambda a, g: g.token_ids[0] not in ids(a)),
    "stop": ({"stop": "{third}"}, lambda a, g: reason(a) == "stop" and g.text[2] not in a.choices[0].text),
    "include_stop_str_in_output": (
        {"stop": "{third}", "include_stop_str_in_output": True},
        lambda a, g: a.choices[0].text.endswith(g.text[2]),
    ),
    "echo": ({"echo": True, "return_token_ids": False}, lambda a, g: a.choices[0].text == PROMPT + g.text),
    "truncate_prompt_tokens": (
        {"truncate_prompt_tokens": 5},
        lambda a, g: a.choices[0].prompt_token_ids == list(PROMPT[-5:].encode()),
    ),
    "truncation_side": (
        {"truncate_prompt_tokens": 5, "truncation_side": "right"},
        lambda a, g: a.choices[0].prompt_token_ids == list(PROMPT[:5].encode()),
    ),
    "structured_outputs": (
        {"structured_outputs": {"regex": "[xy]{3}"}},
        lambda a, g: len(a.choices[0].text) == 3 and set(a.choices[0].text) <= {"x", "y"},
    ),
    "response_format": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["red"]}}}},
        lambda a, g: a.choices[0].text == '"red"',
    ),
    "repetition_detection": (
        {
            "logit_bias": {"65": 100},
            "max_tokens": 60,
            "repetition_detection": {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 5},
        },
        lambda a, g: len(ids(a)) < 60,
    ),
    "return_tokens_as_token_ids": (
        {"logprobs": 0, "return_tokens_as_token_ids": True},
        lambda a, g: a.choices[0].logprobs.tokens == [f"token_id:{token}" for token in g.token_ids],
    ),
    "prompt_logprobs": ({"prompt_logprobs": 1}, lambda a, g: len(a.choices[0].prompt_logprobs) == len(PROMPT)),
    "n": ({"n": 3, "temperature": 1}, lambda a, g: len(a.choices) == 3),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_completions(client, greedy, name):
    body, holds = EFFECTS[name]
    # Text of the greedy answer, which no test knows beforehand.
    filled = {"{first}": greedy.text[0], "{third}": greedy.text[2]}
    body = {key: _filled(value, filled) for key, value in body.items()}
    answer = complete(client, **body)
    assert holds(answer, greedy), (ids(answer), reason(answer), greedy.token_ids)


def _filled(value, by):
    if isinstance(value, list):
        return [_filled(item, by) for item in value]
    return by.get(value, value) if isinstance(value, str) else value


CHATS = {
    "the template": ({}, "user: hi\nassistant: ho\nassistant: "),
    "add_generation_prompt": ({"add_generation_prompt": False}, "user: hi\nassistant: ho\n"),
    "continue_final_message": (
        {"add_generation_prompt": False, "continue_final_message": True},
        "user: hi\nassistant: ho",
    ),
    "tools": (
        {"tools": [{"type": "function", "function": {"name": "paint"}}], "tool_choice": "none"},
        "tool paint\nuser: hi\nassistant: ho\nassistant: ",
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_chat_prompts(client, name):
    body, prompt = CHATS[name]
    assert chat(client, **body).prompt_text == prompt


def test_stream_interval(client):
    def events(**body):
        body = {"temperature": 0, "max_tokens": 40, "return_token_ids": True, **body}
        stream = client.completions.create(model=MODEL, prompt=PROMPT, stream=True, extra_body=body)
        return [event for event in stream if event.choices[0].token_ids]

    assert len(events(stream_interval=30)) <= 3 < len(events(speculation={"enabled": False}))


def test_cache_salt(client):
    long = "A beginning of several blocks. " * 10

    def cached(salt):
        answer = client.completions.create(model=MODEL, prompt=long, max_tokens=1, extra_body={"cache_salt": salt})
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached("one"), cached("one") > 0, cached("two")] == [0, True, 0]


def test_top_logprobs_of_chats(client):
    content = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [3] * N
