"""Metrics as text: rendered by the rules of the format, merged without losing or doubling anything."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.parser import text_string_to_metric_families

from outrider.actors.observability.catalog import CATALOG
from outrider.actors.observability.exposition import Families, merge, render
from outrider.actors.observability.histogram import Histogram


def parse(text):
    """Name -> family. A family that comes twice fails."""
    families = {}
    for family in text_string_to_metric_families(text):
        assert family.name not in families, family.name
        families[family.name] = family
    return families


def samples(text):
    return {(s.name, *sorted(s.labels.items())): s.value for f in parse(text).values() for s in f.samples}


def test_a_histogram_counts_values_up_to_and_including_a_bound():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.snapshot() == {"bounds": [1.0, 2.0], "counts": [2, 1, 1], "sum": 12.0}


@pytest.mark.parametrize("bounds", [(), (1.0, 1.0), (2.0, 1.0)])
def test_bounds_ascend(bounds):
    with pytest.raises(ValueError, match="bounds"):
        Histogram(bounds)


def test_families_have_help_type_labels_and_cumulative_buckets():
    histogram = Histogram((0.5, 1.0))
    for value in (0.1, 0.7, 3.0):
        histogram.observe(value)
    families = Families({"model_name": "m"})
    families.add("outrider:rounds_total", 7)
    families.add("outrider:link_state", 1, state="up")
    families.add_histogram("outrider:step_seconds", histogram.snapshot())
    text = render(families)
    parsed = parse(text)
    assert {name: family.type for name, family in parsed.items()} == {
        "outrider:rounds": "counter",
        "outrider:link_state": "gauge",
        "outrider:step_seconds": "histogram",
    }
    assert all(family.documentation for family in parsed.values())
    values = samples(text)
    assert values["outrider:rounds_total", ("model_name", "m")] == 7
    assert values["outrider:link_state", ("model_name", "m"), ("state", "up")] == 1
    buckets = {key[1][1]: v for key, v in values.items() if key[0] == "outrider:step_seconds_bucket"}
    assert buckets == {"0.5": 1, "1": 2, "+Inf": 3}
    assert values["outrider:step_seconds_count", ("model_name", "m")] == 3
    assert values["outrider:step_seconds_sum", ("model_name", "m")] == pytest.approx(3.8)


def test_what_is_not_in_the_catalogue_is_refused():
    with pytest.raises(KeyError):
        Families().add("outrider:unheard_of_total", 1)
    with pytest.raises(ValueError, match="labels"):
        Families().add("outrider:rounds_total", 1, colour="red")


def test_series_of_creation_times_are_left_out():
    registry = CollectorRegistry()
    Counter("a", "A.", registry=registry).inc()
    assert "a_created" not in render(registry)
    assert "a_total 1.0" in render(registry)


def replica(running, label_value='say "hi"\\'):
    registry = CollectorRegistry()
    Gauge("bare", "Bare.", registry=registry).set(running)
    Gauge("labelled", "With a\nbreak.", ["x"], registry=registry).labels(label_value).set(running + 1)
    families = Families({"model_name": "m"})
    families.add("outrider:rounds_total", running)
    return render(registry, families)


def test_merged_texts_keep_every_sample_under_its_replica_and_each_family_once():
    merged = merge({"a": replica(1), "b": replica(2)})
    values = samples(merged)
    odd = ("x", 'say "hi"\\')
    assert values == {
        ("bare", ("replica", "a")): 1,
        ("bare", ("replica", "b")): 2,
        ("labelled", ("replica", "a"), odd): 2,
        ("labelled", ("replica", "b"), odd): 3,
        ("outrider:rounds_total", ("model_name", "m"), ("replica", "a")): 1,
        ("outrider:rounds_total", ("model_name", "m"), ("replica", "b")): 2,
    }
    assert merged.count("# TYPE labelled gauge") == merged.count("# HELP labelled") == 1
    assert merged.endswith("\n")


def test_families_of_one_replica_only_are_kept():
    extra = Families()
    extra.add("outrider:replicas_silent", 0)
    merged = merge({"a": replica(1), "b": replica(2) + render(extra)})
    assert samples(merged)["outrider:replicas_silent", ("replica", "b")] == 0


def test_nothing_merges_to_nothing():
    assert merge({}) == merge({"a": ""}) == ""


def test_a_replica_s_name_is_escaped():
    assert samples(merge({'q"\\': "bare 1\n"})) == {("bare", ("replica", 'q"\\')): 1}


def test_names_follow_prometheus_rules():
    for spec in CATALOG.values():
        assert spec.name.startswith("outrider:")
        assert spec.help.endswith(".")
        for unit in ("_ms", "_us", "_percent", "_milliseconds"):
            assert not spec.name.removesuffix("_total").endswith(unit), "base units only"
