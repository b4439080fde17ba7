"""Reads ``/metrics`` for tests and benchmarks."""

from __future__ import annotations

import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Scrape:
    """Samples by name, each with its labels. at_s: when, on a monotonic clock."""

    at_s: float
    samples: Mapping[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)

    def sum(self, name: str, **labels: str) -> float:
        """Returns the sum of all samples with these labels, 0 without any."""
        return sum(value for _, value in self.of(name, **labels))

    def value(self, name: str, **labels: str) -> float | None:
        """Returns the first sample with these labels."""
        return next((value for _, value in self.of(name, **labels)), None)

    def of(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """Yields labels and value of each sample with these labels."""
        for found, value in self.samples.get(name, ()):
            if labels.items() <= found.items():
                yield found, value


def parse(text: str, at_s: float | None = None) -> Scrape:
    """Reads Prometheus' text format. Raises ValueError for what is none."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name].append((sample.labels, sample.value))
    return Scrape(time.monotonic() if at_s is None else at_s, dict(samples))


def scrape(address: str) -> Scrape:
    """Scrapes ``host:port``."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as response:
        return parse(response.read().decode())
