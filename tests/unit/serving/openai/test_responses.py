"""``/v1/responses`` by vLLM's own class over a scripted engine."""

from __future__ import annotations

import asyncio
import json

import pytest
from openai.types.responses import ResponseErrorEvent
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from outrider.actors.openai_calls import OpenAIRequest, TokensUsed
from outrider.actors.replica_calls import Deadline, ReplicaLost
from outrider.actors.serving.openai.door import to_openai_request
from outrider.actors.serving.openai.responses import ResponsesServing
from outrider.actors.serving.openai.serving import OpenAIServing
from tests.unit.serving.openai import test_serving as scripted
from tests.unit.serving.openai.test_serving import a_minute_later, answer, configuration, ends, whole

model, shared_llm, llm, shared_serving, serving = (
    getattr(scripted, name) for name in ("model", "shared_llm", "llm", "shared_serving", "serving")
)
PROMPT = "user: hi\nassistant: "
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def checked(**body):
    """As the door passes it on."""
    return to_openai_request("responses", {"input": "hi", **body}, {}, num_speculative_tokens=4, request_id="r").body


async def respond(serving, **body):
    return await whole(serving, "responses", checked(**body))


def events(parts):
    """Names and data of a stream that ends as OpenAI's do."""
    found = []
    for part in parts:
        name, data, *rest = part.split("\n")
        assert rest == ["", ""]
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_a_response(serving, llm):
    status, body = await respond(serving, instructions="be", enable_response_messages=True)
    assert (status, body["id"], body["model"], body["status"]) == (200, "resp_r", "tiny", "completed")
    assert body["store"] is False
    [message] = body["output"]
    assert message["content"][0]["text"] == "Hello"
    prompt = f"system: be\n{PROMPT}"
    assert bytes(body["input_messages"][0]["tokens"]).decode() == prompt
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (len(prompt), 5)
    assert not serving._responses.response_store
    assert not serving._responses.msg_store


async def test_a_stream(serving, llm):
    head, parts = await answer(serving, "responses", checked(stream=True))
    assert (head.status, head.is_stream) == (200, True)
    found = events(parts)
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    assert [event["delta"] for event in found if event["type"] == "response.output_text.delta"] == ["Hel", "lo"]
    assert found[-1]["type"] == "response.completed"
    told = [event["response"] for event in found if "response" in event]
    assert [response["store"] for response in told] == [False] * 3
    assert told[-1]["output"][0]["content"][0]["text"] == "Hello"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_an_answer_has_cost_is_told_at_its_end(serving, llm, stream):
    parts = [part async for part in serving.answer(OpenAIRequest("responses", "r", checked(stream=stream)))]
    told = [part for part in parts if isinstance(part, TokensUsed)]
    assert sum(each.prompt for each in told) == len(PROMPT)
    assert sum(each.completion for each in told) == len("Hello")


async def test_options_of_the_round_reach_the_engine(serving, llm):
    deadline = Deadline(1060.0, clock=lambda: 1000.0)
    await whole(serving, "responses", checked(), round_options={"verification": "block"}, deadline=deadline)
    assert llm.params[0].extra_args == {"outrider": {"verification": "block", "timeout_s": 60.0}}


