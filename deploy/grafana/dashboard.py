"""``outrider.json``, the Grafana dashboard, made of `rows`: ``python -m outrider.deploy.grafana.dashboard``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.deploy.grafana.rows import ROWS, Panel

PATH = Path(__file__).with_name("outrider.json")

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _WIDTH, _HEIGHT = 3, 8, 8


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": _COLUMNS * _WIDTH, "x": 0, "y": top},
            }
        )
        top += 1
        for index, panel in enumerate(row.panels):
            x, y = index % _COLUMNS * _WIDTH, top + index // _COLUMNS * _HEIGHT
            panels.append(_panel(panel, len(panels) + 1, x, y))
        top += -(-len(row.panels) // _COLUMNS) * _HEIGHT
    return {
        "__inputs": [],
        "__requires": [{"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "2.0.0"}],
        "uid": "outrider",
        "title": "Outrider",
        "description": "Speculative decoding for vLLM with the drafter in actors of its own.",
        "tags": ["outrider", "vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def render() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


def expressions() -> list[str]:
    """Every query, as Grafana gets it."""
    return [_expression(query) for row in ROWS for panel in row.panels for query, _ in panel.queries]


def _expression(query: str) -> str:
    return query.replace("$of", 'model_name=~"$model", replica=~"$replica"').replace("$rate", "$__rate_interval")


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.stacked else 5,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": _expression(query),
                "legendFormat": legend,
                "range": True,
            }
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}
    return [
        source,
        _query_variable("model", "Model", "label_values(outrider:build_info, model_name)"),
        _query_variable("replica", "Replica", 'label_values(outrider:build_info{model_name=~"$model"}, replica)'),
    ]


def _query_variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    PATH.write_text(render())
