"""What the dashboard shows, row by row."""

from __future__ import annotations

from deploy.grafana.serving_rows import LATENCY, TARGET_LOAD, TRAFFIC
from deploy.grafana.speculation_rows import DRAFTER, LINK, ROUNDS, SPECULATION

ROWS = (TRAFFIC, LATENCY, SPECULATION, ROUNDS, LINK, DRAFTER, TARGET_LOAD)
