"""Prompts of a benchmark: JSONL, gzipped or not, with a field ``prompt``."""

from __future__ import annotations

import gzip
import json
from pathlib import Path


def prompts(dataset: Path, count: int) -> list[str]:
    """count of them, evenly spread over the file; all when there are fewer."""
    opener = gzip.open if dataset.suffix == ".gz" else open
    with opener(dataset, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    step = max(len(rows) // count, 1)
    return [row["prompt"] for row in rows[::step][:count]]
