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
    ids, shares = ranked_in_numpy(logits.numpy(), None if subset is None else subset.ids.numpy(), alternatives)
    drawn = torch.from_numpy(ids[:, 0].copy())
    if not alternatives:
        return DraftSample(drawn)
    return DraftSample(drawn, None, None, torch.from_numpy(ids[:, 1:]), torch.from_numpy(shares))


def ranked_in_numpy(z: np.ndarray, token_ids: np.ndarray | None, alternatives: int) -> tuple[np.ndarray, np.ndarray]:
    """Each row's likeliest tokens, and their probabilities at temperature 1.

    z: float32 [M, V]. token_ids: int64 [V], what the columns stand for; None: themselves. Returns int64 ids and float32
    probabilities, [M, 1 + alternatives], -1 and 0 where there is no other possible token. See greedy_in_numpy.
    """
    rows, vocab_size = z.shape
    every = np.arange(rows)
    best = z.argmax(1)
    top = z[every, best]
    if token_ids is not None:
        best = _lowest_id_among_equals(z, best, top, token_ids)
    columns = np.full((rows, 1 + alternatives), -1)
    shares = np.zeros((rows, 1 + alternatives), np.float32)
    columns[:, 0] = best
    if alternatives:
        with np.errstate(invalid="ignore", over="ignore"):  # rows that are bad
            left = np.exp(z - top[:, None])
            total = left.sum(1)
            shares[:, 0] = left[every, best]
            for place in range(1, min(1 + alternatives, vocab_size)):
                left[every, best] = -1.0
                best = left.argmax(1)
                columns[:, place], shares[:, place] = best, left[every, best]
            shares /= total[:, None]
    ids = columns if token_ids is None else token_ids[columns]
    if alternatives:
        ids[:, 1:][~(shares[:, 1:] > 0.0)] = -1
        shares[:, 1:][~(shares[:, 1:] > 0.0)] = 0.0
    return ids, shares


def _lowest_id_among_equals(z: np.ndarray, best: np.ndarray, top: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Columns stand in any order, so the first of equals need not have the lowest id."""
    for row in np.flatnonzero(np.count_nonzero(z == top[:, None], axis=1) > 1):
        columns = np.flatnonzero(z[row] == top[row])
        best[row] = columns[ids[columns].argmin()]
    return best
