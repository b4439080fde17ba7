"""Metrics as text: families of ours made, those of a process rendered, the texts of several replicas merged.

The format is Prometheus' text exposition 0.0.4. Merging works on lines and not on parsed values: a replica's text has
thousands of lines, and the ingress that merges them is the process that streams every token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from outrider.actors.observability.catalog import CATALOG
from outrider.actors.observability.histogram import HistogramSnapshot

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class Families:
    """Collects samples of metrics in the catalogue. constant: labels that every sample gets, before its own."""

    def __init__(self, constant: Mapping[str, str] | None = None) -> None:
        self._constant = dict(constant or {})
        self._families: dict[str, Metric] = {}

    def add(self, name: str, value: float, **labels: str) -> None:
        """One sample of a counter or gauge. Raises KeyError for a name, ValueError for labels not in the catalogue."""
        family = self._family(name, labels)
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
        family.add_metric(self._values(name, labels), value)

    def add_histogram(self, name: str, histogram: HistogramSnapshot, **labels: str) -> None:
        family = self._family(name, labels)
        assert isinstance(family, HistogramMetricFamily)
        buckets: list[tuple[str, float]] = []
        cumulative = 0
        for bound, count in zip([*histogram["bounds"], float("inf")], histogram["counts"], strict=True):
            cumulative += count
            buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", cumulative))
        family.add_metric(self._values(name, labels), buckets, histogram["sum"])

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()

    def _values(self, name: str, labels: Mapping[str, str]) -> list[str]:
        return [*self._constant.values(), *(labels[label] for label in CATALOG[name].labels)]

    def _family(self, name: str, labels: Mapping[str, str]) -> Metric:
        spec = CATALOG[name]
        if set(labels) != set(spec.labels):
            raise ValueError(f"{name}: labels {sorted(labels)}, the catalogue has {sorted(spec.labels)}")
        family = self._families.get(name)
        if family is None:
            kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
            family = kinds[spec.kind](name, spec.help, labels=[*self._constant, *spec.labels])
            self._families[name] = family
        return family


class _Collected:
    """What generate_latest takes for a registry."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics:
            # When a series was created is known to few and doubles the number of families.
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            if metric.samples:
                yield metric


def render(*sources: Families | CollectorRegistry) -> str:
    """All families of the sources, in their order."""
    collected = _Collected(metric for source in sources for metric in source.collect())
    return generate_latest(collected).decode()


def merge(texts: Mapping[str, str], label: str = "replica") -> str:
    """One exposition of several: each family once with its HELP and TYPE, each sample with the label of its text.

    texts: label value -> exposition as `render` makes it.
    """
    headers: dict[str, Sequence[str]] = {}
    samples: dict[str, list[str]] = {}
    for value, text in texts.items():
        escaped = value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
        pair = f'{label}="{escaped}"'
        family, pending = "", []
        for line in text.splitlines():
            if line.startswith("#"):
                _, keyword, name, *_ = line.split(" ", 3)
                if keyword == "HELP":
                    pending = [line]
                elif keyword == "TYPE":
                    family = name
                    headers.setdefault(family, [*pending, line])
                    pending = []
            elif line:
                samples.setdefault(family, []).append(_labelled(line, pair))
    return "".join(f"{line}\n" for family, lines in samples.items() for line in [*headers.get(family, ()), *lines])


def _labelled(sample: str, pair: str) -> str:
    name_end = sample.find("{")
    space = sample.find(" ")
    if name_end == -1 or space < name_end:  # no labels yet
        return f"{sample[:space]}{{{pair}}}{sample[space:]}"
    return f"{sample[: name_end + 1]}{pair},{sample[name_end + 1 :]}"
