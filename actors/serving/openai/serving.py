"""OpenAI's endpoints inside a target replica: vLLM's own serving classes over the target's AsyncLLM.

They are built as vLLM's api_server builds them, and called without its routes, middleware and command line.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import replace
from http import HTTPStatus
from importlib import metadata
from typing import Any, TypeVar

from starlette.requests import Request
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.exceptions import RetryableRequestError, VLLMClientError
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from outrider.actors.openai_calls import OpenAIHead, OpenAIRequest, TokensUsed, chars_beside, num_chars
from outrider.actors.replica_calls import OF_THE_CALLER, ReplicaLost, RequestError
from outrider.actors.request_checks import shortened, shown
from outrider.actors.request_constraints import check_kind
from outrider.actors.round.request import EXTRA_ARGS_KEY
from outrider.actors.serving.openai.blamed import by_its_name
from outrider.actors.serving.openai.checked_engine import TALLY, CheckedEngine, Tally
from outrider.actors.serving.openai.errors import HttpFailure, failed_inside, failure_of, refused, timed_out
from outrider.actors.serving.openai.pictures import pictures
from outrider.actors.serving.openai.responses import ID_PREFIX, ResponsesServing, as_validated, texts_of
from outrider.actors.serving.openai.schema import openapi, problem_of, validated
from outrider.actors.vllm_seam.adapters import Adapters
from outrider.actors.vllm_seam.answer_parsers import answer_parsers, described
from outrider.actors.vllm_seam.pictures import FIELDS
from outrider.actors.vllm_seam.prompts import check_length, configured_chat_template
from outrider.cluster.answer_parsers import Parsers
from outrider.cluster.config import ConfigError, OutriderConfig

logger = logging.getLogger("ray.serve.outrider.openai")

COUNT_EVERY_TOKENS = 16
"""A client that leaves in the middle of a stream has fewer tokens than these that nobody has counted."""

_ERROR_EVENT = 'data: {"error":'
EVENTS = "text/event-stream"
Generating = TypeVar("Generating", ChatCompletionRequest, CompletionRequest, ResponsesRequest)
_STREAM_LOGGERS = tuple(f"vllm.entrypoints.openai.{module}.serving" for module in ("chat_completion", "completion"))


class OpenAIServing:
    """Answers OpenAIRequests, several at once."""

    def __init__(
        self, llm: AsyncLLM, config: OutriderConfig, replica_id: str, adapters: Adapters | None = None
    ) -> None:
        """adapters: that ``model`` may name. Raises ConfigError for a chat template or parser that cannot be had."""
        self._config, self._replica_id = config, replica_id
        co_located = config.co_located.method if config.co_located else None
        engine: Any = CheckedEngine(llm, co_located, config.serving.structured_output, adapters, config.limits)
        template = configured_chat_template(config)
        self.parsers = answer_parsers(config, llm.model_config)
        parsers = _as_options(self.parsers)
        self._models = OpenAIServingModels(engine, [BaseModelPath(config.served_model_name, config.target.model)])
        if adapters is not None:
            self._models.lora_requests = adapters.requests
        chat: dict[str, Any] = {
            "request_logger": None,
            "chat_template": template,
            "chat_template_content_format": "auto",
        }
        try:
            renderer = OnlineRenderer(llm.model_config, llm.renderer, **chat, **parsers)
            self._chat = OpenAIServingChat(
                engine,
                self._models,
                "assistant",
                online_renderer=renderer,
                enable_prompt_tokens_details=True,
                **chat,
                **parsers,
            )
            self._responses = ResponsesServing(
                engine,
                self._models,
                renderer,
                enable_prompt_tokens_details=True,
                **chat,
                **parsers,
            )
        except (TypeError, ValueError, KeyError, ImportError) as error:
            names = ", ".join(f"openai.{name}" for name in ("tool_call_parser", "reasoning_parser"))
            raise ConfigError(f"{names}: {error}") from error
        self._completions = OpenAIServingCompletion(
            engine, self._models, online_renderer=renderer, request_logger=None, enable_prompt_tokens_details=True
        )
        self._renderer = llm.renderer
        self._tokenization = ServingTokenization(self._models, renderer, **chat)
        openapi(metadata.version("outrider"))  # made once, now: later all answers would wait for it
        logger.info("%s", described(config, self.parsers))
        for name in _STREAM_LOGGERS:
            logging.getLogger(name).addFilter(_is_news)

    async def answer(self, request: OpenAIRequest) -> AsyncGenerator[OpenAIHead | str | TokensUsed, None]:
        """A head, then the body's parts, and in between what they have cost. Closing the generator, or cancelling it,
        aborts the request.

        Raises ReplicaLost when the engine is gone before the answer has begun. Whatever else goes wrong is an answer
        too.
        """
        tally, counted = Tally(), False
        TALLY.set(tally)
        try:
            result = await _within(request.seconds_left(), self._result(request))
        except TimeoutError:
            failure = timed_out(request.request_id)
        except (EngineDeadError, RetryableRequestError) as error:
            raise ReplicaLost(self._replica_id, str(error)) from None
        except Exception as error:  # noqa: BLE001 - the client gets a status and a sentence, the log the rest
            failure = by_its_name(_failure_of(error, request.request_id), request)
        else:
            async with aclosing(_parts(result, request, self._replica_id)) as parts:
                async for part in parts:
                    if isinstance(part, str) and tally.uncounted >= (COUNT_EVERY_TOKENS if counted else 1):
                        counted = True
                        yield tally.take()
                    yield part
            if tally.uncounted:
                yield tally.take()
            return
        yield OpenAIHead(failure.status, headers=failure.headers)
        yield json.dumps(failure.body())

    async def _result(self, request: OpenAIRequest) -> Any:
        """The whole answer: a model of vLLM's, an ErrorResponse too, or JSON text; or a generator of events."""
        raw = _raw_request(request)
        FIELDS.set(pictures(request.endpoint, request.body))
        if (not_found := self._unknown_model(request)) is not None:
            return not_found
        match request.endpoint:
            case "chat":
                return await self._chat.create_chat_completion(self._chat_request(request), raw)
            case "completions":
                return await self._completions.create_completion(self._request(CompletionRequest, request), raw)
            case "responses":
                return await self._responses.create_responses(self._responses_request(request), raw)
            case "tokenize":
                return await self._tokenization.create_tokenize(self._tokenize_request(request), raw)
            case "detokenize":
                return await self._tokenization.create_detokenize(self._detokenize_request(request), raw)
            case "models":
                models = await self._models.show_available_models()
                asked = request.body.get("id")
                return models if asked is None else next(card for card in models.data if card.id == asked)
            case "openapi":
                return json.dumps(openapi(metadata.version("outrider")))

    def _unknown_model(self, request: OpenAIRequest) -> ErrorResponse | None:
        """vLLM names the model alone, not its adapters, and says again what was asked for, however long."""
        asked = request.body.get("model", request.body.get("id"))
        adapters = self._models.lora_requests
        if not isinstance(asked, str) or asked in adapters or self._models.is_base_model(asked):
            return None
        names = ", ".join([self._models.model_name(), *adapters])
        message = f"The model {shown(asked)} does not exist. Valid names: {names}."
        return create_error_response(message, "NotFoundError", HTTPStatus.NOT_FOUND, "model")

    def _chat_request(self, request: OpenAIRequest) -> ChatCompletionRequest:
        parsed = self._request(ChatCompletionRequest, request)
        self._check_tools(request, parsed.tool_choice)
        return parsed

    def _responses_request(self, request: OpenAIRequest) -> ResponsesRequest:
        given = request.body["input"]
        body = {**request.body, "request_id": f"{ID_PREFIX}{request.request_id}", "store": False}
        if isinstance(given, list):
            body["input"] = ""
        parsed = self._request(ResponsesRequest, replace(request, body=body))
        if isinstance(given, list):
            parsed.input = as_validated(given)
        self._check_tools(request, parsed.tool_choice)
        return parsed

    def _check_tools(self, request: OpenAIRequest, choice: Any) -> None:
        """choice: vLLM's reading of tool_choice."""
        if self.parsers.tool_call is None and choice not in (None, "none"):
            raise RequestError(
                "tools" if "tool_choice" not in request.body else "tool_choice",
                "this deployment does not know how its model calls tools (openai.tool_call_parser)",
                "send tool_choice none, or no tools",
            )

    def _tokenize_request(self, request: OpenAIRequest) -> TokenizeChatRequest | TokenizeCompletionRequest:
        """vLLM bounds what it is to answer, and not what it is only to tokenise."""
        if "messages" in request.body:
            parsed: TokenizeChatRequest | TokenizeCompletionRequest = validated(TokenizeChatRequest, request.body)
            field, length = "messages", num_chars(request.body["messages"]) + chars_beside(request.body)
        else:
            parsed = validated(TokenizeCompletionRequest, request.body)
            field, length = "prompt", num_chars(request.body["prompt"])
        check_length(field, length, self._renderer.get_tokenizer(), self._models.model_config.max_model_len)
        return parsed

    def _detokenize_request(self, request: OpenAIRequest) -> DetokenizeRequest:
        parsed = validated(DetokenizeRequest, request.body)
        vocab_size = self._models.model_config.get_vocab_size()
        if (worst := max(parsed.tokens, default=0)) >= vocab_size:
            raise RequestError("tokens", f"{worst} is not in the vocabulary", f"send ids below {vocab_size}")
        return parsed

    def _request(self, kind: type[Generating], request: OpenAIRequest) -> Generating:
        """vLLM's request, with what is ours in what becomes SamplingParams.extra_args."""
        if request.round_options.keys() - OF_THE_CALLER and self._config.co_located is not None:
            raise RequestError("speculation", "this deployment drafts for every request alike", "leave it out")
        self._check_structural_tag(request)
        parsed = validated(kind, request.body)
        ours = dict(request.round_options)
        if request.deadline is not None:
            ours["deadline"] = request.deadline  # CheckedEngine makes what is left of it
        if ours:
            parsed.vllm_xargs = {EXTRA_ARGS_KEY: ours}  # set past vLLM's validation
        return parsed

    def _check_structural_tag(self, request: OpenAIRequest) -> None:
        """vLLM makes one of tools, so CheckedEngine cannot tell who wrote it."""
        response_format, structured = (request.body.get(name) for name in ("response_format", "structured_outputs"))
        for field, written in (
            ("response_format", isinstance(response_format, dict) and response_format.get("type") == "structural_tag"),
            ("structured_outputs", isinstance(structured, dict) and structured.get("structural_tag") is not None),
        ):
            if written:
                check_kind(field, "structural_tag", self._config.serving.structured_output)


