"""The page's files, as they are in the package."""

from __future__ import annotations

from pathlib import Path

from outrider.actors.serving import http

FILES = {path.name: path.read_bytes() for path in (Path(http.__path__[0]) / "static").iterdir()}
