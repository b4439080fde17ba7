"""A body against vLLM's request models, and what they find wrong told in one sentence about one field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from vllm.exceptions import VLLMClientError, VLLMValidationError

from actors.generation import RequestError

Model = TypeVar("Model", bound=BaseModel)

_MAX_PROBLEM = 300
_MAX_ALTERNATIVES = 3

_READ_WRONG = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)
"""What vLLM's validators run into that read the body before its types have been checked."""


def validated(kind: type[Model], body: Mapping[str, Any]) -> Model:
    """Raises RequestError, with the path of the field at fault where vLLM knows it."""
    try:
        return kind.model_validate(dict(body))
    except ValidationError as error:
        raise _explain(error, body) from None
    except VLLMClientError as error:
        raise RequestError(_parameter(error) or "body", problem_of(error), "change it or leave it out") from None
    except _READ_WRONG as error:
        problem = f"cannot be read as {kind.__name__}: {type(error).__name__}: {error}"
        raise RequestError("body", shortened(problem), "check the types of its fields") from None


def problem_of(error: Exception) -> str:
    """Without what VLLMValidationError's own text adds: all of the value, however long."""
    if isinstance(error, VLLMValidationError) and error.args:
        return shortened(str(error.args[0]))
    return shortened(str(error))


def shortened(text: str) -> str:
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= _MAX_PROBLEM else text[:_MAX_PROBLEM] + "…"


def _parameter(error: Exception) -> str | None:
    return getattr(error, "parameter", None)


def _explain(error: ValidationError, body: Mapping[str, Any]) -> RequestError:
    """Of a value that may be of several types, pydantic reports what is wrong with it as each of them."""
    found = [(_path(item["loc"], item["type"], body), item["msg"]) for item in error.errors(include_url=False)]
    path = found[0][0]
    problems = list(dict.fromkeys(problem for where, problem in found if where == path))[:_MAX_ALTERNATIVES]
    return RequestError(path or "body", shortened(", or: ".join(problems)), "change it or leave it out")


def _path(location: tuple[int | str, ...], kind: str, body: Mapping[str, Any]) -> str:
    """The steps of a pydantic location that lead through the body; the others name types."""
    parts: list[str] = []
    at: Any = body
    for step in location:
        leads_on = step in at if isinstance(at, dict) else isinstance(at, list) and step in range(len(at))
        if leads_on:
            at = at[step]
            parts.append(str(step))
    if kind == "missing":
        parts.append(str(location[-1]))
    return ".".join(parts)
