"""Describes one emulated model: the ``emulation`` object in its checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tests.bench.emulation.step_time import StepTime
from tests.bench.emulation.text_process import Text

KEY = "emulation"


@dataclass(frozen=True)
class Emulation:
    """One model's time and text."""

    role: str
    """``target`` or ``drafter``: names its trace."""

    time: StepTime
    follows: Text | None = None
    """How a drafter follows the target; None for the target."""

    trace_directory: str | None = None
    """Where the model writes when its steps ran. None: nowhere."""

    mask_token: int | None = None
    """Stands for a token that is yet to be drafted, for a drafter that drafts all of them in one pass."""

    def __post_init__(self) -> None:
        if (self.role, self.follows is None) not in (("target", True), ("drafter", False)):
            raise ValueError(f"role: {self.role!r} with follows={self.follows}; a drafter, and only it, follows a text")

    @property
    def trace(self) -> Path | None:
        return None if self.trace_directory is None else Path(self.trace_directory)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Emulation:
        """Raises ValueError for a key that is not a field, TypeError for one that is missing."""
        if unknown := set(document) - {field.name for field in fields(cls)}:
            raise ValueError(f"{KEY}.{min(unknown)}: unknown; write the checkpoint again")
        follows = document.get("follows")
        return cls(
            **{
                **document,
                "time": StepTime(**document["time"]),
                "follows": None if follows is None else Text.from_json(follows),
            }
        )
