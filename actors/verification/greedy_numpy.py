"""Greedy drafts of a few rows on a CPU, where calls cost more than what they do: numpy's cost less than torch's."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actors.verification.draft_sample import DraftSample
from actors.verification.token_subset import TokenSubset

FEW_LOGITS = 1 << 18
"""Above, torch's vectorised exponentials win."""


def greedy_in_numpy(logits: Tensor, subset: TokenSubset | None, alternatives: int) -> DraftSample:
    """logits: float32 [M, V]. The lowest id among equals; any id, and a confidence that is not finite, in a row without
    a finite maximum. Fields and shapes as in DraftSample."""
    z = logits.numpy()
    rows, vocab_size = z.shape
    ids = None if subset is None else subset.ids.numpy()
    every = np.arange(rows)
    best = z.argmax(1)
    top = z[every, best]
    if ids is not None:
        best = _lowest_id_among_equals(z, best, top, ids)
    drawn = torch.from_numpy(best if ids is None else ids[best])
    if not alternatives:
        return DraftSample(drawn)
    others = np.full((rows, alternatives), -1)
    confidence = np.zeros((rows, 1 + alternatives), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # rows that are bad
        share = np.exp(z - top[:, None])
        total = share.sum(1)
        confidence[:, 0] = share[every, best] / total
        left = share
        for place in range(min(alternatives, vocab_size - 1)):
            left[every, best] = -1.0
            best = left.argmax(1)
            probability = left[every, best] / total
            exists = probability > 0.0
            others[exists, place] = (best if ids is None else ids[best])[exists]
            confidence[exists, 1 + place] = probability[exists]
    return DraftSample(drawn, None, None, torch.from_numpy(others), torch.from_numpy(confidence))


def _lowest_id_among_equals(z: np.ndarray, best: np.ndarray, top: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Columns stand in any order, so the first of equals need not have the lowest id."""
    for row in np.flatnonzero(np.count_nonzero(z == top[:, None], axis=1) > 1):
        columns = np.flatnonzero(z[row] == top[row])
        best[row] = columns[ids[columns].argmin()]
    return best
