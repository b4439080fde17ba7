"""Chooses the verification kernel for a device. The kernels do not import this module."""

from __future__ import annotations

from typing import Protocol

import torch

from outrider.actors.verification.batch import VerificationBatch, VerificationResult


class Verification(Protocol):
    """Decides one step: which drafts are committed, and which token comes after them.

    Committed tokens are distributed exactly as if each had been sampled from p alone. In GREEDY and COUPLED mode they
    are the very tokens that decoding without drafts gives.
    """

    def __call__(self, batch: VerificationBatch) -> VerificationResult: ...


def kernel_for(device: torch.device | str) -> Verification:
    """Returns the implementation for logits on `device`. Raises ImportError on a GPU without Triton."""
    if torch.device(device).type == "cuda":
        from outrider.actors.verification import triton_kernel

        return triton_kernel.verify
    from outrider.actors.verification import torch_kernel

    return torch_kernel.verify
