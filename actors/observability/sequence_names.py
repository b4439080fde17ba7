"""By what ids the clients know the sequences of this drafter, for the lines it logs about them."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.actors.observability.logs import about

_NOTHING: Mapping[str, str] = {}


class SequenceNames:
    """Keys are the draft loop's: (link, request handle). Written under its lock; read by whoever logs."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], str] = {}

    def __len__(self) -> int:
        return len(self._names)

    def learn(self, key: tuple[int, int], request_id: str) -> None:
        self._names[key] = request_id

    def forget(self, key: tuple[int, int]) -> None:
        self._names.pop(key, None)

    def about(self, key: tuple[int, int]) -> Mapping[str, str]:
        """``extra`` of a line about the sequence; {} when its verifier names none."""
        name = self._names.get(key)
        return _NOTHING if name is None else about(name)


NAMES = SequenceNames()
"""Of this process, which is one drafter."""
