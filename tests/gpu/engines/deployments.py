"""Deployments of these tests beside those of support/cluster/serving.py: what `added` is given, section by section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.cluster.serving import DEADLINES, Models, engine

PATIENT = {"round_deadline_ms": 5000, "link_deadline_ms": 30000}

SIDES: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": {},
    "mla": {"dtype": "bfloat16"},  # its kernels take no float32
    "fp8": {"engine_args": {"quantization": "fp8"}, "dtype": "bfloat16"},
    "tp2": {"tensor_parallel_size": 2},
}
"""What a draft model's section has besides, by its kind."""


def target_and_lookup(models: Models, method: str) -> dict[str, Any]:
    """On one GPU."""
    return {"target": engine(models.target), "drafter": {"method": method}, "speculation": {"adaptive": False}}


def pair_over(models: Models, backend: str) -> dict[str, Any]:
    """Return a pair whose link has that backend."""
    return {**_pair(models), "link": {**DEADLINES, "backend": backend}}


def pair_with_graphs(models: Models, target_eager: bool, drafter_eager: bool) -> dict[str, Any]:
    """Return a pair of which either side replays CUDA graphs unless it is eager."""
    pair = _pair(models)
    return {
        **pair,
        "target": _eager(pair["target"], target_eager),
        "drafter": _eager(pair["drafter"], drafter_eager),
    }


def _eager(section: dict[str, Any], eager: bool) -> dict[str, Any]:
    return {**section, "engine_args": {**section["engine_args"], "enforce_eager": eager}}


def pair_of_kind(kind: str, target: Path | str, drafter: Path | str, num_speculative_tokens: int) -> dict[str, Any]:
    """Return a pair whose draft model is of a kind of SIDES."""
    side = {"dtype": "float32", **SIDES[kind]}
    return {
        "target": engine(Path(target), dtype=side["dtype"], engine_args={"enable_prefix_caching": False}),
        "drafter": {"method": "draft_model", **engine(Path(drafter), **side)},
        "speculation": {"num_speculative_tokens": num_speculative_tokens, "adaptive": False},
        "link": PATIENT,
    }


def _pair(models: Models) -> dict[str, Any]:
    return {
        "target": engine(models.target),
        "drafter": {"method": "draft_model", **engine(models.drafter)},
        "speculation": {"adaptive": False},
        "link": DEADLINES,
    }