async def test_a_conversation(serving, llm):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    given = [
        {"role": "user", "content": "hi"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": part} for part in "ab"]},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "out"},
        {"role": "assistant", "content": "on", "status": "incomplete"},
    ]
    _, body = await respond(serving, input=given, enable_response_messages=True)
    found = bytes(body["input_messages"][0]["tokens"]).decode()
    assert found == "user: hi\nassistant: a\nb\ntool: out\nassistant: on"


async def test_items_are_not_tried_as_every_type_there_is(serving, llm, monkeypatch):
    """Which takes vLLM's validation a millisecond for four of them."""
    seen = []
    make = serving._request
    monkeypatch.setattr(serving, "_request", lambda kind, request: seen.append(request) or make(kind, request))
    await respond(serving, input=[{"role": "user", "content": "hi"}] * 5)
    assert [request.body["input"] for request in seen] == [""]
    assert llm.params


async def test_a_schema_is_the_engines_constraint(serving, llm):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await respond(serving, text={"format": {"type": "json_schema", "name": "s", "schema": schema}})
    assert llm.params[-1].structured_outputs.json == schema
    await respond(serving, text={"format": {"type": "json_object"}})
    assert llm.params[-1].structured_outputs.json_object
    too_long = {"type": "json_schema", "name": "s", "schema": {"description": "x" * (64 << 10)}}
    status, body = await respond(serving, text={"format": too_long})
    assert (status, body["error"]["param"]) == (400, "text")


async def test_tool_calls_are_parsed(serving, llm):
    llm.script = [CALL[:20], CALL[20:]]
    _, body = await respond(serving, tools=[TOOL])
    [call] = body["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "f", {"a": 1})
    _, parts = await answer(serving, "responses", checked(tools=[TOOL], stream=True))
    done = [event for event in events(parts) if event["type"] == "response.function_call_arguments.done"]
    assert json.loads(done[0]["arguments"]) == {"a": 1}


async def test_a_custom_tool_is_called_with_a_text(serving, llm):
    llm.script = ['<tool_call>{"name": "say", "arguments": {"input": "ho"}}</tool_call>']
    _, body = await respond(serving, tools=[{"type": "custom", "name": "say"}])
    [call] = body["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "say", "ho")


async def test_tools_need_a_parser(llm, model):
    without = OpenAIServing(llm, configuration(model), "replica-1")
    status, body = await respond(without, tools=[TOOL])
    assert (status, body["error"]["param"]) == (400, "tools")
    assert "openai.tool_call_parser" in body["error"]["message"]
    assert (await respond(without, tools=[TOOL], tool_choice="none"))[0] == 200
    assert (await respond(without))[0] == 200


async def test_reasoning_comes_apart_and_the_engine_finds_its_end(llm, model):
    """A constraint holds for what follows the reasoning, in a response as in a chat."""
    seen = []
    generate = llm.generate

    def noted(*args, **options):
        seen.append(options)
        return generate(*args, **options)

    llm.generate = noted
    llm.script = ["Here is my thought process: hm", "Here is my response: ho"]
    try:
        thinks = OpenAIServing(llm, configuration(model, reasoning_parser="granite"), "replica-1")
        _, body = await respond(thinks, text={"format": {"type": "json_object"}})
        await whole(thinks, "completions", {"prompt": "hi"})
    finally:
        del llm.generate
    assert [item["type"] for item in body["output"]] == ["reasoning", "message"]
    assert body["output"][1]["content"][0]["text"].strip() == "ho"
    assert [options.get("reasoning_ended") for options in seen] == [None, True]


async def test_an_answer_that_was_cut_is_incomplete(serving, llm, monkeypatch):
    monkeypatch.setattr("tests.unit.serving.openai.test_serving.FINISHED", "length")
    _, body = await respond(serving)
    assert (body["status"], body["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")
    _, parts = await answer(serving, "responses", checked(stream=True))
    assert events(parts)[-1]["type"] == "response.incomplete"
    monkeypatch.setattr("tests.unit.serving.openai.test_serving.FINISHED", "abort")
    assert (await respond(serving))[1]["status"] == "cancelled"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"top_p": "hot"}, 400, "top_p"),
        ({"model": "other"}, 404, "model"),
        ({"logit_bias": {"a": 1}}, 400, "logit_bias"),
        ({"top_p": 0.0}, 400, "top_p"),
        ({"input": "x" * 300}, 400, "input"),
        ({"input": "x" * 9000}, 400, "input"),
        ({"tools": [{**TOOL, "parameters": 3}]}, 400, "tools.0.parameters"),
    ],
)
async def test_refused(serving, llm, changes, status, param, stream):
    found, error = await respond(serving, stream=stream, **changes)
    assert (found, error["error"]["code"]) == (status, status)
    if param is not None:
        assert error["error"]["param"] == param
    assert len(error["error"]["message"]) < 1000
    assert llm.open == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [(VLLMValidationError("no such grammar"), 400), (EngineGenerateError("secret"), 500), (ValueError("secret"), None)],
)
async def test_what_the_engine_refuses_has_a_status(serving, llm, error, status, stream):
    llm.script = [error]
    if status is None:
        wrapped = EngineGenerateError()
        wrapped.__cause__ = error
        llm.script, status = [wrapped], 400
    found, body = await respond(serving, stream=stream)
    assert found == body["error"]["code"] == status
    assert status == 400 or "secret" not in body["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_engine_is_for_another_replica(serving, llm, stream):
    llm.script = [EngineDeadError()]
    with pytest.raises(ReplicaLost, match="replica-1"):
        await respond(serving, stream=stream)


@pytest.mark.parametrize(("error", "code"), [(EngineDeadError(), 503), (EngineGenerateError("secret"), 500)])
async def test_what_goes_wrong_in_a_stream_is_an_event(serving, llm, error, code):
    llm.script = ["Hel", error]
    head, parts = await answer(serving, "responses", checked(stream=True))
    assert head.status == 200
    last = events(parts)[-1]
    assert (last["type"], last["code"], last["error"]["code"]) == ("error", str(code), code)
    assert ResponseErrorEvent.model_validate(last).message
    assert "secret" not in last["message"]


@pytest.mark.parametrize("script", [[None], ["Hel", None]])
async def test_the_deadline_ends_a_stream(serving, llm, script, monkeypatch):
    llm.script, llm.stands_still = script, a_minute_later(monkeypatch)
    head, parts = await answer(serving, "responses", checked(stream=True), deadline=Deadline.after(30.0))
    assert '"code": 408' in parts[-1]
    assert head.status == (408 if script == [None] else 200)
    await ends(llm)


async def test_the_deadline_ends_a_whole_answer(serving, llm):
    llm.script = [None]
    status, body = await whole(serving, "responses", checked(), deadline=Deadline.after(0.05))
    assert status == body["error"]["code"] == 408
    assert llm.open == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_ends_the_engines_request(serving, llm, stream):
    llm.script = [None]
    task = asyncio.create_task(respond(serving, stream=stream))
    while not llm.open:  # noqa: ASYNC110 - the engine is not ours to set an event in
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await ends(llm)


async def test_closing_between_two_events_ends_the_engines_request(serving, llm):
    llm.script = ["a", "b", "c"]
    parts = serving.answer(OpenAIRequest("responses", "r", checked(stream=True)))
    for _ in range(5):
        await anext(parts)
    assert llm.open == 1
    await parts.aclose()
    for _ in range(10):
        await asyncio.sleep(0)
    assert llm.open == 0


def test_what_is_overridden_is_vllms_still():
    """Else its answers would lack what is added there."""
    ours = {name for name, value in vars(ResponsesServing).items() if callable(value)}
    assert ours
    assert ours <= vars(OpenAIServingResponses).keys() | vars(GenerateBaseServing).keys()
