"""vLLM's request models: bodies held against them, with what they find wrong in one sentence about one field, and
``/openapi.json``, which describes them as far as their fields are taken here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from pydantic_core import SchemaValidator
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, ModelCard, ModelList
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeResponse,
)
from vllm.exceptions import VLLMClientError, VLLMValidationError

from outrider.actors.replica_calls import RequestError
from outrider.actors.request_checks import shortened
from outrider.actors.serving.openai.blamed import named_in
from outrider.actors.serving.openai.fields import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE, Refused, Rules
from outrider.actors.serving.openai.responses_fields import RESPONSES
from outrider.cluster.modes import BY_NAME

Model = TypeVar("Model", bound=BaseModel)

_MAX_ALTERNATIVES = 3

_CONTAINERS = ("list", "tuple", "set", "frozenset", "dict")
"""Kinds of pydantic's core schemas that can end at their first error."""

_READ_WRONG = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)
"""What vLLM's validators run into that read the body before its types have been checked."""


def validated(kind: type[Model], body: Mapping[str, Any]) -> Model:
    """Raises RequestError, with the path of the field at fault where vLLM knows it."""
    try:
        return cast(Model, _validator(kind).validate_python(dict(body)))
    except ValidationError as error:
        raise _explain(error, body) from None
    except VLLMClientError as error:
        problem = problem_of(error)
        field = _parameter(error) or named_in(problem, body) or "body"
        raise RequestError(field, problem, "change it or leave it out") from None
    except _READ_WRONG as error:
        problem = f"cannot be read as {kind.__name__}: {type(error).__name__}: {error}"
        raise RequestError("body", shortened(problem), "check the types of its fields") from None


@cache
def _validator(kind: type[BaseModel]) -> SchemaValidator:
    """Pydantic's own of vLLM's model, but for one thing: the first wrong member of a list or mapping ends it. All of
    them, a million perhaps, would be described one by one."""
    return SchemaValidator(_first_error_only(kind.__pydantic_core_schema__))


def _first_error_only(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_first_error_only(part) for part in schema]
    if isinstance(schema, tuple):
        return tuple(_first_error_only(part) for part in schema)
    if not isinstance(schema, dict):
        return schema
    copied = {key: _first_error_only(part) if key != "metadata" else part for key, part in schema.items()}
    return {**copied, "fail_fast": True} if schema.get("type") in _CONTAINERS else copied


def problem_of(error: Exception) -> str:
    """Without what VLLMValidationError's own text adds: all of the value, however long."""
    if isinstance(error, VLLMValidationError) and error.args:
        return shortened(str(error.args[0]))
    return shortened(str(error))


def _parameter(error: Exception) -> str | None:
    return getattr(error, "parameter", None)


def _explain(error: ValidationError, body: Mapping[str, Any]) -> RequestError:
    """Of a value that may be of several types, pydantic reports what is wrong with it as each of them. Those that it
    says itself it is not, by a role or a type of another name, are left out where others are left."""
    errors = error.errors(include_url=False)
    others = {_kind(item["loc"], body) for item in errors if item["type"] == "literal_error"}
    errors = [item for item in errors if _kind(item["loc"], body) not in others] or errors
    found = [(_path(item["loc"], item["type"], body), item["msg"]) for item in errors]
    path = found[0][0]
    problems = list(dict.fromkeys(problem for where, problem in found if where == path))[:_MAX_ALTERNATIVES]
    return RequestError(path or "body", shortened(", or: ".join(problems)), "change it or leave it out")


def _kind(location: tuple[int | str, ...], body: Mapping[str, Any]) -> tuple[int | str, ...]:
    """A pydantic location up to the first step that names a type, and leads nowhere in the body."""
    at: Any = body
    for number, step in enumerate(location):
        if not _leads_on(at, step):
            return location[: number + 1]
        at = at[step]
    return location


def _leads_on(at: Any, step: int | str) -> bool:
    return step in at if isinstance(at, dict) else isinstance(at, list) and step in range(len(at))


