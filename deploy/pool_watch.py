"""What the operator of a server is told of a pool whose drafters are not there. Targets serve without. No Ray."""

from __future__ import annotations

from collections.abc import Mapping


class PoolWatch:
    """Says each thing once. For one thread at a time."""

    def __init__(self) -> None:
        self._troubles: dict[str, str] = {}

    def look(self, troubles: Mapping[str, str]) -> list[str]:
        """troubles: by what has it, why no drafter comes of it. Returns lines: each trouble that is new, or another one
        than before, and that all of them are over."""
        known, self._troubles = self._troubles, dict(troubles)
        lines = [
            f"WARNING: a drafter of the pool does not load: {why}; it is tried again, and targets decode plainly where "
            "there is no other"
            for why in sorted({why for who, why in troubles.items() if known.get(who) != why})
        ]
        if known and not troubles:
            lines.append("no drafter of the pool fails to load any more")
        return lines
