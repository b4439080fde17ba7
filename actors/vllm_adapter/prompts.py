"""Tokenizes prompts and conversations with vLLM's renderer, off the event loop, and checks that they fit the model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.inputs import TextPrompt
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.params import ChatParams, TokenizeParams
from vllm.utils.mistral import is_mistral_tokenizer

from outrider.actors.replica_calls import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    RequestError,
    TokenizeRequest,
    Tokens,
)
from outrider.actors.vllm_adapter.error_text import shorten
from outrider.cluster.config import ConfigError, OutriderConfig


def configured_chat_template(config: OutriderConfig) -> str | None:
    """Returns the configured chat template, None for the tokenizer's own. Raises ConfigError for an unreadable file."""
    try:
        template: str | None = load_chat_template(config.openai.chat_template)
    except (VLLMClientError, ValueError, OSError) as error:
        raise ConfigError(f"openai.chat_template: {error.args[0] if error.args else error}") from error
    return template


class PromptTokenizer:
    """Tokenizes requests' prompts, and detokenizes.

    renderer: AsyncLLM's, whose tokenizer may be used by several threads. vocab_size: the model's rows, which may be
    more than the tokenizer has tokens. chat_template: a template in place of the tokenizer's own.
    """

    def __init__(self, renderer: Any, vocab_size: int, max_model_len: int, chat_template: str | None = None) -> None:
        self._renderer, self._chat_template = renderer, chat_template
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    @property
    def has_chat_template(self) -> bool:
        tokenizer = self._renderer.get_tokenizer()
        template = self._chat_template or getattr(tokenizer, "chat_template", None)
        return bool(template) or is_mistral_tokenizer(tokenizer)

    @property
    def name(self) -> str:
        """Returns the tokenizer's class name, without vLLM's wrappers."""
        name = type(self._renderer.get_tokenizer()).__name__
        for wrapper in ("TokenizerPool", "Cached"):
            name = name.removeprefix(wrapper)
        return name

    async def prompt_ids(self, request: GenerationRequest) -> list[int]:
        """Returns the prompt's token ids. Raises RequestError for a prompt that the model cannot take."""
        if request.prompt_token_ids is not None:
            ids = list(request.prompt_token_ids)
            self._check_vocabulary(ids)
        elif request.prompt_chat is not None:
            ids = await self._chat_ids(request.prompt_chat, add_special_tokens=False)
        elif request.apply_chat_template:
            if not self.has_chat_template:
                raise RequestError("apply_chat_template", "the model has no chat template", "send the text as it is")
            said = (ChatMessage("user", request.prompt_text or ""),)
            ids = await self._chat_ids(ChatPrompt(said), add_special_tokens=False, field="apply_chat_template")
        else:
            ids = await self._text_ids(request.prompt_text or "", add_special_tokens=True)
        if not ids:
            raise RequestError("prompt", "it has no tokens", "send a prompt")
        if len(ids) >= self._max_model_len:
            raise RequestError(
                "prompt",
                f"{len(ids)} tokens leave no room for an answer in max_model_len = {self._max_model_len}",
                f"send at most {self._max_model_len - 1} tokens",
            )
        return ids

    async def tokenize(self, request: TokenizeRequest) -> Tokens:
        """Tokenizes a text or a conversation. Raises RequestError."""
        if request.chat is not None:
            ids = await self._chat_ids(request.chat, add_special_tokens=bool(request.add_special_tokens))
        else:
            add = request.add_special_tokens if request.add_special_tokens is not None else True
            ids = await self._text_ids(request.text or "", add_special_tokens=add)
        strs = self._renderer.get_tokenizer().convert_ids_to_tokens(ids) if request.return_token_strs else ()
        return Tokens(tuple(ids), self._max_model_len, tuple(strs))

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Returns the text of tokens. Raises RequestError for ids the model does not have."""
        self._check_vocabulary(token_ids)
        tokenizer = self._renderer.get_tokenizer()
        text: str = await asyncio.to_thread(tokenizer.decode, list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    async def _chat_ids(self, chat: ChatPrompt, *, add_special_tokens: bool, field: str = "chat") -> list[int]:
        tokenizer = self._renderer.get_tokenizer()
        if not self.has_chat_template:
            raise RequestError(field, "the model has no chat template", "send the prompt as text or token_ids")
        self._check_length(sum(len(message.content) for message in chat.messages))
        settings = {
            **chat.template_kwargs,
            "add_generation_prompt": chat.add_generation_prompt,
            "continue_final_message": chat.continue_final_message,
            "tokenize": is_mistral_tokenizer(tokenizer),  # whose template gives tokens, never text
        }
        messages = [_as_dict(message) for message in chat.messages]
        params = ChatParams(chat_template=self._chat_template, chat_template_kwargs=settings)
        try:
            _, prompt = await self._renderer.render_messages_async(messages, params)
        except (VLLMClientError, ValueError, TypeError, KeyError, TimeoutError) as error:
            # A template is a program, and these errors come from its input.
            raise RequestError(field, _problem(error), "send a conversation that the model's template takes") from None
        if "prompt_token_ids" in prompt:
            return list(prompt["prompt_token_ids"])
        return await self._text_ids(prompt["prompt"], add_special_tokens=add_special_tokens)

    async def _text_ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self._check_length(len(text))
        params = TokenizeParams(max_total_tokens=None, add_special_tokens=add_special_tokens)
        tokens = await self._renderer.tokenize_prompt_async(TextPrompt(prompt=text), params)
        return list(tokens["prompt_token_ids"])

    def _check_length(self, num_characters: int) -> None:
        """Refuses a text that cannot fit, before spending seconds on it."""
        most = self._max_model_len * self._renderer.get_tokenizer().max_chars_per_token
        if num_characters > most:
            problem = (
                f"{num_characters} characters are more than max_model_len = {self._max_model_len} tokens can spell"
            )
            raise RequestError("prompt", problem, f"send at most {most} characters")

    def _check_vocabulary(self, token_ids: Sequence[int]) -> None:
        worst = max(token_ids, default=0)
        if worst >= self._vocab_size:
            raise RequestError(
                "token_ids", f"id {worst} is not in the vocabulary", f"send ids below {self._vocab_size}"
            )


def _as_dict(message: ChatMessage) -> dict[str, str]:
    fields = {"role": message.role, "content": message.content}
    return fields if message.name is None else {**fields, "name": message.name}


def _problem(error: Exception) -> str:
    return shorten(str(error.args[0] if error.args else error)) or type(error).__name__
