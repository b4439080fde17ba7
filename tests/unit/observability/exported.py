"""What our processes export, for tests: names, types and labels."""

from prometheus_client.parser import text_string_to_metric_families

from outrider.actors.observability.catalog import CATALOG
from outrider.actors.observability.metrics import INGRESS

KINDS = {name: spec.kind.__name__.removesuffix("MetricFamily").lower() for name, spec in CATALOG.items()}
LABELS = {name: {"model_name", "replica", spec.label} - {None} for name, spec in CATALOG.items()}
LABELS["outrider:build_info"] = {"model_name", "replica", "version", "vllm", "ray"}
LABELS["outrider:replica_up"], LABELS["outrider:replicas_silent"] = {"replica"}, set()
KINDS |= dict.fromkeys(LABELS.keys() - KINDS.keys(), "gauge")
for metric in INGRESS._collector_to_names:
    (described,) = metric.describe()
    name = described.name + ("_total" if described.type == "counter" else "")
    KINDS[name], LABELS[name] = described.type, {*metric._labelnames, "ingress"}

SERIES = {
    series: name
    for name, kind in KINDS.items()
    for series in ([f"{name}{part}" for part in ("_bucket", "_count", "_sum")] if kind == "histogram" else [name])
}
"""Name as a query has it -> metric."""


def parse(text):
    """Name -> family. A family that comes twice fails."""
    families = {}
    for family in text_string_to_metric_families(text):
        assert family.name not in families, family.name
        families[family.name] = family
    return families


def samples(text):
    return {(s.name, *sorted(s.labels.items())): s.value for f in parse(text).values() for s in f.samples}
