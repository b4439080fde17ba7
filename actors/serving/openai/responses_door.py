"""What a body of ``/v1/responses`` holds where its fields depend on types: items of ``input``, parts and tools.

Each item is made into what vLLM's class reads all of: of several parts of an assistant's message, or of reasoning, it
would take the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outrider.actors.replica_calls import RequestError
from outrider.actors.request_checks import check_arguments, shown
from outrider.actors.serving.openai.fields import Rules, Works, held_against
from outrider.actors.serving.openai.responses_fields import (
    INCLUDED,
    INPUT_ITEMS,
    PICTURE_PARTS,
    TEXT_PARTS,
    TOOL_CHOICE,
    TOOLS,
)

LOGPROBS = INCLUDED[0]
_ROLES = ("user", "assistant", "system", "developer")
_FORMATS = ("text", "json_object", "json_schema")
_GONE_ON_WITH = ("in_progress", "incomplete")
_NOT_STORED = "responses are not stored here"


def checked_response(body: dict[str, Any]) -> dict[str, Any]:
    """body: as fields.held_against has left it. Raises RequestError."""
    if "input" not in body:
        raise RequestError("input", "is missing", "send a text, or a list of items")
    checked = {**body, "input": _checked_input(body["input"])}
    if "tools" in body:
        checked["tools"] = _each(body["tools"], "tools", _checked_tool)
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        if not isinstance(choice.get("type"), str) or choice["type"] not in TOOLS:
            raise _not_of_a_type("tool_choice.type", choice.get("type"), TOOLS)
        held_against(TOOL_CHOICE, choice, "tool_choice")
    _check_include(body)
    _check_format(body.get("text", {}).get("format") or {"type": "text"})
    tokens = body.get("max_output_tokens")
    if isinstance(tokens, int) and tokens < 1:
        raise RequestError("max_output_tokens", f"{tokens} leaves no answer", "send 1 or more, or leave it out")
    return checked


def _check_format(form: Mapping[str, Any]) -> None:
    if (kind := form.get("type")) not in _FORMATS:
        problem = "is missing" if kind is None else f"{shown(str(kind))} is not supported"
        raise RequestError("text.format.type", problem, f"send one of {', '.join(_FORMATS)}")
    if kind == "json_schema":
        for name, json_type, said in (("name", str, "text"), ("schema", dict, "JSON object")):
            if not isinstance(form.get(name), json_type):
                raise RequestError(f"text.format.{name}", f"is missing, or no {said}", f"send a {said}")


def _check_include(body: Mapping[str, Any]) -> None:
    include = body.get("include", [])
    if not isinstance(include, list):
        raise RequestError("include", "is no array", f"send a list of {', '.join(INCLUDED)}")
    for number, name in enumerate(include):
        if name not in INCLUDED:
            raise RequestError(
                f"include.{number}", f"{shown(str(name))} is not supported", f"send {', '.join(INCLUDED)}, or none"
            )
    if body.get("top_logprobs") and LOGPROBS not in include:
        raise RequestError(
            "top_logprobs", "is given, but nothing says where", f"send {LOGPROBS} in include, or leave it out"
        )


def _checked_input(given: Any) -> Any:
    if isinstance(given, str):
        return given
    items = _each(given, "input", _checked_item)
    if not items:
        raise RequestError("input", "is empty", "send a text, or at least one item")
    # Nothing is left of reasoning without a text, which other servers keep to themselves.
    return [item for item in items if item is not None]


def _checked_item(item: dict[str, Any], where: str) -> dict[str, Any] | None:
    """None for one that says nothing."""
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    if kind == "item_reference":
        raise RequestError(f"{where}.type", f"item_reference is not supported: {_NOT_STORED}", "send the item itself")
    rules = INPUT_ITEMS.get(kind) if isinstance(kind, str) else None
    if rules is None:
        raise _not_of_a_type(f"{where}.type", kind, INPUT_ITEMS)
    kept = {
        "type": kind,
        **held_against(rules, {name: value for name, value in item.items() if value is not None}, where),
    }
    if kind == "message":
        return _checked_message(kept, where)
    if kind == "reasoning":
        return _checked_reasoning(kept, where)
    for name in ("call_id", "name", "arguments", "input"):
        if isinstance(rules.get(name), Works) and not isinstance(kept.get(name), str):
            raise RequestError(f"{where}.{name}", "is no text" if name in kept else "is missing", "send a text")
    if kind == "function_call":
        check_arguments(f"{where}.arguments", kept["arguments"])
    if "output" in rules:
        return {**kept, "output": _text(kept.get("output"), f"{where}.output")}
    return kept


def _checked_message(item: dict[str, Any], where: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        raise RequestError(f"{where}.role", f"{shown(str(role))} is no role", f"send one of {', '.join(_ROLES)}")
    content, at = item.get("content"), f"{where}.content"
    shows = role == "user" and isinstance(content, list) and any(map(_is_picture, content))
    said = _each(content, at, _shown_part) if shows else _text(content, at)
    checked = {"type": "message", "role": role, "content": said}
    if role == "assistant" and item.get("status") in _GONE_ON_WITH:
        checked["status"] = item["status"]
    return checked


def _is_picture(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in PICTURE_PARTS


def _shown_part(part: dict[str, Any], where: str) -> dict[str, Any]:
    """Of a message with pictures. Whether these are taken is said elsewhere (pictures.py)."""
    if not _is_picture(part):
        return {"type": "input_text", "text": _text_of_part(part, where)}
    kept = held_against(PICTURE_PARTS["input_image"], part, where)
    return {"type": "input_image", "image_url": kept.get("image_url"), "detail": "auto"}


def _checked_reasoning(item: dict[str, Any], where: str) -> dict[str, Any] | None:
    texts = (_text(item.get(name, ""), f"{where}.{name}") for name in ("content", "summary"))
    text = next(filter(None, texts), None)
    if text is None:
        return None
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def _text(content: Any, where: str) -> str:
    """Of a text, or of parts, one a line as in a chat."""
    if isinstance(content, str):
        return content
    if content is None:
        raise RequestError(where, "is missing", "send a text, or parts of text")
    return "\n".join(_each(content, where, _text_of_part))


def _text_of_part(part: dict[str, Any], where: str) -> str:
    kind = part.get("type")
    rules = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if rules is None:
        raise _not_of_a_type(f"{where}.type", kind, TEXT_PARTS)
    kept = held_against(rules, part, where)
    name = "refusal" if kind == "refusal" else "text"
    text = kept.get(name)
    if not isinstance(text, str):
        raise RequestError(f"{where}.{name}", "is no text" if name in kept else "is missing", "send a text")
    return text


def _checked_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    rules = TOOLS.get(kind) if isinstance(kind, str) else None
    if rules is None:
        raise _not_of_a_type(f"{where}.type", kind, TOOLS)
    kept = held_against(rules, tool, where)
    if not isinstance(kept.get("name"), str) or not kept["name"]:
        raise RequestError(f"{where}.name", "is missing or no text", "send the tool's name")
    form = kept.get("format")
    if form is not None and form != {"type": "text"}:
        raise RequestError(f"{where}.format", "is not supported", 'send {"type": "text"}, or leave it out')
    return kept


def _not_of_a_type(where: str, kind: Any, known: Mapping[str, Rules]) -> RequestError:
    problem = "is missing" if kind is None else f"{shown(str(kind))} is not supported"
    return RequestError(where, problem, f"send one of {', '.join(known)}")


def _each(values: Any, where: str, checked: Callable[[dict[str, Any], str], Any]) -> list[Any]:
    if not isinstance(values, list):
        raise RequestError(where, "is no array", "send an array of JSON objects")
    found = []
    for number, value in enumerate(values):
        if not isinstance(value, dict):
            raise RequestError(f"{where}.{number}", "is no object", "send a JSON object")
        found.append(checked(value, f"{where}.{number}"))
    return found
