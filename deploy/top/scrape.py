"""One look at a server's ``/metrics``: fetched over HTTP, kept as samples by name and labels."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 10.0
_MAX_BYTES = 64 << 20


class ScrapeError(Exception):
    """No metrics to be had there. The message is one line."""


@dataclass(frozen=True)
class Scrape:
    """at_s: when, on a clock that only goes forward. samples: name -> [(labels, value)]."""

    at_s: float
    samples: Mapping[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)

    def sum(self, name: str, **labels: str) -> float:
        """Of all samples with these labels, whatever their others; 0 without any."""
        return sum(value for _, value in self.of(name, **labels))

    def value(self, name: str, **labels: str) -> float | None:
        """The first such sample's."""
        return next((value for _, value in self.of(name, **labels)), None)

    def of(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        for found, value in self.samples.get(name, ()):
            if labels.items() <= found.items():
                yield found, value


def parse(text: str, at_s: float) -> Scrape:
    """Raises ScrapeError for what is no exposition."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name].append((sample.labels, sample.value))
    except (ValueError, IndexError) as error:
        raise ScrapeError(f"not Prometheus' text format: {error}") from None
    return Scrape(at_s, dict(samples))


def scrape(http_address: str) -> Scrape:
    """http_address: ``host:port``. Raises ScrapeError."""
    url = f"http://{http_address}/metrics"
    # A proxy named in the environment is for the way out of this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_TIMEOUT_S) as response:
            text = response.read(_MAX_BYTES).decode()
    except urllib.error.HTTPError as error:
        raise ScrapeError(f"{url} answers {error.code} {error.reason}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ScrapeError(f"no metrics at {url}: {reason}") from None
    found = parse(text, time.monotonic())
    if not found.samples.get("outrider:replicas_silent"):
        raise ScrapeError(f"{url} is no Outrider server's")
    return found
