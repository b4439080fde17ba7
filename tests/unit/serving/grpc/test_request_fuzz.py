"""Random and damaged requests pass every check before the engine, or are refused by the name of a field."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import ModelConfig, StructuredOutputsConfig
from vllm.exceptions import VLLMClientError
from vllm.renderers import renderer_from_config

from outrider.actors.replica_calls import RequestError
from outrider.actors.serving.grpc.requests import ServedModel, to_generation_request
from outrider.actors.vllm_adapter.engine_requests import refusal, sampling_params
from outrider.actors.vllm_adapter.prompts import PromptTokenizer
from outrider.v1 import generation_pb2 as pb
from tests.support.cluster.serving import CHAT_TEMPLATE
from tests.support.fuzz.protobuf import FUZZ, damaged, generations, messages
from tests.support.models.tiny_models import VOCAB_SIZE, build_tiny_llama

SERVED = ServedModel("pair", 8)
MAX_LEN = 64


def requests(kind: type[Message]) -> st.SearchStrategy[Any]:
    """Draws random messages, and those that damaged bytes decode to."""

    def decoded(data: bytes) -> Message | None:
        try:
            return kind.FromString(data)
        except DecodeError:
            return None

    whole = messages(kind.DESCRIPTOR)
    if kind is pb.GenerateRequest:
        whole = st.one_of(whole, generations(kind.DESCRIPTOR))
    spoiled = whole.flatmap(lambda message: damaged(message.SerializeToString())).map(decoded)
    return st.one_of(whole, spoiled.filter(lambda message: message is not None))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PromptTokenizer]:
    model = build_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    config = ModelConfig(model=str(model), dtype="float32", max_model_len=MAX_LEN)
    parallel = SimpleNamespace(_api_process_rank=0)
    renderer = renderer_from_config(SimpleNamespace(model_config=config, parallel_config=parallel))  # type: ignore[arg-type]
    yield PromptTokenizer(renderer, VOCAB_SIZE, MAX_LEN, CHAT_TEMPLATE)
    renderer.shutdown()


def test_generation_requests_are_taken_or_refused_by_name(tokens: PromptTokenizer) -> None:
    model = SimpleNamespace(is_diffusion=False, max_logprobs=20, get_vocab_size=lambda: VOCAB_SIZE)
    taken = 0
    refused: dict[str, str] = {}

    async def check(message: Any) -> None:
        asked = to_generation_request(message, SERVED, request_id="r")
        params = sampling_params(asked, len(await tokens.prompt_ids(asked)), MAX_LEN)
        try:
            params.verify(model, None, StructuredOutputsConfig(backend="xgrammar"), SimpleNamespace())
        except VLLMClientError as error:
            raise refusal(error, asked) from None

    @settings(FUZZ, max_examples=1000)
    @given(requests(pb.GenerateRequest))
    def send(message: Any) -> None:
        nonlocal taken
        try:
            loop.run(check(message))
        except RequestError as error:
            refused[error.field] = max(refused.get(error.field, ""), str(error), key=len)
        else:
            taken += 1

    with asyncio.Runner() as loop:
        send()
    assert taken > 20, "nearly everything was refused at the first look"
    assert len(refused) > 10
    assert [said for said in refused.values() if "\n" in said or len(said) >= 1000] == []