def _path(location: tuple[int | str, ...], kind: str, body: Mapping[str, Any]) -> str:
    """The steps of a pydantic location that lead through the body; the others name types."""
    parts: list[str] = []
    at: Any = body
    for step in location:
        if _leads_on(at, step):
            at = at[step]
            parts.append(str(step))
    if kind == "missing":
        parts.append(str(location[-1]))
    return ".".join(parts)


_REQUESTS: dict[type[BaseModel], Rules] = {
    ChatCompletionRequest: CHAT,
    CompletionRequest: COMPLETIONS,
    ResponsesRequest: RESPONSES,
    TokenizeCompletionRequest: TOKENIZE,
    TokenizeChatRequest: TOKENIZE,
    DetokenizeRequest: DETOKENIZE,
}
_ANSWERS = (
    ChatCompletionResponse,
    CompletionResponse,
    ResponsesResponse,
    TokenizeResponse,
    DetokenizeResponse,
    ModelList,
    ModelCard,
)

_SPECULATION = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "enabled": {"type": "boolean"},
        "num_speculative_tokens": {"type": "integer", "minimum": 1},
        "verification": {"type": "string", "enum": list(BY_NAME)},
    },
}

_ERRORS = {
    "400": "a field is wrong, unknown or not supported",
    "404": "no such model",
    "408": "the deadline of x-request-timeout-ms passed",
    "413": "the body is too long",
    "415": "the body is not JSON",
    "429": "the queue is full",
    "500": "the server failed",
    "503": "no replica is available",
}


@cache
def openapi(version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document. version: of the API."""
    models = [*_REQUESTS, *_ANSWERS, ErrorResponse]
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    schemas = definitions["$defs"]
    for model, rules in _REQUESTS.items():
        _keep_what_is_taken(schemas[model.__name__], rules)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": version},
        "paths": {
            "/v1/chat/completions": _post([ChatCompletionRequest], ChatCompletionResponse, streams=True),
            "/v1/completions": _post([CompletionRequest], CompletionResponse, streams=True),
            "/v1/responses": _post([ResponsesRequest], ResponsesResponse, streams=True),
            "/tokenize": _post([TokenizeCompletionRequest, TokenizeChatRequest], TokenizeResponse),
            "/detokenize": _post([DetokenizeRequest], DetokenizeResponse),
            "/v1/models": _get(_json(ModelList)),
            "/v1/models/{model}": _get(_json(ModelCard), parameter="model"),
            "/health": _get({}),
            "/version": _get({"application/json": {"schema": {"type": "object"}}}),
        },
        "components": {"schemas": schemas},
    }


def _keep_what_is_taken(schema: dict[str, Any], rules: Rules) -> None:
    properties = schema["properties"]
    for name in [name for name in properties if isinstance(rules.get(name), Refused)]:
        del properties[name]
    if "speculation" in rules:
        properties["speculation"] = _SPECULATION
    schema["additionalProperties"] = False


def _post(requests: list[type[BaseModel]], response: type[BaseModel], streams: bool = False) -> dict[str, Any]:
    references = [_reference(request) for request in requests]
    body = references[0] if len(references) == 1 else {"anyOf": references}
    answer = _json(response) | ({"text/event-stream": {}} if streams else {})
    timeout = {
        "name": "x-request-timeout-ms",
        "in": "header",
        "schema": {"type": "integer", "minimum": 1},
    }
    operation = {
        "parameters": [timeout],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "the answer", "content": answer}} | _errors(),
    }
    return {"post": operation}


def _get(answer: dict[str, Any], parameter: str | None = None) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "responses": {"200": {"description": "the answer", "content": answer}} | _errors(),
    }
    if parameter is not None:
        operation["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}]
    return {"get": operation}


def _errors() -> dict[str, Any]:
    return {status: {"description": text, "content": _json(ErrorResponse)} for status, text in _ERRORS.items()}


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": _reference(model)}}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
