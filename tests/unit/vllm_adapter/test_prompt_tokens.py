"""Tokenizes prompts through vLLM's renderer as the tokenizer itself does, and refuses others by field."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ModelConfig
from vllm.renderers import renderer_from_config

from outrider.actors.replica_calls import ChatMessage, ChatPrompt, GenerationRequest, RequestError, TokenizeRequest
from outrider.actors.vllm_adapter.prompts import PromptTokenizer
from tests.support.models.tiny_models import VOCAB_SIZE, build_tiny_llama

MAX_LEN = 64
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'wizard' %}{{ raise_exception('no role ' + message.role) }}{% endif %}"
    "<{{ message.role }}>{{ message.name }}{{ message.content }}{% if not loop.last or not continue %}|{% endif %}"
    "{% endfor %}{% if shout %}!{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SAID = (ChatMessage("system", "Be brief."), ChatMessage("user", "grün"))


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = build_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    config = ModelConfig(model=str(model), dtype="float32", max_model_len=MAX_LEN)
    parallel = SimpleNamespace(_api_process_rank=0)
    renderer = renderer_from_config(SimpleNamespace(model_config=config, parallel_config=parallel))  # type: ignore[arg-type]
    yield renderer
    renderer.shutdown()


@pytest.fixture
def tokens(renderer: Any) -> PromptTokenizer:
    return PromptTokenizer(renderer, VOCAB_SIZE, MAX_LEN, TEMPLATE)


def chat(*said: ChatMessage, **fields: Any) -> GenerationRequest:
    return GenerationRequest("r", prompt_chat=ChatPrompt(said or SAID, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"template_kwargs": {"shout": True}},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
)
async def test_a_conversation_is_what_the_tokenizers_own_template_makes_of_it(
    tokens: PromptTokenizer, renderer: Any, fields: dict[str, Any]
) -> None:
    own = dict(fields)
    own.update(own.pop("template_kwargs", {}))
    own.setdefault("add_generation_prompt", True)
    expected = renderer.get_tokenizer().apply_chat_template(
        [{"role": message.role, "content": message.content} for message in SAID],
        chat_template=TEMPLATE,
        tokenize=True,
        return_dict=False,
        **own,
    )
    assert await tokens.prompt_ids(chat(**fields)) == expected


async def test_a_speakers_name_reaches_the_template(tokens: PromptTokenizer) -> None:
    ids = await tokens.prompt_ids(chat(ChatMessage("user", "hi", name="Ada")))
    assert bytes(ids) == b"<user>Adahi|<assistant>"


async def test_text_with_the_template_is_one_user_message(tokens: PromptTokenizer) -> None:
    wrapped = GenerationRequest("r", prompt_text="hi", apply_chat_template=True)
    assert await tokens.prompt_ids(wrapped) == await tokens.prompt_ids(chat(ChatMessage("user", "hi")))


@pytest.mark.parametrize(
    ("request_", "field", "problem"),
    [
        (chat(ChatMessage("wizard", "hi")), "chat", "no role wizard"),
        (chat(ChatMessage("user", "x" * 5000)), "prompt", "5000 characters are more than max_model_len = 64 tokens"),
        (chat(template_kwargs={"tools": "hammer"}), "chat", ""),
        (GenerationRequest("r", prompt_text="x" * MAX_LEN), "prompt", "64 tokens leave no room"),
        (GenerationRequest("r", prompt_token_ids=(1, VOCAB_SIZE)), "token_ids", "272 is not in the vocabulary"),
    ],
)
async def test_what_the_model_cannot_take_is_named(
    tokens: PromptTokenizer, request_: GenerationRequest, field: str, problem: str
) -> None:
    with pytest.raises(RequestError) as caught:
        await tokens.prompt_ids(request_)
    assert caught.value.field == field
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("request_", "field"),
    [(chat(), "chat"), (GenerationRequest("r", prompt_text="hi", apply_chat_template=True), "apply_chat_template")],
)
async def test_a_model_without_a_template_takes_no_conversation(
    renderer: Any, request_: GenerationRequest, field: str
) -> None:
    tokens = PromptTokenizer(renderer, VOCAB_SIZE, MAX_LEN)
    assert not tokens.has_chat_template
    with pytest.raises(RequestError, match=f"^{field}: the model has no chat template"):
        await tokens.prompt_ids(request_)


async def test_tokenizing_gives_what_generation_reads_and_back(tokens: PromptTokenizer) -> None:
    found = await tokens.tokenize(TokenizeRequest(text="a grün", return_token_strs=True))
    assert list(found.token_ids) == await tokens.prompt_ids(GenerationRequest("r", prompt_text="a grün"))
    assert (len(found.token_strs), found.token_strs[0], found.max_model_len) == (7, "a", MAX_LEN)
    assert await tokens.detokenize(found.token_ids, skip_special_tokens=False) == "a grün"
    of_chat = await tokens.tokenize(TokenizeRequest(chat=ChatPrompt(SAID)))
    assert list(of_chat.token_ids) == await tokens.prompt_ids(chat())
    assert (await tokens.tokenize(TokenizeRequest(text=""))).token_ids == ()


async def test_special_tokens_are_text_unless_they_are_left_out(tokens: PromptTokenizer) -> None:
    assert await tokens.detokenize([72, 105, 256], skip_special_tokens=False) == "Hi<eos>"
    assert await tokens.detokenize([72, 105, 256], skip_special_tokens=True) == "Hi"
    assert await tokens.detokenize([], skip_special_tokens=False) == ""
    with pytest.raises(RequestError, match=r"^token_ids: id 272"):
        await tokens.detokenize([VOCAB_SIZE], skip_special_tokens=False)
