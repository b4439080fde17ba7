"""Random and mutated requests: whatever can be decoded is answered or refused, never failed at; nothing hangs, and the
server is as it was afterwards. OUTRIDER_FUZZ_CASES=10000 for more than the usual thousand; but for exhaustive runs
it is a twentieth of them, a fifth of the mutations, of every endpoint, kind and mutation."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode

from tests.serving import wait_until_idle

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

CASES = int(os.environ.get("OUTRIDER_FUZZ_CASES", "1000"))
SWEEP = pytest.param(CASES, marks=pytest.mark.exhaustive)
PER_CENT = {"/v1/chat/completions": 20, "/v1/completions": 30, "/tokenize": 5, "/detokenize": 5}
"""Of the cases, by schema, valid and invalid ones in equal parts. The rest are mutations."""

PATHS = list(PER_CENT)
DEADLINE_S = 120.0
"""Of every request, which asks for a few tokens: who meets it hangs."""

HEADERS = {"content-type": "application/json", "x-request-timeout-ms": f"{1000 * DEADLINE_S:.0f}"}
HANG_S = 2 * DEADLINE_S

SEEDS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "t"}]},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "tool_choice": "auto",
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}},
            "logprobs": True,
            "top_logprobs": 2,
            "stop": ["a", "b"],
            "max_tokens": 3,
            "speculation": {"num_speculative_tokens": 2, "verification": "coupled"},
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": [[1, 2, 3], [4]],
            "n": 2,
            "seed": 5,
            "logit_bias": {"65": 5.0},
            "logprobs": 1,
            "temperature": 0.7,
            "top_p": 0.9,
            "min_p": 0.1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 3,
            "speculation": {"enabled": True, "verification": "block"},
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": "abc",
            "echo": True,
            "structured_outputs": {"regex": "[ab]{1,3}"},
            "allowed_token_ids": [97, 98, 256],
            "bad_words": ["c"],
            "min_tokens": 1,
            "repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 2},
            "max_tokens": 3,
        },
    ),
    (
        "/v1/responses",
        {
            "instructions": "i",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
                {
                    "type": "message",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "a", "annotations": []}],
                },
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "o"},
                {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "i"},
                {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "o"}]},
            ],
            "tools": [
                {"type": "function", "name": "f", "parameters": {"type": "object"}},
                {"type": "custom", "name": "g", "format": {"type": "text"}},
            ],
            "tool_choice": "auto",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "metadata": {"a": "b"},
            "max_output_tokens": 3,
            "speculation": {"num_speculative_tokens": 2, "verification": "coupled"},
        },
    ),
    ("/v1/responses", {"input": "abc", "stream": True, "user": "u", "seed": 3, "max_output_tokens": 3}),
    ("/tokenize", {"prompt": "abc", "add_special_tokens": False, "return_token_strs": True}),
    ("/detokenize", {"tokens": [97, 98, 256]}),
]

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 65, 0.5, 1e-9, 1e38, -1e38, 2**31, 2**63 - 1, -(2**63),
    "", "a", "\x00", "é", "\U0001f600", "ab" * 500, "{{ 1 / 0 }}", "rejection", "none", "auto", "required",
    [], [[]], [1], ["a"], {}, {"a": 1}, {"type": "text"},
]  # fmt: skip


@pytest.fixture(scope="module")
def http():
    with httpx.Client(timeout=HANG_S) as http:
        yield http


def check(response: httpx.Response, sent: object) -> None:
    where = f"{response.request.url.path} {response.status_code} for {str(sent)[:2000]}: {response.text[:500]}"
    assert response.status_code < 500, where
    assert response.status_code != 408, f"hangs: {where}"
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}, where
    elif response.headers["content-type"].startswith("text/event-stream"):
        *events, done, rest = response.text.split("\n\n")
        if response.request.url.path == "/v1/responses":
            events, done = [event.partition("\n")[2] for event in (*events, done)], "data: [DONE]"
        assert (done, rest) == ("data: [DONE]", ""), where
        errors = [data["error"] for data in map(_data, events) if "error" in data]
        assert not any(error["code"] >= 500 or error["code"] == 408 for error in errors), where


def _data(event: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(event.removeprefix("data: "))
    return data


def shortened(body: Any) -> Any:
    """Few tokens and answers: this is about what is taken, not about speed."""
    if isinstance(body, dict):
        for name, most in (("max_tokens", 4), ("max_completion_tokens", 4), ("max_output_tokens", 4), ("n", 3)):
            if isinstance(body.get(name), int) and body[name] > most:
                body[name] = most
        if "messages" in body or "prompt" in body:
            body.setdefault("max_tokens", 2)
        elif "input" in body:
            body.setdefault("max_output_tokens", 2)
    return body


def as_json(path: str, body: Any) -> bytes:
    return json.dumps(shortened(body) if path.startswith("/v1") else body, default=str).encode()


@pytest.fixture
def unharmed(pair):
    def greedy():
        return pair.client.generate("After all that", temperature=0.0, max_tokens=16).token_ids

    before, replicas = greedy(), pair.replicas()
    yield
    wait_until_idle(pair, HANG_S)
    assert greedy() == before
    assert pair.replicas() == replicas


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cases", [CASES // 20, SWEEP])
def test_by_the_schema(pair, http, path, mode, cases):
    schema = schemathesis.openapi.from_dict(http.get(f"{pair.http_url}/openapi.json").json())

    @seed(20)
    @settings(
        max_examples=cases * PER_CENT[path] // 200,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=schema[path]["POST"].as_strategy(generation_mode=mode))
    def send(case):
        raw = case.body if isinstance(case.body, bytes) else as_json(path, case.body)
        check(http.post(f"{pair.http_url}{path}", content=raw, headers=HEADERS), raw)

    send()


def mutated(value: Any, chance: random.Random) -> Any:
    """A copy with one place changed: a value swapped for an odd one, or taken out, or put in twice."""
    if isinstance(value, (dict, list)) and value and chance.random() < 0.8:
        items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        key, item = chance.choice(items)
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        what = chance.random()
        if what < 0.75:
            copy[key] = mutated(item, chance)
        elif what < 0.85:
            del copy[key]
        elif isinstance(copy, dict):
            copy[chance.choice([f"{key}s", chance.choice(items)[0], "speculation", "seed"])] = item
        else:
            copy.extend([item] * chance.choice([1, 3, 300]))
        return copy
    return chance.choice(ODD)


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("cases", [CASES // 5, SWEEP])
def test_mutations(pair, http, cases):
    chance, cases, answered = random.Random(20), cases * (100 - sum(PER_CENT.values())) // 100, 0
    for number in range(cases):
        path, body = chance.choice(SEEDS)
        for _ in range(chance.choice([1, 1, 2, 4])):
            body = mutated(body, chance)
        raw = as_json(path, body)
        if number % 4 == 0:  # bytes
            flipped = bytearray(raw)
            for _ in range(chance.choice([1, 3])):
                flipped[chance.randrange(len(flipped))] = chance.randrange(256)
            raw = bytes(flipped)
        response = http.post(f"{pair.http_url}{path}", content=raw, headers=HEADERS)
        check(response, raw)
        answered += response.status_code == 200
    assert answered > cases // 20, "mutations that are all refused say nothing about the engine"