async def _parts(result: Any, request: OpenAIRequest, replica_id: str) -> AsyncGenerator[OpenAIHead | str, None]:
    if isinstance(result, AsyncGenerator):
        texts = texts_of(result) if request.endpoint == "responses" else result
        async with aclosing(result), aclosing(texts), aclosing(_events(texts, request, replica_id)) as events:
            async for event in events:
                yield event
    elif isinstance(result, ErrorResponse):
        failure = by_its_name(HttpFailure(result.error.code, result.error.message, result.error.param), request)
        yield OpenAIHead(failure.status)
        yield json.dumps(failure.body())
    else:
        yield OpenAIHead(200)
        yield result if isinstance(result, str) else result.model_dump_json()


async def _events(
    events: AsyncGenerator[str, None], request: OpenAIRequest, replica_id: str
) -> AsyncGenerator[OpenAIHead | str, None]:
    """vLLM begins a stream before the engine has seen its request: an error in place of the first event becomes the
    status. An error after that is an event. Whether it writes errors or raises them is the endpoint's."""
    sent = 0
    try:
        while True:
            async with asyncio.timeout(request.seconds_left()):
                event = await anext(events, None)
            if event is None:
                return
            if event.startswith(_ERROR_EVENT):
                failure = by_its_name(_failure_in(event, request.request_id), request)
                if not sent and failure.status == HTTPStatus.SERVICE_UNAVAILABLE:
                    raise ReplicaLost(replica_id, failure.message)
                break
            if not sent:
                yield OpenAIHead(200, EVENTS)
            sent += 1
            yield event
    except TimeoutError:
        failure = timed_out(request.request_id)
    except ReplicaLost:
        raise
    except (EngineDeadError, RetryableRequestError) as error:
        lost = ReplicaLost(replica_id, str(error))
        if not sent:
            raise lost from None
        failure = failure_of(lost, request.request_id)
    except Exception as error:  # noqa: BLE001 - the client gets a status and a sentence, the log the rest
        failure = by_its_name(_failure_of(error, request.request_id), request)
    if sent:
        yield failure.event_of(request.endpoint, sent)
    else:
        yield OpenAIHead(failure.status, headers=failure.headers)
        yield json.dumps(failure.body())


