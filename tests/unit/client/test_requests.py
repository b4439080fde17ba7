"""Checks what the Python clients send, and errors and cancellation of a Serve handle."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import grpc
import pytest
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import BackPressureError

from outrider.deploy.client.handle import OutriderHandle
from outrider.deploy.client.requests import GenerationOptions, build_request
from outrider.deploy.client.sync_client import OutriderClient, OutriderError
from outrider.v1 import generation_pb2 as pb
from outrider.v1.handle_calls import CallFailed
from tests.unit.scripted_service import LOST, REFUSED, ScriptedService

CONVERSATION = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello!", "name": "Ann"}]


def test_options_reach_their_fields() -> None:
    options: dict[str, Any] = {
        "request_id": "r",
        "apply_chat_template": False,
        "top_k": -1,
        "stop_token_ids": [3],
        "num_speculative_tokens": 2,
        "verification": "coupled",
        "timeout_s": 0.0001,
        "bad_words": "word",
        "top_p": None,
        "logit_bias": {5: 1.0},
        "speculation": False,
    }
    assert build_request(pb.GenerateStreamRequest(), [1, 2], options) == pb.GenerateStreamRequest(
        request_id="r",
        token_ids=pb.TokenIds(ids=[1, 2]),
        apply_chat_template=False,
        sampling=pb.SamplingParameters(top_k=-1, stop_token_ids=[3], bad_words=["word"], logit_bias={5: 1.0}),
        speculation=pb.SpeculationParameters(
            enabled=False, num_speculative_tokens=2, verification=pb.VERIFICATION_COUPLED
        ),
        timeout_ms=1,  # not 0, which would be no timeout
    )


def test_every_sampling_parameter_is_an_option() -> None:
    fields = {field.name for field in pb.SamplingParameters.DESCRIPTOR.fields} - {"structured_outputs"}
    assert fields <= GenerationOptions.__annotations__.keys()


def test_a_constraint_becomes_structured_outputs() -> None:
    def constraint(**options: Any) -> pb.StructuredOutputs:
        return build_request(pb.GenerateRequest(), "x", options).sampling.structured_outputs

    assert constraint(json_schema={"type": "object"}) == pb.StructuredOutputs(json='{"type": "object"}')
    assert constraint(json_object=True) == pb.StructuredOutputs(json_object=True)
    assert constraint(regex="a+") == pb.StructuredOutputs(regex="a+")
    assert constraint(choice=["a", "b"]) == pb.StructuredOutputs(choice=pb.Choices(values=["a", "b"]))
    assert constraint(choice=[]).HasField("choice")


def test_a_conversation_is_sent_as_it_is() -> None:
    messages = [*CONVERSATION, pb.ChatMessage(role="assistant", content="yes")]
    template = {"add_generation_prompt": True, "chat_template_kwargs": {"enable_thinking": False, "tags": ["a"]}}
    chat = build_request(pb.GenerateRequest(), messages, {"max_tokens": 3, **template}).chat
    assert [(each.role, each.content, each.name) for each in chat.messages] == [
        ("system", "Be short.", ""),
        ("user", "Hello!", "Ann"),
        ("assistant", "yes", ""),
    ]
    assert (chat.add_generation_prompt, chat.HasField("continue_final_message")) == (True, False)
    assert chat.chat_template_kwargs["enable_thinking"] is False


@pytest.mark.parametrize(
    ("prompt", "options", "error", "argument"),
    [
        (["a", "b"], {}, TypeError, "prompt: send a text, token ids, or messages"),
        (None, {}, TypeError, "prompt"),
        ([CONVERSATION[0], "b"], {}, TypeError, "prompt"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, TypeError, "prompt"),
        ([{"role": "user", "tool_calls": []}], {}, ValueError, "prompt"),
        ("\udcff", {}, ValueError, "prompt"),
        ("x", {"max_tokens": -1}, ValueError, "max_tokens"),
        ("x", {"stop": [1]}, TypeError, "stop"),
        ("x", {"verification": "greedy"}, ValueError, "verification"),
        ("x", {"regex": "a", "choice": ["a"]}, ValueError, "choice and regex"),
        ("x", {"timeout_s": -1.0}, ValueError, "timeout_s"),
        ("x", {"json_schema": {"type": {1}}}, TypeError, "json_schema"),
        ("x", {"timeout_s": float("nan")}, ValueError, "timeout_s"),
        ("x", {"temprature": 1.0}, TypeError, "temprature"),
        ("x", {"structured_outputs": {"regex": "a"}}, TypeError, "structured_outputs"),
        ("x", {"add_generation_prompt": True}, TypeError, "add_generation_prompt"),
        (CONVERSATION, {"chat_template_kwargs": {"x": object()}}, ValueError, "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(
    client: OutriderClient, prompt: Any, options: dict, error: type[Exception], argument: str
) -> None:
    with pytest.raises(error, match=rf"^{argument}"):
        client.generate(prompt, **options)


def test_the_timeout_goes_into_the_call_and_into_the_request(client: OutriderClient, service: ScriptedService) -> None:
    client.generate("hi", timeout_s=30.0)
    assert service.requests[0].timeout_ms == 30_000
    assert service.deadline_s is not None
    assert service.deadline_s < 31.0
    list(client.stream("hi"))
    assert service.deadline_s is None
    assert not service.requests[1].HasField("timeout_ms")


def test_everything_else_the_api_has(client: OutriderClient, service: ScriptedService) -> None:
    assert client.tokenize("a b", add_special_tokens=False, return_token_strs=True, model="pair").count == 2
    client.tokenize(CONVERSATION, continue_final_message=True)
    assert client.detokenize([1, 2], skip_special_tokens=True).text == "text"
    text, chat, detokenize = service.requests
    assert text == pb.TokenizeRequest(text="a b", add_special_tokens=False, return_token_strs=True, model="pair")
    assert (len(chat.chat.messages), chat.chat.continue_final_message) == (2, True)
    assert detokenize == pb.DetokenizeRequest(token_ids=[1, 2], skip_special_tokens=True)
    with pytest.raises(TypeError, match="temperature"):
        client.tokenize("a", temperature=1.0)  # type: ignore[call-arg]
    assert (client.abort("r-running"), client.abort("r-over")) == (True, False)
    assert client.revert_drafter(0) == 9
    assert (client.model_info().vocab_size, client.status().model) == (300, "pair")


HANG = "hang"


def failed(failure: tuple[grpc.StatusCode, str]) -> CallFailed:
    return CallFailed(failure[0].value[0], failure[1])


class ScriptedHandle:
    """Stands in for Serve's handle. Each call takes the next script: messages, exceptions or HANG."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts, self.responses = list(scripts), []
        self.handle_unary = self.handle_stream = self

    def options(self, *, stream: bool) -> ScriptedHandle:
        assert stream
        return self

    def remote(self, rpc: str, request: bytes) -> ScriptedResponse:
        self.responses.append(ScriptedResponse(self.scripts.pop(0)))
        return self.responses[-1]


