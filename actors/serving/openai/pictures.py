"""Pictures in a body's messages: which there are, in which fields, and whether they are taken. Without opening any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from outrider.actors.openai_calls import Endpoint, picture_in
from outrider.actors.replica_calls import RequestError
from outrider.cluster.multimodal_config import MultimodalConfig
from outrider.cluster.pictures import PictureError, check_url

_PLACES: Mapping[Endpoint, str] = {"responses": "input"}
_TYPES: Mapping[Endpoint, str] = {"responses": "input_image"}
"""Of chats: messages, and image_url."""


def pictures(endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, str]:
    """URL -> the field that it is in, the first of several. body: as the door has left it."""
    found: dict[str, str] = {}
    for where, part in _parts(endpoint, body):
        if (url := picture_in(part)) is not None:
            found.setdefault(url, f"{where}.image_url")
    return found


def check_pictures(endpoint: Endpoint, body: Mapping[str, Any], config: MultimodalConfig | None) -> None:
    """config: None: the deployment takes none. Raises RequestError."""
    count, kind = 0, _TYPES.get(endpoint, "image_url")
    for where, part in _parts(endpoint, body):
        field = f"{where}.image_url"
        if part.get("type") != kind:
            if part.get("image_url") is not None or part.get("type") in ("image_url", "input_image"):
                raise RequestError(field, "is in a part of another type", f"send it in one of type {kind}")
            continue
        if config is None:
            raise RequestError(field, "this deployment takes no pictures (target.multimodal)", "send text alone")
        if (url := picture_in(part)) is None:
            raise RequestError(field, "is missing, or holds no url", 'send {"url": "data:image/png;base64,…"}')
        count += 1
        if count > config.most_pictures:
            raise RequestError(field, "is one picture too many", f"send at most {config.most_pictures} in one request")
        try:
            check_url(url, config)
        except PictureError as error:
            raise RequestError(field, error.problem, error.fix) from None


def _parts(endpoint: Endpoint, body: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    place = _PLACES.get(endpoint, "messages")
    messages = body.get(place)
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict):
                yield f"{place}.{number}.content.{index}", part
