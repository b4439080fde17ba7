"""Outrider: the Python clients, and the public gRPC API in ``outrider.v1``.

    from outrider import OutriderClient
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deploy.client.async_client import AsyncCompletionStream, AsyncOutriderClient
    from deploy.client.sync_client import CompletionStream, OutriderClient
    from deploy.client.error import FieldViolation, OutriderError
    from deploy.handle import OutriderHandle

__all__ = [
    "AsyncCompletionStream",
    "AsyncOutriderClient",
    "CompletionStream",
    "FieldViolation",
    "OutriderClient",
    "OutriderError",
    "OutriderHandle",
]

_HOMES = {
    "AsyncCompletionStream": "deploy.client.async_client",
    "AsyncOutriderClient": "deploy.client.async_client",
    "CompletionStream": "deploy.client.sync_client",
    "FieldViolation": "deploy.client.error",
    "OutriderClient": "deploy.client.sync_client",
    "OutriderError": "deploy.client.error",
    "OutriderHandle": "deploy.handle",
}


def __getattr__(name: str) -> Any:
    """On first use: the clients import ``outrider.v1`` themselves, and only OutriderHandle needs Ray."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