def _failure_in(event: str, request_id: str) -> HttpFailure:
    """vLLM has logged what a server error's message would tell."""
    error = json.loads(event.removeprefix("data:"))["error"]
    if error["code"] == HTTPStatus.INTERNAL_SERVER_ERROR:
        return failed_inside(request_id)
    return HttpFailure(error["code"], shortened(error["message"]), error["param"])


async def _within(seconds: float | None, result: Coroutine[Any, Any, Any]) -> Any:
    """In a task of its own: vLLM's classes swallow a cancellation, which would then look like an answer.

    Raises TimeoutError.
    """
    task = asyncio.ensure_future(result)
    try:
        done, _ = await asyncio.wait([task], timeout=seconds)
        if not done:
            raise TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


def _failure_of(error: Exception, request_id: str) -> HttpFailure:
    if isinstance(error, RequestError):
        return refused(error)
    described = create_error_response(error).error
    if described.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return failure_of(error, request_id)
    message = problem_of(error) if isinstance(error, VLLMClientError) else shortened(described.message)
    return HttpFailure(described.code, message, described.param)


def _raw_request(request: OpenAIRequest) -> Request:
    """What vLLM's classes look at of the HTTP request: headers with the id and the caller's trace."""
    headers = {"x-request-id": request.request_id, **request.trace_headers}
    encoded = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": encoded})


def _as_options(parsers: Parsers) -> dict[str, Any]:
    return {
        "enable_auto_tools": parsers.tool_call is not None,
        "tool_parser": parsers.tool_call,
        "reasoning_parser": parsers.reasoning or "",
    }


def _is_news(record: logging.LogRecord) -> bool:
    """vLLM logs a traceback for every stream that fails, a refused request's too."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (VLLMClientError, ValueError))
