"""What each key holds of something that all callers share. Pure."""

from __future__ import annotations

from collections import Counter

SHARE_OF_FREE = 8
"""A key may hold so many times what is free: 8 ninths of all while it is alone, 8 seventeenths while two want all."""


class Shares:
    """What each key holds of something that all share, and whether it may hold more.

    Thresholds follow what is free (dynamic queue length thresholds, Choudhury and Hahne, IEEE/ACM Transactions on
    Networking 6(2), 1998): whatever the others do, there is room for a key that comes, and nobody sets a number. Calls
    without a key have no threshold.
    """

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    def allow(self, key: str | None, more: int, free: int) -> bool:
        """key: its name; None: a call that needs none. free: of all, before. What holds nothing yet is let in."""
        held = 0 if key is None else self._held[key]
        return not held or held + more <= SHARE_OF_FREE * free

    def take(self, key: str | None, number: int) -> None:
        if key is not None:
            self._held[key] += number

    def give_back(self, key: str | None, number: int) -> None:
        if key is not None:
            self._held[key] -= number
            if not self._held[key]:
                del self._held[key]
