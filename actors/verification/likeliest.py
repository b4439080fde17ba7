"""The target's likeliest tokens, for a drafter that learns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.cluster.link.messages import TAUGHT_TOP

LEAST_LOG_P = -60.0
"""Anything below is told as this."""


def likeliest(logits: Tensor, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """ids int32 [n, TAUGHT_TOP] and their log-probabilities at temperature 1, float16, the likeliest first; of rows of
    logits [R, V], any floating type. A row that is not finite has LEAST_LOG_P everywhere, as no distribution has."""
    chosen = logits[torch.tensor(rows, device=logits.device)].float()
    top = chosen.topk(min(TAUGHT_TOP, chosen.shape[1]), dim=-1)
    log_p = (top.values - chosen.logsumexp(-1, keepdim=True)).nan_to_num(nan=LEAST_LOG_P, posinf=LEAST_LOG_P)
    # One copy from the device, not two.
    both = torch.stack([top.indices.to(torch.float64), log_p.to(torch.float64)]).cpu().numpy()
    return both[0].astype(np.int32), np.clip(both[1], LEAST_LOG_P, 0.0).astype(np.float16)
