"""Turns min_p, top_k and top_p, applied in this order after temperature, into one threshold by row.

Each of the three masks keeps the tokens at or above some logit, so no masked copy of the logits is needed. Tokens that
tie with the threshold are all kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.actors.verification.search import CHUNK_ELEMENTS

PREFIX = 1024
"""Tokens that a CPU orders first. They hold top_p in most rows, and ordering all would take 14 times as long."""

GPU_CHUNK_ELEMENTS = 1 << 25
"""Logits that a GPU works on at once: 128 MiB of weights, whatever the batch."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """Holds the constraints of each row on the logits' device, and the host's summary of all rows.

    The summary saves work and synchronisations with the device.

    temperature: float32 [R], above 0. top_k: int64 [R], 0 for none. top_p: float32 [R] in (0, 1]. min_p: float32 [R].
    max_top_k: the largest top_k in use, 0 if none is. all_top_k: every row has a top_k.
    any_top_p, any_min_p: some row has one.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    max_top_k: int
    all_top_k: bool
    any_top_p: bool
    any_min_p: bool

    @property
    def any(self) -> bool:
        return self.max_top_k > 0 or self.any_top_p or self.any_min_p

    def rows(self, part: slice | Tensor) -> Constraints:
        """Returns the constraints of some rows. The summary stays that of all rows, which holds for some too."""
        values = {name: getattr(self, name)[part] for name in ("temperature", "top_k", "top_p", "min_p")}
        return replace(self, **values)


def summary_of(top_k: NDArray[Any], top_p: NDArray[Any], min_p: NDArray[Any]) -> tuple[int, bool, bool, bool]:
    """Returns the summary of all rows that `Constraints` holds, in its order."""
    max_top_k = int(top_k.max(initial=0))
    return max_top_k, max_top_k > 0 and bool((top_k > 0).all()), bool((top_p < 1).any()), bool((min_p > 0).any())


def thresholds(logits: Tensor, row_max: Tensor, constraints: Constraints) -> Tensor:
    """Returns the logit from which a row's tokens are kept, float32 [R], -inf where nothing is cut.

    The likeliest token is always kept. Does not wait for a GPU. logits: float32 [R, V]; row_max: float32 [R].
    """
    rows, vocab_size = logits.shape
    step = max(1, (CHUNK_ELEMENTS if logits.device.type == "cpu" else GPU_CHUNK_ELEMENTS) // vocab_size)
    parts = [slice(start, start + step) for start in range(0, rows, step)]
    return torch.cat([row_max[:0], *(_thresholds(logits[p], row_max[p], constraints.rows(p)) for p in parts)])


def _thresholds(logits: Tensor, row_max: Tensor, c: Constraints) -> Tensor:
    vocab_size = logits.shape[1]
    threshold = torch.full_like(row_max, -math.inf)
    if c.any_min_p:
        threshold = torch.where(c.min_p > 0, row_max + c.temperature * torch.log(c.min_p), threshold)
    max_top_k = min(c.max_top_k, vocab_size)
    ordered = None
    if max_top_k:
        ordered = logits.topk(max_top_k, dim=-1).values
        kth = ordered.gather(1, (c.top_k.clamp(1, max_top_k) - 1).unsqueeze(1)).squeeze(1)
        threshold = torch.where((c.top_k > 0) & (c.top_k < vocab_size), torch.maximum(threshold, kth), threshold)
    if c.any_top_p:
        top_p = _top_p_thresholds(logits, row_max, threshold, ordered if c.all_top_k else None, c)
        threshold = torch.where(c.top_p < 1, torch.maximum(threshold, top_p), threshold)
    return torch.minimum(threshold, row_max)


def _top_p_thresholds(
    logits: Tensor, row_max: Tensor, threshold: Tensor, ordered: Tensor | None, c: Constraints
) -> Tensor:
    """Returns the threshold of top_p of the mass that min_p and top_k left, float32 [R].

    A token is kept while the likelier ones hold less than top_p. ordered: the largest logits in descending order, if
    they hold all that the earlier masks left.
    """

    def weight(values: Tensor) -> Tensor:
        e = (values - row_max.unsqueeze(1)).div_(c.temperature.unsqueeze(1)).exp_()
        return e.masked_fill_(values < threshold.unsqueeze(1), 0.0)

    if ordered is None and logits.device.type == "cuda":
        from outrider.actors.verification import triton_top_p

        weights = weight(logits)
        return triton_top_p.nucleus(logits, weights, c.top_p * weights.sum(-1, dtype=torch.float64))
    on_cpu = logits.device.type == "cpu"
    mass = weight(logits if ordered is None else ordered).sum(-1, dtype=torch.float64)
    if ordered is not None:
        # Tokens that tie with the k-th are kept too, but are not among the ordered ones.
        floor = threshold.unsqueeze(1)
        unlisted = (logits >= floor).sum(-1) - (ordered >= floor).sum(-1)
        mass = mass + unlisted * weight(floor).squeeze(1).to(torch.float64)
    if ordered is None:
        few = on_cpu and logits.shape[1] > PREFIX
        ordered = logits.topk(PREFIX, dim=-1).values if few else logits.sort(dim=-1, descending=True).values
        aim = c.top_p * mass
        if few and bool(((weight(ordered).sum(-1, dtype=torch.float64) < aim) & (c.top_p < 1)).any()):
            ordered = logits.sort(dim=-1, descending=True).values
    weights = weight(ordered).to(torch.float64)
    before = weights.cumsum(-1) - weights
    kept = (before < (c.top_p * mass).unsqueeze(1)) & (weights > 0)
    last = (kept.sum(-1, keepdim=True) - 1).clamp_min(0)
    return ordered.gather(1, last).squeeze(1)
