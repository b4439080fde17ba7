"""Outrider: vLLM's ``LLM`` with a drafter of its own, the Python clients, and the public gRPC API in ``outrider.v1``.

    from outrider import LLM, SamplingParams
    from outrider import OutriderClient
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.deploy.client.async_client import AsyncCompletionStream, AsyncOutriderClient
    from outrider.deploy.client.handle import OutriderHandle
    from outrider.deploy.client.sync_client import CompletionStream, OutriderClient, OutriderError
    from outrider.deploy.llm.llm import LLM, AsyncLLM, SamplingParams

__all__ = [
    "LLM",
    "AsyncCompletionStream",
    "AsyncLLM",
    "AsyncOutriderClient",
    "CompletionStream",
    "OutriderClient",
    "OutriderError",
    "OutriderHandle",
    "SamplingParams",
]

_HOMES = {
    "LLM": "outrider.deploy.llm.llm",
    "AsyncLLM": "outrider.deploy.llm.llm",
    "SamplingParams": "outrider.deploy.llm.llm",
    "AsyncCompletionStream": "outrider.deploy.client.async_client",
    "AsyncOutriderClient": "outrider.deploy.client.async_client",
    "CompletionStream": "outrider.deploy.client.sync_client",
    "OutriderClient": "outrider.deploy.client.sync_client",
    "OutriderError": "outrider.deploy.client.sync_client",
    "OutriderHandle": "outrider.deploy.client.handle",
}


def __getattr__(name: str) -> Any:
    """Imports on first use: only OutriderHandle needs Ray, and only LLM needs vLLM."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
