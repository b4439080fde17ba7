"""Builds the kernels' batches from whatever arrays and tensors a test has."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from outrider.actors.verification.batch import Sampling, VerificationBatch
from outrider.cluster.modes import Mode


def sampling_of(**values: Any) -> Sampling:
    """Returns sampling parameters, each given as an array or a CPU tensor of any type."""
    real = ("temperature", "top_p", "min_p")
    return Sampling(**{name: _host(value, np.float32 if name in real else np.int64) for name, value in values.items()})


def uniform(
    mode: Mode, seed: Any, position: Any, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Sampling:
    """Returns the same parameters for all requests, except for seed and position."""
    fixed = {"mode": int(mode), "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": 0.0}
    return sampling_of(seed=seed, position=position, **{name: np.full(len(seed), at) for name, at in fixed.items()})


def build(
    logits: Tensor,
    num_drafts: Any,
    draft_ids: Any,
    sampling: Sampling,
    q_ids: Any = None,
    q_probs: Any = None,
) -> VerificationBatch:
    """Returns the batch, see `VerificationBatch.build`."""
    q = () if q_ids is None else (_host(q_ids, np.int64), _host(q_probs, np.float32))
    return VerificationBatch.build(logits, _host(num_drafts, np.int64), _host(draft_ids, np.int64), sampling, *q)


def _host(value: Any, kind: type) -> np.ndarray:
    return np.ascontiguousarray(value.cpu() if isinstance(value, Tensor) else value, kind)
