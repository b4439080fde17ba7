"""Which CUDA graphs a draft model's steps are given, counted where vLLM's dispatcher is asked for one."""

from __future__ import annotations

from collections import Counter
from typing import Any

_HITS: Counter[str] = Counter()
"""Of the one rank in this process."""


def count_graphs(worker: Any) -> None:
    """On a rank, once: from now on each graph that its dispatcher gives is counted. worker: vLLM's."""
    dispatcher = worker.model_runner.cudagraph_dispatcher
    inner = dispatcher.dispatch

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        mode, descriptor = inner(*args, **kwargs)
        _HITS[f"{mode.name} {descriptor.num_tokens}"] += 1
        return mode, descriptor

    dispatcher.dispatch = dispatch


def take_hits(worker: Any) -> dict[str, int]:
    """By mode and padded tokens (``PIECEWISE 16``): steps since the last call. Empty on a CPU, which asks for none."""
    found = dict(_HITS)
    _HITS.clear()
    return found
