"""vLLM's own serving classes over a scripted engine: real request models, renderer, tokenizer and parsers."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, nullcontext
from types import SimpleNamespace

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from outrider.actors.openai_calls import OpenAIHead, OpenAIRequest, TokensUsed
from outrider.actors.replica_calls import Deadline, ReplicaLost
from outrider.actors.serving.openai.serving import COUNT_EVERY_TOKENS, OpenAIServing
from outrider.cluster.config import ConfigError, parse_config
from tests.serving import CHAT_TEMPLATE
from tests.tiny_models import build_tiny_llama

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
FINISHED = "stop"
"""What a script's last output says."""


class Llm:
    """Answers every request with script: texts of its rounds; exceptions are raised, None never comes."""

    errored = False

    def __init__(self, vllm_config):
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = SimpleNamespace()
        self.script: list = []
        self.params: list = []
        self.options: list = []
        self.open = 0
        self.stands_still = lambda: None

    def check_admission(self, n):
        if self.errored:
            raise EngineDeadError

    async def generate(self, prompt, params, request_id, **options):
        self.params.append(params)
        self.options.append(options)
        self.open += 1
        whole = params.output_kind is RequestOutputKind.FINAL_ONLY
        try:
            text = ""
            for number, step in enumerate(self.script, 1):
                await asyncio.sleep(0)
                if isinstance(step, Exception):
                    raise step
                if step is None:
                    self.stands_still()
                    await asyncio.Event().wait()
                text = text + step if whole else step
                last = number == len(self.script)
                if last or not whole:
                    yield output(prompt, request_id, text, FINISHED if last else None)
        finally:
            self.open -= 1


def output(prompt, request_id, text, finish_reason):
    ids = list(text.encode())
    return RequestOutput(
        request_id=request_id,
        prompt=prompt.get("prompt"),
        prompt_token_ids=prompt["prompt_token_ids"],
        prompt_logprobs=None,
        outputs=[CompletionOutput(0, text, ids, None, None, finish_reason=finish_reason)],
        finished=finish_reason is not None,
    )


