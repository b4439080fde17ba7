"""The dashboard and the alert rules ask only for metrics that are exported, by labels that these have."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from outrider.actors.observability.catalog import CATALOG, series_names

_METRIC = re.compile(r"\b((?:vllm|outrider):\w+)(?:\{([^}]*)\})?")
_LABEL = re.compile(r"(\w+)\s*=~?")
_BY = re.compile(r"by \(([^)]*)\)")

GRAFANA = Path(__file__).parents[3] / "deploy" / "grafana"
DASHBOARD = json.loads((GRAFANA / "outrider.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
ALERTS = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())
RULES = ALERTS["groups"][0]["rules"]


@pytest.fixture(scope="module")
def vllm_series():
    """Names of vLLM's series: what its own logger makes, without an engine."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    names = set()
    # Its families are made in one constructor that wants a whole engine's configuration; their names are literals.
    for module in ("v1/metrics/loggers.py", "v1/spec_decode/metrics.py"):
        for name in re.findall(r'"(vllm:\w+)"', (Path(found.origin).parent / module).read_text()):
            names |= {name, f"{name}_total", f"{name}_bucket", f"{name}_count", f"{name}_sum"}
    return names


def exported(vllm_series):
    return series_names() | vllm_series


@pytest.mark.parametrize("expression", [*EXPRESSIONS, *(rule["expr"] for rule in RULES)])
def test_every_metric_and_label_of_a_query_is_exported(expression, vllm_series):
    found = list(_METRIC.finditer(expression))
    assert found or "up{job=" in expression, "Prometheus' own, of whether it could scrape"
    for match in found:
        name, filters = match.groups()
        assert name in exported(vllm_series), f"{name} is not exported"
        spec = CATALOG.get(re.sub(r"_(bucket|count|sum)$", "", name)) or CATALOG.get(name)
        if spec is not None:
            known = {*spec.labels, "le"}
            of_replica = not name.startswith(
                ("outrider:requests", "outrider:admission", "outrider:replica_up", "outrider:replicas")
            )
            known |= {"model_name", "replica"} if of_replica else set()
            used = set(_LABEL.findall(filters or ""))
            used |= {label.strip() for by in _BY.findall(expression) for label in by.split(",") if label.strip()}
            if len(found) == 1 or name.startswith("outrider:"):
                assert used <= known, f"{name} has no label {used - known}"


def test_an_unknown_metric_would_be_found(vllm_series):
    assert "outrider:no_such_thing_total" not in exported(vllm_series)
    assert "vllm:no_such_thing" not in exported(vllm_series)


def test_it_can_be_imported_with_any_data_source():
    made = DASHBOARD
    panels = [panel for panel in made["panels"] if panel["type"] != "row"]
    assert {variable["name"] for variable in made["templating"]["list"]} == {"datasource", "model", "replica"}
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels)
    numbers = [panel["id"] for panel in made["panels"]]
    assert len(set(numbers)) == len(numbers)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in made["panels"]]
    assert len(set(places)) == len(places)


def test_every_group_of_metrics_is_on_the_dashboard_but_what_is_told_elsewhere():
    text = " ".join([*EXPRESSIONS, json.dumps(DASHBOARD)])
    shown = {name for name in CATALOG if re.search(rf"{name}(_bucket|_count|_sum)?\b", text)}
    assert set(CATALOG) - shown == {
        "outrider:length_probes_total",
        "outrider:expected_tokens_per_second",
        "outrider:link_frames_total",
        "outrider:drafter_branch_blocks",
        "outrider:drafter_version_changes_total",
        "outrider:drafter_refused_versions_total",
        "outrider:learning_dropped_texts_total",
        "outrider:learning_loss",
        "outrider:learning_steps_total",
        "outrider:learning_store_failures_total",
        "outrider:learning_tokens_total",
        "outrider:learning_version_gain",
        "outrider:learning_version_margin",
        "outrider:learning_version_state",
        "outrider:drafter_links",
        "outrider:drafter_steps_total",
        "outrider:drafter_answers_total",
        "outrider:drafter_draft_tokens_total",
        "outrider:snapshot_age_seconds",
    }


def test_the_alerts_are_complete_and_say_what_to_do():
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    assert {"OutriderDrafterDown", "OutriderLateProposals", "OutriderQueueFull"} <= set(names)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith(".")


def test_a_missing_link_is_no_alarm_where_there_is_no_drafter_to_have_one_to():
    """A pool that follows the load may have none, and that is no fault."""
    (rule,) = [rule for rule in RULES if rule["alert"] == "OutriderLinkDown"]
    link, _, condition = rule["expr"].partition(" and on () ")
    assert link == 'outrider:link_state{state="up"} == 0'
    assert condition == "(sum(outrider:drafter_up) > 0)"


def test_a_pod_without_an_ingress_is_no_alarm_where_another_answers():
    """On Kubernetes all pods are scraped, and those answer that have an ingress (docs/kubernetes.md)."""
    (rule,) = [rule for rule in RULES if rule["alert"] == "OutriderNoMetrics"]
    assert rule["expr"] == 'absent(up{job="outrider"} == 1)'


def test_each_alert_has_its_entry_in_the_runbook_and_each_entry_its_alert():
    text = (Path(__file__).parents[3] / "docs" / "runbook.md").read_text()
    entries = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    assert list(entries) == [rule["alert"] for rule in RULES]
    for rule in RULES:
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert re.findall(r"^\*\*(\w+):\*\*", entries[rule["alert"]], re.M) == ["Means", "Look", "Do"]


def test_the_runbook_names_metrics_that_exist():
    text = (Path(__file__).parents[3] / "docs" / "runbook.md").read_text()
    for name in re.findall(r"`(outrider:\w+)`", text):
        assert name in CATALOG, name