class ScriptedResponse:
    def __init__(self, script: list[Any]) -> None:
        self._script, self.cancelled = list(script), False

    def cancel(self) -> None:
        self.cancelled = True

    def __await__(self) -> Any:
        return self.__anext__().__await__()

    async def __anext__(self) -> bytes:
        if not self._script:
            raise StopAsyncIteration
        step = self._script.pop(0)
        if step is HANG:
            await asyncio.Event().wait()
        if isinstance(step, Exception):
            raise step
        return step.SerializeToString()


PART = pb.GenerateStreamResponse(text_delta="part")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (failed(REFUSED), grpc.StatusCode.INVALID_ARGUMENT),
        (failed(LOST), grpc.StatusCode.UNAVAILABLE),
        (BackPressureError(num_queued_requests=3, max_queued_requests=2), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (RayActorError(), grpc.StatusCode.UNAVAILABLE),
        (TaskCancelledError(), grpc.StatusCode.CANCELLED),
        (ValueError("a mistake"), grpc.StatusCode.INTERNAL),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.name,
)
async def test_whatever_goes_wrong_on_the_way_is_one_kind_of_error(error: Exception, code: grpc.StatusCode) -> None:
    with pytest.raises(OutriderError) as caught:
        await OutriderHandle(ScriptedHandle([error])).generate("hi", request_id="mine")
    assert caught.value.code is code
    assert caught.value.request_id == "mine"
    assert caught.value.field == ("sampling.temperature" if code is grpc.StatusCode.INVALID_ARGUMENT else None)
    with pytest.raises(OutriderError) as caught:
        await anext(OutriderHandle(ScriptedHandle([error])).stream("hi"))
    assert caught.value.code is code


async def test_a_call_is_cancelled_unless_it_has_ended() -> None:
    serve_handle = ScriptedHandle([HANG], [PART, PART], [PART, PART], [PART])
    handle = OutriderHandle(serve_handle)
    with pytest.raises(OutriderError, match="DEADLINE_EXCEEDED"):
        await handle.generate("hi", timeout_s=0.02)
    async with handle.stream("hi") as left:
        await anext(left)
    assert [message async for message in left] == []
    dropped = handle.stream("hi")
    await anext(dropped)
    del dropped
    gc.collect()
    async with handle.stream("hi") as ended:
        assert len([message async for message in ended]) == 1
    assert [response.cancelled for response in serve_handle.responses] == [True, True, True, False]
