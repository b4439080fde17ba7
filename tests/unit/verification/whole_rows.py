"""Every probability of a row under its constraints, which the kernels never make: by their thresholds."""

from __future__ import annotations

import math

from torch import Tensor

from outrider.actors.verification.constraints import Constraints, thresholds


def constrain_logits(logits: Tensor, constraints: Constraints) -> Tensor:
    """log p up to a constant per row: logits / temperature, -inf where masked. logits: float32 [R, V], unchanged."""
    scaled = logits / constraints.temperature.unsqueeze(1)
    if not constraints.any:
        return scaled
    threshold = thresholds(logits, logits.amax(-1), constraints)
    return scaled.masked_fill_(logits < threshold.unsqueeze(1), -math.inf)


def processed_probs(logits: Tensor, constraints: Constraints) -> Tensor:
    """p itself: float32 [R, V]."""
    return constrain_logits(logits, constraints).softmax(-1)
