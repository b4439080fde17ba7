"""OpenAI's Responses API through the official client, on a deployment with a draft model."""

import asyncio
import json

import httpx
import openai
import pytest

from tests.integration.openai_calls import MESSAGES, MODEL, PROMPT, acceptance, chat, num_draft_tokens
from tests.integration.test_openai import CHAT_PROMPT, NO_SPACE, SCHEMA
from tests.serving import drafted, ended_early, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PAINT = {"type": "function", "name": "paint", "strict": True, "parameters": SCHEMA}
TO_GO = 900


@pytest.fixture
def client(pair):
    with openai.OpenAI(base_url=f"{pair.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def respond(client, **changes):
    options = {"model": MODEL, "input": PROMPT, "max_output_tokens": 24, **changes}
    return client.responses.create(**options)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seeded"])
def test_the_text_is_that_of_a_chat(client, sampling):
    seed = {"seed": sampling["seed"]} if "seed" in sampling else {}
    expected = chat(client, **sampling)
    asked = {"temperature": sampling["temperature"], "extra_body": {**seed, "enable_response_messages": True}}
    answer = drafted(lambda: respond(client, **asked), num_draft_tokens)
    assert answer.output_text == expected.choices[0].message.content
    assert answer.output_messages[0]["tokens"] == expected.choices[0].token_ids
    assert bytes(answer.input_messages[0]["tokens"]).decode() == CHAT_PROMPT
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(CHAT_PROMPT), 24)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.store is False


def test_a_stream_adds_up(client):
    whole = respond(client, temperature=0, max_output_tokens=40)

    def ask():
        return list(respond(client, temperature=0, max_output_tokens=40, stream=True))

    events = drafted(ask, lambda events: num_draft_tokens(events[-1].response))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert len(deltas) < 40  # an event a round
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.store is False
    assert events[-1].response.usage.output_tokens == 40
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_speculation_of_a_request(client):
    plain = respond(client, temperature=0, extra_body={"speculation": {"enabled": False}})
    assert num_draft_tokens(plain) == 0
    few = {"speculation": {"num_speculative_tokens": 2}}
    answer = drafted(lambda: respond(client, temperature=0, extra_body=few), num_draft_tokens)
    assert acceptance(answer)["num_draft_tokens"] <= 2 * acceptance(answer)["num_spec_steps"]
    assert answer.output_text == plain.output_text


def test_instructions_and_a_conversation(client):
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, *MESSAGES]
    expected = chat(client, messages=[{"role": "system", "content": "be"}, *said], temperature=0)
    answer = respond(client, instructions="be", input=said, temperature=0)
    assert answer.output_text == expected.choices[0].message.content
    again = respond(client, input=[*said, *answer.output, {"role": "user", "content": "and"}], temperature=0)
    assert again.usage.input_tokens == len(
        f"user: hi\nassistant: ho\nuser: {PROMPT}\nassistant: {answer.output_text}\nuser: and\nassistant: ".encode()
    )


def test_a_schema_is_kept_to(client):
    form = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}}
    options = {"text": form, "max_output_tokens": 200, "extra_body": {"logit_bias": NO_SPACE, "seed": 1}}
    answer = respond(client, **options)
    assert set(json.loads(answer.output_text)) == {"ok", "colour"}
    assert answer.status == "completed"
    as_chat = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
    expected = chat(client, response_format=as_chat, logit_bias=NO_SPACE, seed=1, max_tokens=200)
    assert answer.output_text == expected.choices[0].message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "paint"}], ids=["required", "named"])
