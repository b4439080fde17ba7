"""Random and mutated requests, through every check before the engine: refused by name, or taken. Nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from vllm.config import ModelConfig, StructuredOutputsConfig
from vllm.exceptions import VLLMClientError
from vllm.renderers import renderer_from_config

from outrider.actors.replica_calls import RequestError
from outrider.actors.serving.grpc.requests import ServedModel, to_generation_request, to_tokenize_request
from outrider.actors.vllm_adapter.engine_requests import refusal, sampling_params
from outrider.actors.vllm_adapter.prompts import PromptTokenizer
from outrider.v1 import generation_pb2 as pb
from tests.support.cluster.serving import CHAT_TEMPLATE
from tests.support.models.tiny_models import VOCAB_SIZE, build_tiny_llama

NUM_REQUESTS = 10_000
SERVED = ServedModel("pair", 8)
MAX_LEN = 64

KIND = FieldDescriptor
WHOLE = (
    0,
    1,
    -1,
    2,
    7,
    63,
    64,
    65,
    255,
    256,
    VOCAB_SIZE - 1,
    VOCAB_SIZE,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    -(2**63),
)
REAL = (0.0, -0.0, 1.0, 0.5, 1e-9, -1.0, 2.0, 100.0, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
TEXT = (
    "",
    "a",
    "user",
    "pair",
    "\0",
    "é\u200d",
    "\U0001f600",
    "{{ 1 / 0 }}",
    '{"type": "object"}',
    "[a",
    "root ::= (",
    "x" * 300,
)


def value(field: FieldDescriptor, rng: random.Random) -> Any:
    if field.type == KIND.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == KIND.TYPE_ENUM:
        return rng.choice((0, 1, 2, 3, 99))
    if field.type in (KIND.TYPE_DOUBLE, KIND.TYPE_FLOAT):
        return rng.choice(REAL)
    if field.type == KIND.TYPE_STRING:
        return rng.choice(TEXT)
    least, most = {
        KIND.TYPE_UINT32: (0, 2**32 - 1),
        KIND.TYPE_UINT64: (0, 2**64 - 1),
        KIND.TYPE_INT32: (-(2**31), 2**31 - 1),
        KIND.TYPE_INT64: (-(2**63), 2**63 - 1),
    }[field.type]
    return rng.choice([number for number in WHOLE if least <= number <= most])


def fill(message: Message, rng: random.Random, chance: float, depth: int = 0) -> None:
    for field in message.DESCRIPTOR.fields:
        if depth > 6 or rng.random() > chance:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, of = field.message_type.fields
            for _ in range(rng.randrange(1, 4)):
                if of.message_type is not None:
                    fill(getattr(message, field.name)[value(key, rng)], rng, 0.5, depth + 1)
                else:
                    getattr(message, field.name)[value(key, rng)] = value(of, rng)
        elif field.is_repeated:
            for _ in range(rng.randrange(1, 4)):
                if field.message_type is not None:
                    fill(getattr(message, field.name).add(), rng, 0.7, depth + 1)
                else:
                    getattr(message, field.name).append(value(field, rng))
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            fill(getattr(message, field.name), rng, chance, depth + 1)
        else:
            setattr(message, field.name, value(field, rng))


def requests(kind: type[Message]) -> Iterator[Any]:
    """Half of them random, half with bytes of a random one changed, as far as those decode."""
    rng = random.Random(11)
    made = 0
    while made < NUM_REQUESTS:
        message = kind()
        fill(message, rng, rng.choice((0.1, 0.3, 0.8)))
        if made % 2:
            data = bytearray(message.SerializeToString())
            for _ in range(rng.randrange(1, 4)):
                if data:
                    data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                message = kind.FromString(bytes(data))
            except DecodeError:
                continue
        made += 1
        yield message


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PromptTokenizer]:
    model = build_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    config = ModelConfig(model=str(model), dtype="float32", max_model_len=MAX_LEN)
    parallel = SimpleNamespace(_api_process_rank=0)
    renderer = renderer_from_config(SimpleNamespace(model_config=config, parallel_config=parallel))  # type: ignore[arg-type]
    yield PromptTokenizer(renderer, VOCAB_SIZE, MAX_LEN, CHAT_TEMPLATE)
    renderer.shutdown()


async def test_generation_requests_are_taken_or_refused_by_name(tokens: PromptTokenizer) -> None:
    model = SimpleNamespace(is_diffusion=False, max_logprobs=20, get_vocab_size=lambda: VOCAB_SIZE)
    taken, refused = 0, []
    for message in requests(pb.GenerateRequest):
        try:
            asked = to_generation_request(message, SERVED, request_id="r")
            params = sampling_params(asked, len(await tokens.prompt_ids(asked)), MAX_LEN)
            try:
                params.verify(model, None, StructuredOutputsConfig(backend="xgrammar"), SimpleNamespace())
            except VLLMClientError as error:
                raise refusal(error, asked) from None
        except RequestError as error:
            refused.append(error)
            continue
        taken += 1
    assert taken > 20, "nearly everything was refused at the first look"
    assert len({error.field for error in refused}) > 20
    for error in refused:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000


async def test_prompts_to_tokenize_are_taken_or_refused_by_name(tokens: PromptTokenizer) -> None:
    taken = 0
    for message in requests(pb.TokenizeRequest):
        try:
            await tokens.tokenize(to_tokenize_request(message))
        except RequestError:
            continue
        taken += 1
    assert taken > 200


async def test_tokens_to_detokenize_are_taken_or_refused_by_name(tokens: PromptTokenizer) -> None:
    taken = 0
    for message in requests(pb.DetokenizeRequest):
        try:
            await tokens.detokenize(message.token_ids, message.skip_special_tokens)
        except RequestError:
            continue
        taken += 1
    assert taken > 200
