"""OpenAI's API, through the official client, on a deployment with a draft model. Seeds and temperature 0 must give what
gRPC gives."""

import json
import statistics

import httpx
import openai
import pytest

from tests.integration.openai_calls import PROMPT, acceptance, chat, complete, num_draft_tokens
from tests.support.cluster.serving import K, drafted, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CHAT_PROMPT = f"user: {PROMPT}\nassistant: "
NO_SPACE = {"32": -100, "10": -100}
"""Grammars for JSON allow any white space, which a random model would go on with."""

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "colour": {"enum": ["red", "green"]}},
    "required": ["ok", "colour"],
    "additionalProperties": False,
}


@pytest.fixture
def client(pair):
    with openai.OpenAI(base_url=f"{pair.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seeded"])
def test_the_tokens_are_those_of_grpc(client, pair, sampling):
    expected = pair.client.generate(PROMPT, max_tokens=24, **sampling)
    for _ in range(2):
        answer = drafted(lambda: complete(client, **sampling), num_draft_tokens)
        assert answer.choices[0].token_ids == list(expected.token_ids)
        assert answer.choices[0].text == expected.text
        assert answer.usage.completion_tokens == 24
        assert answer.usage.prompt_tokens == len(PROMPT)


def test_chat_is_the_template_completed(client):
    answer = chat(client, temperature=0, extra={"return_prompt_text": True})
    plain = complete(client, prompt=CHAT_PROMPT, temperature=0)
    assert answer.prompt_text == CHAT_PROMPT
    assert answer.choices[0].message.content == plain.choices[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_streams_add_up(client, endpoint):
    ask = chat if endpoint == "chat" else complete
    whole = ask(client, temperature=1.0, seed=3, max_tokens=40)
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 40, "stream_options": {"include_usage": True}}
    *rounds, last = drafted(
        lambda: list(ask(client, stream=True, **options)),
        lambda events: acceptance(events[-1])["num_accepted_draft_tokens"],
    )
    ids = [getattr(round_.choices[0], "token_ids", None) or [] for round_ in rounds]
    assert [token for of_round in ids for token in of_round] == whole.choices[0].token_ids
    texts = [r.choices[0].delta.content if endpoint == "chat" else r.choices[0].text for r in rounds]
    assert "".join(text or "" for text in texts) == (
        whole.choices[0].message.content if endpoint == "chat" else whole.choices[0].text
    )
    assert rounds[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.usage.prompt_tokens, 40)
    # One event a round, as a rule: what is read late is told together. Tokens that a round commits are one event.
    assert statistics.median(map(len, filter(None, ids))) <= K + 1
    assert len([of_round for of_round in ids if of_round]) < 40


def test_logprobs(client, pair):
    expected = pair.client.generate(CHAT_PROMPT, temperature=0.0, max_tokens=12, logprobs=2)
    [choice] = chat(client, temperature=0, max_tokens=12, logprobs=True, top_logprobs=2).choices
    assert len(choice.logprobs.content) == 12
    for entry, of_grpc in zip(choice.logprobs.content, expected.completions[0].logprobs, strict=True):
        assert entry.logprob == pytest.approx(of_grpc.logprob, abs=1e-3)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx([t.logprob for t in of_grpc.top], abs=1e-3)
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    completion = complete(client, prompt=CHAT_PROMPT, temperature=0, max_tokens=12, logprobs=2).choices[0]
    assert completion.logprobs.token_logprobs == pytest.approx([e.logprob for e in choice.logprobs.content], abs=1e-3)


def test_a_schema_is_kept_to(client):
    kept = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
    answer = chat(client, response_format=kept, logit_bias=NO_SPACE, seed=1, max_tokens=200)
    found = json.loads(answer.choices[0].message.content)
    assert set(found) == {"ok", "colour"}
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("speculation", "most"), [({"enabled": False}, 0), ({"num_speculative_tokens": 2}, 2), ({}, K)]
)
def test_speculation_of_a_request(client, pair, speculation, most):
    def ask():
        return complete(client, temperature=0, max_tokens=40, extra={"speculation": speculation})

    answer = drafted(ask, num_draft_tokens) if most else ask()
    found = acceptance(answer)
    assert max((j for j, rounds in enumerate(found["acceptance_histogram"]) if rounds), default=0) <= most
    assert found["num_draft_tokens"] <= most * found["num_spec_steps"]
    assert (found["num_draft_tokens"] > 0) == (most > 0)
    pair.reference.check(list(PROMPT.encode()), answer.choices[0].token_ids, label="over HTTP")


REFUSED = {
    "vLLM's own check": ({"top_p": 0.0}, "top_p"),
    "more drafts than the deployment's": (
        {"extra": {"vllm_xargs": {"speculation.num_speculative_tokens": K + 1}}},
        "vllm_xargs.speculation.num_speculative_tokens",
    ),
}
"""Bad requests by who finds them. The table is in tests/unit."""


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_status(client, name):
    changes, field = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **changes)
    assert set(caught.value.body) >= {"message", "type", "param", "code"}
    assert caught.value.param == field


def test_garbage_in_the_body(pair):
    url = f"{pair.http_url}/v1/chat/completions"
    for raw in (b"", b"{", b"[]", b'{"messages": "\xff"}', b"[" * 100_000):
        response = httpx.post(url, content=raw, headers={"content-type": "application/json"})
        assert response.status_code == 400, raw
    assert httpx.post(url, content=b" " * (9 << 20), headers={"content-type": "application/json"}).status_code == 413
    assert wait_until(lambda: httpx.get(f"{pair.http_url}/health").status_code == 200, 30, "health")
