"""The dashboard, the alert rules and the docs name only metrics that are exported, by labels that these have."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.unit.observability.exported import KINDS, LABELS, SERIES

_METRIC = re.compile(r"\b((?:vllm|outrider):\w+)(?:\{([^}]*)\})?")
_LABEL = re.compile(r"(\w+)\s*=~?")
_BY = re.compile(r"by \(([^)]*)\)")

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "deploy/grafana/outrider.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
RULES = yaml.safe_load((ROOT / "deploy/grafana/alerts.yaml").read_text())["groups"][0]["rules"]
PAGES = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))


@pytest.fixture(scope="module")
def vllm_series():
    """Names of vLLM's series: literals of its own logger's constructor, which wants a whole engine's configuration."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    names = set()
    for module in ("v1/metrics/loggers.py", "v1/spec_decode/metrics.py"):
        for name in re.findall(r'"(vllm:\w+)"', (Path(found.origin).parent / module).read_text()):
            names |= {name, f"{name}_total", f"{name}_bucket", f"{name}_count", f"{name}_sum"}
    return names


@pytest.mark.parametrize("expression", [*EXPRESSIONS, *(rule["expr"] for rule in RULES)])
def test_every_metric_and_label_of_a_query_is_exported(expression, vllm_series):
    found = list(_METRIC.finditer(expression))
    assert found or "up{job=" in expression, "Prometheus' own, of whether it could scrape"
    for name, filters in (match.groups() for match in found):
        assert name in SERIES or name in vllm_series, f"{name} is not exported"
        if name in SERIES:
            used = {*_LABEL.findall(filters or "")}
            used |= {label.strip() for by in _BY.findall(expression) for label in by.split(",") if label.strip()}
            assert used <= LABELS[SERIES[name]] | {"le"}, name


def test_every_metric_is_documented_with_its_type():
    rows = re.findall(r"^\| `(outrider:\w+)` \| (\w+) \|", PAGES, re.MULTILINE)
    assert sorted(rows) == sorted(KINDS.items())
    assert set(re.findall(r"`(outrider:\w+)`", PAGES)) <= {*KINDS, *SERIES}