def configuration(model, **openai):
    return parse_config(
        {
            "target": {"model": str(model)},
            "drafter": {"method": "ngram"},
            "openai": {"chat_template": CHAT_TEMPLATE, **openai},
            "serving": {"served_model_name": "tiny"},
        }
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def shared_llm(model):
    arguments = EngineArgs(model=str(model), dtype="float32", max_model_len=256, enforce_eager=True)
    return Llm(arguments.create_engine_config())


@pytest.fixture
def llm(shared_llm):
    shared_llm.script, shared_llm.params = ["Hel", "lo"], []
    yield shared_llm
    shared_llm.errored, shared_llm.stands_still = False, lambda: None


@pytest.fixture(scope="module")
def shared_serving(shared_llm, model):
    return OpenAIServing(shared_llm, configuration(model, tool_call_parser="hermes"), "replica-1")


@pytest.fixture
def serving(llm, shared_serving):
    return shared_serving


def a_minute_later(monkeypatch):
    """Call what is returned, and it is that by the event loop's clock."""
    loop = asyncio.get_running_loop()
    now = loop.time
    return lambda: monkeypatch.setattr(loop, "time", lambda: now() + 60.0)


async def ends(llm):
    """All that the engine was asked for."""
    async with asyncio.timeout(60):
        while llm.open:  # noqa: ASYNC110 - the engine is not ours to set an event in
            await asyncio.sleep(0.001)


async def answer(serving, endpoint, body, **options):
    """Head and body parts, without what they have cost."""
    head, *parts = [part async for part in serving.answer(OpenAIRequest(endpoint, "r", body, **options))]
    assert isinstance(head, OpenAIHead)
    return head, [part for part in parts if not isinstance(part, TokensUsed)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_a_replica_without_memory_is_for_another_one_and_says_no_more(serving, llm, endpoint, stream):
    secret = "10.1.2.3:6379 node 5f2c9ab0d1e2"
    llm.script = [MemoryError(secret)]
    body = {**(CHAT if endpoint == "chat" else {"prompt": "hi"}), "stream": stream}
    with pytest.raises(ReplicaLost) as lost:
        await answer(serving, endpoint, body)
    assert secret not in str(lost.value)
    llm.script = ["Hel", MemoryError(secret)]
    if stream:
        _, parts = await answer(serving, endpoint, body)
        assert [event["error"]["code"] for event in events(parts) if "error" in event] == [503]
        assert secret not in "".join(parts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_what_an_answer_has_cost_is_told_at_its_end(serving, llm, endpoint, stream):
    body = {**(CHAT if endpoint == "chat" else {"prompt": "hi"}), "stream": stream}
    parts = [part async for part in serving.answer(OpenAIRequest(endpoint, "r", body))]
    told = [part for part in parts if isinstance(part, TokensUsed)]
    prompt = len("user: hi\nassistant: ") if endpoint == "chat" else len("hi")
    assert sum(each.prompt for each in told) == prompt
    assert sum(each.completion for each in told) == len("Hello")


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_a_stream_is_counted_before_its_client_can_leave(serving, llm, endpoint):
    """Whoever hangs up before the last event would have asked for nothing."""
    llm.script = ["x" * COUNT_EVERY_TOKENS] * 4
    body = {**(CHAT if endpoint == "chat" else {"prompt": "hi"}), "stream": True}
    told, said = [], ""
    async with aclosing(serving.answer(OpenAIRequest(endpoint, "r", body))) as parts:
        async for part in parts:
            if isinstance(part, TokensUsed):
                told.append(part)
            elif isinstance(part, str):
                said += part
                if said.count("x") > 2 * COUNT_EVERY_TOKENS:
                    break
    assert sum(each.prompt for each in told) > 0
    assert sum(each.completion for each in told) >= said.count("x") - COUNT_EVERY_TOKENS


async def whole(serving, endpoint, body, **options):
    head, [text] = await answer(serving, endpoint, body, **options)
    assert head.media_type == "application/json"
    return head.status, json.loads(text)


def events(parts):
    *found, done, rest = "".join(parts).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in found]


async def test_chat(serving, llm):
    status, body = await whole(serving, "chat", CHAT)
    assert (status, body["id"], body["model"]) == (200, "chatcmpl-r", "tiny")
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert body["usage"]["prompt_tokens"] == len("user: hi\nassistant: ")
    assert llm.params[0].extra_args is None


async def test_completions(serving):
    status, body = await whole(serving, "completions", {"prompt": "hi"})
    assert (status, body["choices"][0]["text"]) == (200, "Hello")


async def test_a_stream_has_an_event_a_round(serving):
    head, parts = await answer(serving, "completions", {"prompt": "hi", "stream": True})
    assert (head.status, head.is_stream) == (200, True)
    assert [event["choices"][0]["text"] for event in events(parts)] == ["Hel", "lo"]


async def test_options_of_the_round_reach_the_engine(serving, llm):
    deadline = Deadline(1060.0, clock=lambda: 1000.0)
    await whole(serving, "chat", CHAT, round_options={"verification": "block"}, deadline=deadline)
    assert llm.params[0].extra_args == {"outrider": {"verification": "block", "timeout_s": 60.0}}


async def test_a_models_name_is_not_said_again_however_long(serving):
    status, error = await whole(serving, "chat", {**CHAT, "model": "m" * 100_000})
    assert (status, error["error"]["param"]) == (404, "model")
    assert len(error["error"]["message"]) < 1000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("endpoint", "changes", "status", "param"),
    [
        ("chat", {"temperature": "hot"}, 400, "temperature"),
        ("chat", {"model": "other"}, 404, "model"),
        ("chat", {"messages": [{"role": "user", "content": "x" * 300}]}, 400, None),
        ("chat", {"logit_bias": {"a": 1}}, 400, "logit_bias"),
        ("chat", {"top_p": 0.0}, 400, "top_p"),
        ("completions", {"prompt": ""}, 400, "prompt"),
        ("completions", {"suffix": "x"}, 400, "suffix"),
        ("completions", {"n": 2, "temperature": 0}, 400, "n"),
        ("completions", {"stop": ""}, 400, "stop"),
        ("completions", {"bad_words": [""]}, 400, "bad_words"),
        ("completions", {"min_p": 1.5}, 400, "min_p"),
        ("completions", {"top_k": -2}, 400, "top_k"),
        ("completions", {"frequency_penalty": 3}, 400, "frequency_penalty"),
        ("completions", {"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens"),
        ("completions", {"logit_bias": {"-1": 1}}, 400, "logit_bias"),
        ("completions", {"allowed_token_ids": [-1]}, 400, "allowed_token_ids"),
        ("completions", {"prompt": []}, 400, "prompt"),
        ("completions", {"prompt": [1] * 300}, 400, "prompt"),
        ("chat", {"messages": []}, 400, "messages"),
        ("chat", {"max_completion_tokens": 0}, 400, "max_completion_tokens"),
        ("chat", {"continue_final_message": True, "add_generation_prompt": True}, 400, "continue_final_message"),
        ("chat", {"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, 400, "messages.0.tool_call_id"),
        ("chat", {"messages": [{"content": "x"}]}, 400, "messages.0.role"),
    ],
)
async def test_refused(serving, llm, endpoint, changes, status, param, stream):
    body = {**(CHAT if endpoint == "chat" else {"prompt": "hi"}), "stream": stream, **changes}
    found, error = await whole(serving, endpoint, body)
    assert (found, error["error"]["code"]) == (status, status)
    if param is not None:
        assert error["error"]["param"] == param
    assert llm.open == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_leaves_no_room_is_to_blame_and_not_max_tokens(serving, llm, stream):
    body = {"prompt": [1] * 256, "max_tokens": 1, "stream": stream}
    status, error = await whole(serving, "completions", body)
    assert (status, error["error"]["param"]) == (400, "prompt")
    status, error = await whole(serving, "completions", {**body, "max_tokens": 0})
    assert (status, error["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_does_not_say_the_value_again(serving, llm, stream):
    llm.script = [VLLMValidationError("is wrong", parameter="stop", value="x" * 50)]
    status, body = await whole(serving, "chat", {**CHAT, "stream": stream, "stop": "x" * 50})
    assert (status, body["error"]["param"]) == (400, "stop")
    assert body["error"]["message"] == "is wrong"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_has_a_status(serving, llm, stream):
    error = EngineGenerateError()
    error.__cause__ = ValueError("no such grammar")
    llm.script = [error]
    status, body = await whole(serving, "chat", {**CHAT, "stream": stream})
    assert (status, body["error"]["message"]) == (400, "no such grammar")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_of_ours_is_500_and_tells_nothing(serving, llm, stream):
    llm.script = [EngineGenerateError("secret")]
    status, body = await whole(serving, "chat", {**CHAT, "stream": stream})
    assert status == body["error"]["code"] == 500
    assert "secret" not in body["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_engine_is_for_another_replica(serving, llm, stream):
    llm.script = [EngineDeadError()]
    with pytest.raises(ReplicaLost, match="replica-1"):
        await answer(serving, "chat", {**CHAT, "stream": stream})
    llm.errored = True
    llm.dead_error = EngineDeadError()
    with pytest.raises(ReplicaLost):
        await answer(serving, "chat", {**CHAT, "stream": stream})


async def test_an_engine_that_dies_in_a_stream_is_an_event(serving, llm):
    llm.script = ["Hel", EngineDeadError()]
    head, parts = await answer(serving, "completions", {"prompt": "hi", "stream": True})
    assert head.status == 200
    assert [event["error"]["code"] for event in events(parts) if "error" in event] == [503]


async def test_the_deadline_ends_a_whole_answer(serving, llm):
    llm.script = [None]
    status, body = await whole(serving, "chat", CHAT, deadline=Deadline.after(0.05))
    assert status == body["error"]["code"] == 408
    assert llm.open == 0


@pytest.mark.parametrize("script", [[None], ["Hel", None]])
async def test_the_deadline_ends_a_stream(serving, llm, script, monkeypatch):
    llm.script, llm.stands_still = script, a_minute_later(monkeypatch)
    body = {"prompt": "hi", "stream": True}
    head, parts = await answer(serving, "completions", body, deadline=Deadline.after(30.0))
    assert '"code": 408' in parts[-1]
    assert head.status == (408 if script == [None] else 200)
    await ends(llm)


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_ends_the_engines_request(serving, llm, stream):
    llm.script = [None]
    task = asyncio.create_task(whole(serving, "chat", {**CHAT, "stream": stream}))
    while not llm.open:  # noqa: ASYNC110 - the engine is not ours to set an event in
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert llm.open == 0


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_closing_between_two_events_ends_the_engines_request(serving, llm, endpoint):
    llm.script = ["a", "b", "c"]
    body = {**(CHAT if endpoint == "chat" else {"prompt": "hi"}), "stream": True}
    parts = serving.answer(OpenAIRequest(endpoint, "r", body))
    for _ in range(2):
        await anext(parts)
    assert llm.open == 1
    await parts.aclose()
    for _ in range(5):
        await asyncio.sleep(0)
    assert llm.open == 0


async def test_tools_need_a_parser(llm, model):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    without = OpenAIServing(llm, configuration(model), "replica-1")
    status, body = await whole(without, "chat", {**CHAT, "tools": [tool]})
    assert (status, body["error"]["param"]) == (400, "tools")
    assert "openai.tool_call_parser" in body["error"]["message"]
    assert (await whole(without, "chat", {**CHAT, "tools": [tool], "tool_choice": "none"}))[0] == 200


async def test_tools_need_no_parser_named_where_the_family_is_known(llm, model):
    template = CHAT_TEMPLATE + "{% if tools %}<tool_call> <function-name> <args-json-object>{% endif %}"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    llm.script = ['<tool_call>{"name": "f", "arguments": {}}</tool_call>']
    serving = OpenAIServing(llm, configuration(model, chat_template=template), "replica-1")
    _, body = await whole(serving, "chat", {**CHAT, "tools": [tool]})
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
    off = OpenAIServing(llm, configuration(model, chat_template=template, tool_call_parser=None), "replica-1")
    assert (await whole(off, "chat", {**CHAT, "tools": [tool]}))[0] == 400


async def test_tool_calls_are_parsed(serving, llm):
    llm.script = ['<tool_call>{"name": "f", "arguments": {"a": 1}}', "</tool_call>"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    _, body = await whole(serving, "chat", {**CHAT, "tools": [tool]})
    [call] = body["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"a": 1})
    assert body["choices"][0]["finish_reason"] == "tool_calls"


async def test_tokenize_models_and_schema(serving):
    assert (await whole(serving, "tokenize", {"prompt": "hi"}))[1]["tokens"] == [104, 105]
    assert (await whole(serving, "tokenize", CHAT))[1]["count"] == len("user: hi\nassistant: ")
    assert (await whole(serving, "detokenize", {"tokens": [104, 105]}))[1] == {"prompt": "hi"}
    assert (await whole(serving, "detokenize", {"tokens": [5000]}))[0] == 400
    assert [card["id"] for card in (await whole(serving, "models", {}))[1]["data"]] == ["tiny"]
    assert (await whole(serving, "models", {"id": "tiny"}))[1]["id"] == "tiny"
    assert (await whole(serving, "models", {"id": "x"}))[0] == 404, "no adapter is there yet"
    assert {"/v1/completions", "/v1/responses"} <= (await whole(serving, "openapi", {}))[1]["paths"].keys()


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("prompt", {"prompt": "x" * 100_000}),
        ("messages", {"messages": [{"role": "user", "content": "x" * 100_000}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 100_000}]}]}),
        ("messages", {**CHAT, "tools": [{"type": "function", "function": {"name": "x" * 100_000}}]}),
    ],
)
async def test_a_text_that_cannot_fit_is_not_tokenised(serving, monkeypatch, field, body):
    """Millions of tokens are seconds of everybody's time in this process, and hundreds of bytes each."""
    tokenised = []
    tokenizer = serving._renderer.get_tokenizer()
    monkeypatch.setattr(type(tokenizer), "__call__", lambda *args, **options: tokenised.append(args))
    status, answer = await whole(serving, "tokenize", body)
    assert (status, answer["error"]["param"]) == (400, field)
    assert "more than max_model_len = 256 tokens can spell" in answer["error"]["message"]
    assert not tokenised


@pytest.mark.parametrize("openai", [{"tool_call_parser": "nothing"}, {"reasoning_parser": "nothing"}])
def test_a_parser_that_does_not_exist_stops_the_start(llm, model, openai):
    with pytest.raises(ConfigError, match=r"openai\."):
        OpenAIServing(llm, configuration(model, **openai), "replica-1")


def test_a_template_that_does_not_exist_stops_the_start(llm, model):
    with pytest.raises(ConfigError, match=r"openai\.chat_template"):
        OpenAIServing(llm, configuration(model, chat_template="/nowhere/template.jinja"), "replica-1")


@pytest.fixture
def tuned(llm, model):
    """With an adapter of the name ``tuned``."""
    adapters = SimpleNamespace(requests={"tuned": LoRARequest("tuned", 1, "/a")}, using=lambda request: nullcontext())
    return OpenAIServing(llm, configuration(model), "replica-1", adapters)


async def test_adapters_are_listed_with_their_parent(tuned):
    _, listed = await whole(tuned, "models", {})
    assert [(card["id"], card["parent"]) for card in listed["data"]] == [("tiny", None), ("tuned", "tiny")]
    _, card = await whole(tuned, "models", {"id": "tuned"})
    assert card["id"] == "tuned"


@pytest.mark.parametrize("endpoint", ["chat", "completions", "tokenize"])
async def test_an_adapter_is_asked_for_by_model(tuned, llm, endpoint):
    body = {**(CHAT if endpoint == "chat" else {"prompt": "hi"})}
    for model, asked in (("tuned", "tuned"), ("tiny", None), (None, None)):
        status, said = await whole(tuned, endpoint, body if model is None else {**body, "model": model})
        assert status == 200, said
        if endpoint != "tokenize":
            assert said["model"] == (asked or "tiny")
            found = llm.options[-1].get("lora_request")
            assert (found and found.lora_name) == asked


@pytest.mark.parametrize(
    ("endpoint", "body"), [("completions", {"prompt": "hi", "model": "x"}), ("models", {"id": "x"})]
)
async def test_a_model_that_there_is_not_is_answered_with_those_that_there_are(tuned, endpoint, body):
    status, said = await whole(tuned, endpoint, body)
    assert (status, said["error"]["param"]) == (404, "model")
    assert said["error"]["message"] == "The model 'x' does not exist. Valid names: tiny, tuned."
