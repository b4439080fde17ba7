"""Where fetched models are kept on this machine, and which of them are complete."""

from __future__ import annotations

import json
import os
from pathlib import Path

MANIFEST = "outrider.json"
"""Written last into a finished checkpoint: its presence is what makes the checkpoint complete."""


def models_dir() -> Path:
    """``$OUTRIDER_HOME/models``; OUTRIDER_HOME defaults to ``outrider`` in the user's cache directory."""
    if home := os.environ.get("OUTRIDER_HOME"):
        return Path(home).expanduser().resolve() / "models"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().resolve() / "outrider" / "models"


def find_model(name: str, directory: Path | None = None) -> Path | None:
    """Directory of a complete fetched checkpoint, or None. ``directory`` None: models_dir()."""
    path = (directory or models_dir()) / name
    return path if read_manifest(path) is not None else None


def read_manifest(checkpoint: Path) -> dict[str, object] | None:
    """The manifest of a checkpoint; None unless it is readable and every file it lists is there in its full size."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        sizes = dict(manifest["files"])
        complete = all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if complete and "config.json" in sizes else None


def write_manifest(checkpoint: Path, about: dict[str, object]) -> None:
    """Record ``about`` and the size in bytes of every file of a finished checkpoint, atomically."""
    files = {path.name: path.stat().st_size for path in sorted(checkpoint.iterdir()) if path.is_file()}
    files.pop(MANIFEST, None)
    temporary = checkpoint / f".{MANIFEST}.tmp"
    temporary.write_text(json.dumps({**about, "files": files}, indent=2) + "\n")
    temporary.replace(checkpoint / MANIFEST)
