"""When a call that failed is sent once more. Off unless asked for: ``retries=``."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from deploy.client.error import OutriderError

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
"""Of delays this side chooses. The server's own is taken as it is."""


@dataclass(frozen=True)
class RetryPolicy:
    """Only what cannot have produced output is tried again: the caller asks before the first message alone.

    UNAVAILABLE: after the server's delay, or else one that doubles from FIRST_DELAY_S. RESOURCE_EXHAUSTED: only when
    the server says after what delay. Anything else fails again, or may have been paid for already.
    """

    retries: int = 0

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ValueError(f"retries: {self.retries} is below 0; send 0 for none")

    def delay_s(self, error: OutriderError, attempt: int, seconds_left: float | None) -> float | None:
        """Seconds to wait before trying again; None: do not.

        attempt: 1 for the first call. seconds_left: of the call's time-out, None without one; a retry that could only
        start after it is none.
        """
        if attempt > self.retries:
            return None
        if error.code is grpc.StatusCode.UNAVAILABLE:
            own = min(FIRST_DELAY_S * 2 ** (attempt - 1), LONGEST_DELAY_S)
            delay_s = own if error.retry_after_s is None else error.retry_after_s
        elif error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_after_s is not None:
            delay_s = error.retry_after_s
        else:
            return None
        return delay_s if seconds_left is None or delay_s < seconds_left else None
