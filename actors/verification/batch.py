"""What verification takes and gives.

Shapes: B requests; k_i drafts of request i (0 allowed), K the largest; D = sum k_i drafts; R = D + B rows of logits,
request after request, k_i + 1 rows each: row j of a request predicts the token at `position + j`. V tokens in the
vocabulary; n tokens in a sparse q.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.verification.constraints import Constraints


class Mode(enum.IntEnum):
    """How a request's drafts are verified. Modes mix freely in a batch."""

    GREEDY = 0
    REJECTION = 1
    """Standard rejection (Leviathan et al. 2023, arXiv 2211.17192)."""

    BLOCK = 2
    """Block verification (Sun et al. 2024, arXiv 2403.10444)."""

    COUPLED = 3
    """Drafter-invariant (Daliri et al. 2024, arXiv 2408.07978)."""


class Status(enum.IntFlag):
    """What was wrong with a request's input, bits of `VerificationResult.status`."""

    OK = 0
    BAD_PROPOSAL = 1
    """A draft id out of range, or a q that cannot have been sampled from. Drafts from there on were ignored; the
    tokens are right."""

    BAD_LOGITS = 2
    """NaN, +inf or nothing but -inf in the row of the next token. No token of the request is committed."""


@dataclass(frozen=True, eq=False)
class Sampling:
    """Per-request sampling parameters, CPU tensors [B] of any integer or floating type.

    mode: `Mode`. temperature: above 0, ignored in GREEDY. top_k: 0 or -1 for none. top_p in (0, 1], min_p in [0, 1].
    seed: 64 bits. Requests without one need a random seed of their own, from the operating system, in every mode but
        GREEDY; never a seed shared by requests.
    position: of the first row's token in the sequence, prompt included.
    """

    mode: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor

    @classmethod
    def uniform(
        cls,
        mode: Mode,
        seed: Tensor,
        position: Tensor,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> Sampling:
        """The same parameters for all requests but seed and position."""
        count = len(seed)
        return cls(
            mode=torch.full((count,), int(mode)),
            temperature=torch.full((count,), temperature),
            top_k=torch.full((count,), top_k),
            top_p=torch.full((count,), top_p),
            min_p=torch.full((count,), min_p),
            seed=seed,
            position=position,
        )

    def check(self) -> None:
        """Raises ValueError naming the parameter that is out of its range."""
        drawn = self.mode != Mode.GREEDY
        for name, wrong in (
            ("mode", (self.mode < 0) | (self.mode > Mode.COUPLED)),
            ("temperature", drawn & ~((self.temperature > 0) & self.temperature.isfinite())),
            ("top_k", self.top_k < -1),
            ("top_p", ~((self.top_p > 0) & (self.top_p <= 1))),
            ("min_p", ~((self.min_p >= 0) & (self.min_p <= 1))),
            ("position", (self.position < 0) | (self.position >= 2**31)),
        ):
            if wrong.any():
                request = int(wrong.nonzero()[0])
                raise ValueError(f"{name} of request {request} is out of range: {getattr(self, name)[request].item()}")


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Consecutive rows and requests of one mode, known to the host. Slices into rows and requests."""

    mode: Mode
    rows: slice
    requests: slice


@dataclass(frozen=True, eq=False)
class VerificationBatch:
    """One step's input, made by `build`. Tensors on the logits' device.

    logits: float32 [R, V], after logits processors (penalties, bias, masks), before temperature. Not changed.
    draft_ids: int64 [D]. q_ids: int64 [D, n] and q_probs: float32 [D, n], or None when no request has a q. A request
    without q gets one-hot rows: what a drafter that does not sample really samples from.
    num_drafts, first_row, first_draft: int64 [B]. row_request: int64 [R]. max_drafts: K.
    """

    logits: Tensor
    draft_ids: Tensor
    q_ids: Tensor | None
    q_probs: Tensor | None
    num_drafts: Tensor
    first_row: Tensor
    first_draft: Tensor
    row_request: Tensor
    max_drafts: int
    mode: Tensor
    seed: Tensor
    position: Tensor
    constraints: Constraints
    groups: tuple[RowGroup, ...]

    @classmethod
    def build(
        cls,
        logits: Tensor,
        num_drafts: Tensor,
        draft_ids: Tensor,
        sampling: Sampling,
        q_ids: Tensor | None = None,
        q_probs: Tensor | None = None,
        has_q: Tensor | None = None,
    ) -> VerificationBatch:
        """num_drafts, has_q (default: all, if there is a q): CPU tensors [B]; the others as in the class.

        Raises ValueError for shapes and parameters that do not fit, which are mistakes of the caller. Bad contents
        of logits and proposals are not: they end up in `VerificationResult.status`.
        """
        sampling.check()
        device, (rows, vocab_size) = logits.device, logits.shape
        requests, drafts = len(num_drafts), len(draft_ids)
        num_drafts = num_drafts.to(torch.int64)
        if (num_drafts < 0).any() or int(num_drafts.sum()) != drafts or rows != drafts + requests:
            raise ValueError(f"{rows} rows of logits and {drafts} drafts do not fit num_drafts of {requests} requests")
        if logits.dtype != torch.float32:
            raise ValueError(f"logits must be float32, found {logits.dtype}")
        if len(sampling.mode) != requests:
            raise ValueError(f"sampling parameters of {len(sampling.mode)} requests for {requests}")
        if (q_ids is None) != (q_probs is None) or (q_ids is not None and q_ids.shape != q_probs.shape):  # type: ignore[union-attr]
            raise ValueError("q_ids and q_probs must have the same shape")
        if q_ids is not None and (q_ids.shape[0] != drafts or q_ids.shape[1] > vocab_size):
            raise ValueError(f"q is {list(q_ids.shape)} for {drafts} drafts and {vocab_size} tokens")

        first_draft = num_drafts.cumsum(0) - num_drafts
        draft_ids = draft_ids.to(device, torch.int64).contiguous()
        if q_ids is not None and q_probs is not None:
            q_ids = q_ids.to(device, torch.int64).contiguous()
            q_probs = q_probs.to(device, torch.float32).contiguous()
            if has_q is not None and not has_q.all():
                lacks_q = (~has_q).repeat_interleave(num_drafts).to(device).unsqueeze(1)
                column = torch.arange(q_ids.shape[1], device=device)
                q_ids = torch.where(lacks_q, (draft_ids.unsqueeze(1) + column) % vocab_size, q_ids)
                q_ids[:, :1] = torch.where(lacks_q, draft_ids.unsqueeze(1), q_ids[:, :1])
                q_probs = torch.where(lacks_q, (column == 0).to(torch.float32), q_probs)
        row_request = torch.arange(requests).repeat_interleave(num_drafts + 1)
        return cls(
            logits=logits,
            draft_ids=draft_ids,
            q_ids=q_ids,
            q_probs=q_probs,
            num_drafts=num_drafts.to(device, non_blocking=True),
            first_row=(first_draft + torch.arange(requests)).to(device, non_blocking=True),
            first_draft=first_draft.to(device, non_blocking=True),
            row_request=row_request.to(device, non_blocking=True),
            max_drafts=int(num_drafts.max()) if requests else 0,
            mode=sampling.mode.to(device, torch.int64, non_blocking=True),
            seed=sampling.seed.to(device, torch.int64, non_blocking=True),
            position=sampling.position.to(device, torch.int64, non_blocking=True),
            constraints=_row_constraints(sampling, row_request, vocab_size, device),
            groups=_groups(sampling.mode, num_drafts),
        )

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[1]


@dataclass(frozen=True, eq=False)
class VerificationResult:
    """token_ids: int32 [B, K + 1], the committed tokens of each request, then -1.
    accepted_len: int64 [B], how many of them are drafts: accepted_len + 1 are committed, or none with BAD_LOGITS.
    status: int64 [B], `Status` bits."""

    token_ids: Tensor
    accepted_len: Tensor
    status: Tensor


def _row_constraints(s: Sampling, row_request: Tensor, vocab_size: int, device: torch.device) -> Constraints:
    greedy = s.mode == Mode.GREEDY
    top_k = torch.where(greedy | (s.top_k < 0) | (s.top_k >= vocab_size), 0, s.top_k).to(torch.int64)
    top_p = torch.where(greedy, 1.0, s.top_p).to(torch.float32)
    min_p = torch.where(greedy, 0.0, s.min_p).to(torch.float32)
    temperature = torch.where(greedy, 1.0, s.temperature).to(torch.float32)
    return Constraints(
        temperature=temperature[row_request].to(device, non_blocking=True),
        top_k=top_k[row_request].to(device, non_blocking=True),
        top_p=top_p[row_request].to(device, non_blocking=True),
        min_p=min_p[row_request].to(device, non_blocking=True),
        max_top_k=int(top_k.max()) if len(top_k) else 0,
        all_top_k=bool((top_k > 0).all()),
        any_top_p=bool((top_p < 1).any()),
        any_min_p=bool((min_p > 0).any()),
    )


def _groups(mode: Tensor, num_drafts: Tensor) -> tuple[RowGroup, ...]:
    """Runs of equal modes. REJECTION and BLOCK scan their rows alike, but the run's mode is kept."""
    modes, counts = mode.unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    row_ends = (num_drafts + 1).cumsum(0)[ends - 1] if len(ends) else ends
    bounds = itertools.pairwise([(0, 0), *zip(ends.tolist(), row_ends.tolist(), strict=True)])
    return tuple(
        RowGroup(Mode(m), slice(row0, row1), slice(b0, b1))
        for m, ((b0, row0), (b1, row1)) in zip(modes.tolist(), bounds, strict=True)
    )
