"""One interface, two implementations: torch for the CPU, Triton for GPUs."""

from __future__ import annotations

from typing import Protocol

import torch

from actors.verification.batch import VerificationBatch, VerificationResult


class Verification(Protocol):
    """Decides one step: which drafts are committed and which token comes after them.

    Committed tokens are distributed exactly as if each had been sampled from p alone; in GREEDY and COUPLED mode they
    are the very tokens that k = 0 gives.
    """

    def __call__(self, batch: VerificationBatch) -> VerificationResult: ...


def choose(device: torch.device | str) -> Verification:
    """The implementation for logits on `device`. Raises ImportError on a GPU without Triton."""
    if torch.device(device).type == "cuda":
        from actors.verification.triton_kernel import verify as triton_verify

        return triton_verify
    from actors.verification.torch_kernel import verify

    return verify