def test_tools(client, choice):
    options = {"tools": [PAINT], "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 300}
    options["extra_body"] = {"logit_bias": NO_SPACE, "seed": 2}
    [call] = respond(client, **options).output
    assert (call.type, call.name, set(json.loads(call.arguments))) == ("function_call", "paint", {"ok", "colour"})
    events = list(respond(client, **options, stream=True))
    [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == json.loads(done.arguments) == json.loads(call.arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    answer = respond(client, input=[*MESSAGES, call, output], tools=[PAINT], temperature=0)
    assert answer.output_text


def test_logprobs(client):
    options = {"temperature": 0, "max_output_tokens": 8}
    answer = respond(client, **options, include=["message.output_text.logprobs"], top_logprobs=2)
    expected = chat(client, temperature=0, max_tokens=8, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    found = answer.output[0].content[0].logprobs
    assert [entry.logprob for entry in found] == pytest.approx([entry.logprob for entry in expected], abs=1e-3)
    assert [len(entry.top_logprobs) for entry in found] == [2] * 8


REFUSED = {
    "previous_response_id": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "conversation": ({"conversation": "conv_1"}, "conversation"),
    "background": ({"background": True}, "background"),
    "store": ({"store": True}, "store"),
    "a built-in tool": ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    "mcp": ({"tools": [{"type": "mcp", "server_label": "a", "server_url": "http://x"}]}, "tools.0.type"),
    "an item of a stored response": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type"),
    "unknown field": ({"extra_body": {"max_tokens": 3}}, "max_tokens"),
    "wrong type": ({"temperature": "hot"}, "temperature"),
    "out of range": ({"top_p": 0.0}, "top_p"),
    "token out of the vocabulary": ({"extra_body": {"logit_bias": {"5000": 1}}}, "logit_bias"),
    "a schema that does not compile": (
        {"text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "nothing"}}}},
        "text",
    ),
    "a prompt too long": ({"input": "x" * 2000}, None),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_status(client, name, stream):
    changes, field = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, stream=stream, **changes)
    assert set(caught.value.body) >= {"message", "type", "param", "code"}
    if field is not None:
        assert caught.value.param == field
    assert len(caught.value.message) < 1000


def test_nothing_is_stored(client):
    answer = respond(client, store=False, metadata={"a": "b"})
    assert (answer.store, answer.metadata) == (False, {"a": "b"})
    for call in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="not stored here"):
            call(answer.id)


def test_ids_come_back(client):
    raw = client.responses.with_raw_response.create(
        model=MODEL, input="a", max_output_tokens=1, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().id == "resp_mine-1"


def test_a_stream_that_is_closed_is_aborted(client, pair):
    with ended_early(pair, TO_GO):
        stream = respond(client, temperature=0, max_output_tokens=TO_GO, stream=True)
        for _ in range(6):
            next(stream)
        assert pair.status().target.running == 1
        stream.close()


def test_a_client_that_gives_up_waiting_is_aborted(client, pair):
    with ended_early(pair, TO_GO), pytest.raises(openai.APITimeoutError):
        respond(client, temperature=0, max_output_tokens=TO_GO, timeout=0.25)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_deadline_is_kept(client, pair, stream):
    options = {"temperature": 0, "max_output_tokens": TO_GO, "extra_headers": {"x-request-timeout-ms": "250"}}
    with ended_early(pair, TO_GO):
        if stream:
            with pytest.raises(openai.APIError, match="deadline"):
                list(respond(client, stream=True, **options))
        else:
            with pytest.raises(openai.APIStatusError, match="deadline") as caught:
                respond(client, **options)
            assert caught.value.status_code == 408


def test_a_request_is_aborted_over_grpc(client, pair):
    with ended_early(pair, TO_GO):
        events = iter(respond(client, temperature=0, max_output_tokens=TO_GO, stream=True))
        first = next(events)
        assert pair.client.abort(first.response.id)
        *_, last = events
        assert last.response.status == "cancelled"


async def test_many_at_once(pair):
    async with openai.AsyncOpenAI(base_url=f"{pair.http_url}/v1", api_key="none", max_retries=0) as client:
        asked = [
            client.responses.create(model=MODEL, input=PROMPT, max_output_tokens=16, extra_body={"seed": 1 + i % 2})
            for i in range(12)
        ]
        answers = await asyncio.gather(*asked)
    assert len({answer.output_text for answer in answers[::2]}) == 1
    assert len({answer.output_text for answer in answers}) == 2


def test_garbage_in_the_body(pair):
    url = f"{pair.http_url}/v1/responses"
    for raw in (b"", b"{", b"[]", b"{}", b'{"input": "\xff"}', b'{"input": [[[]]]}', b'{"input": "\\ud800"}'):
        response = httpx.post(url, content=raw, headers={"content-type": "application/json"})
        assert (response.status_code, set(response.json())) == (400, {"error"}), raw
    assert httpx.get(url).status_code == 405
    assert wait_until(lambda: httpx.get(f"{pair.http_url}/health").status_code == 200, 30, "health")
