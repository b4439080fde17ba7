"""What an ingress counts: calls by API, method and status, and who was turned away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from actors.observability.exposition import Families, render

CANCELLED = "CANCELLED"
"""Status of a call whose client left before its end."""


class IngressMetrics:
    """Not thread-safe: for the ingress's event loop."""

    def __init__(self) -> None:
        self._ended: Counter[tuple[str, str, str]] = Counter()
        self._in_flight: Counter[str] = Counter()
        self._rejections: Counter[str] = Counter({"queue_full": 0})

    @contextmanager
    def in_flight(self, api: str) -> Iterator[None]:
        """Around a call. api: ``grpc`` or ``http``."""
        self._in_flight[api] += 1
        try:
            yield
        finally:
            self._in_flight[api] -= 1

    def ended(self, api: str, method: str, code: str) -> None:
        """code: a gRPC status code's name or an HTTP status, or CANCELLED."""
        self._ended[api, method, code] += 1

    def rejected(self, reason: str) -> None:
        """A request was refused before it reached an engine, such as ``queue_full``."""
        self._rejections[reason] += 1

    def text(self) -> str:
        families = Families()
        for (api, method, code), count in sorted(self._ended.items()):
            families.add("outrider:requests_total", count, api=api, method=method, code=code)
        for api, number in sorted(self._in_flight.items()):
            families.add("outrider:requests_in_flight", number, api=api)
        for reason, count in sorted(self._rejections.items()):
            families.add("outrider:admission_rejections_total", count, reason=reason)
        return render(families)


METRICS = IngressMetrics()
"""Of this process, as it has one ingress: gRPC calls and HTTP requests count in the same place."""
