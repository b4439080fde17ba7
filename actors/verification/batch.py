"""Defines the input and the result of verification, and checks which drafts can be used.

Shapes: B requests; k_i drafts of request i (0 allowed), K the largest; D = sum k_i drafts; R = D + B rows of logits,
request after request, k_i + 1 rows each: row j of a request predicts the token at `position + j`. V tokens in the
vocabulary; n tokens in a sparse q.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.actors.verification.constraints import Constraints, summary_of
from outrider.actors.verification.transfer import to_device
from outrider.cluster.link.messages import Q_SUM_TOLERANCE
from outrider.cluster.modes import Mode


class Status(enum.IntFlag):
    """Says what was wrong with a request's input, as bits of `VerificationResult.status`."""

    OK = 0
    BAD_PROPOSAL = 1
    """A draft id is out of range, or a q cannot have been sampled from. Drafts from there on were ignored; the
    committed tokens are right."""

    BAD_LOGITS = 2
    """The row of the next token has NaN, +inf or nothing but -inf. No token of the request is committed."""


@dataclass(frozen=True, eq=False)
class Sampling:
    """Holds sampling parameters by request, [B] each, int64 or float32, in the host's memory.

    mode: `Mode`. temperature: above 0, ignored in GREEDY. top_k: 0 for none. top_p in (0, 1], min_p in [0, 1].
    seed: 64 bits. In every mode but GREEDY a request without one needs a random seed of its own, from the operating
        system, never one that requests share.
    position: the position of the first row's token in the sequence, prompt included.
    """

    mode: NDArray[Any]
    temperature: NDArray[Any]
    top_k: NDArray[Any]
    top_p: NDArray[Any]
    min_p: NDArray[Any]
    seed: NDArray[Any]
    position: NDArray[Any]


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Describes consecutive rows that have the same mode."""

    mode: Mode
    rows: slice


@dataclass(frozen=True, eq=False)
class VerificationBatch:
    """Holds one step's input, as tensors on the logits' device. `build` makes it.

    logits: float32 [R, V], after logits processors (penalties, bias, masks) and before temperature; never changed.
    draft_ids: int64 [D]. q_ids: int64 [D, n] and q_probs: float32 [D, n], or None when no request has a q: every
    draft then counts as drawn with probability 1.
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
        num_drafts: NDArray[np.int64],
        draft_ids: NDArray[np.int64],
        sampling: Sampling,
        q_ids: NDArray[np.int64] | None = None,
        q_probs: NDArray[np.float32] | None = None,
    ) -> VerificationBatch:
        """Makes a batch, and copies parameters and proposals to the device in one copy that nobody waits for.

        Bad contents of logits and proposals do not raise; they end up in `VerificationResult.status`.

        Args:
            logits, draft_ids, q_ids, q_probs: as in the class, all but the logits in the host's memory.
            num_drafts: [B].

        Raises:
            ValueError: the logits have not as many rows as drafts and requests need.
        """
        device, (rows, vocab_size) = logits.device, logits.shape
        requests = len(num_drafts)
        if rows != len(draft_ids) + requests:
            raise ValueError(f"{rows} rows of logits do not fit {len(draft_ids)} drafts of {requests} requests")
        # The host does this in every step, and a small torch operation costs several times as much as numpy's.
        index = np.arange(requests)
        first_draft = num_drafts.cumsum() - num_drafts
        row_request = index.repeat(num_drafts + 1)
        limits, summary = _constraints(sampling, vocab_size)
        arrays = [num_drafts, first_draft + index, first_draft, row_request]
        arrays += [sampling.mode, sampling.seed, sampling.position]
        arrays += [limit[row_request] for limit in limits]
        arrays += [draft_ids] if q_ids is None or q_probs is None else [draft_ids, q_ids, q_probs]
        parts = to_device(arrays, device)
        return cls(
            logits=logits,
            draft_ids=parts[11],
            q_ids=None if q_ids is None else parts[12],
            q_probs=None if q_probs is None else parts[13],
            num_drafts=parts[0],
            first_row=parts[1],
            first_draft=parts[2],
            row_request=parts[3],
            max_drafts=int(num_drafts.max()) if requests else 0,
            mode=parts[4],
            seed=parts[5],
            position=parts[6],
            constraints=Constraints(parts[7], parts[8], parts[9], parts[10], *summary),
            groups=_groups(sampling.mode, num_drafts),
        )

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[1]


@dataclass(frozen=True, eq=False)
class VerificationResult:
    """Holds the committed tokens of one step.

    token_ids: int32 [B, K + 1], the committed tokens of each request (none with BAD_LOGITS), then -1.
    status: int64 [B], `Status` bits.
    """

    token_ids: Tensor
    status: Tensor


def valid_ids(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """Returns whether each id is in the vocabulary, bool [D]. draft_ids: int64 [D]."""
    return draft_ids.clamp(0, vocab_size - 1) == draft_ids


def valid_q(draft_ids: Tensor, q_ids: Tensor, q_probs: Tensor, vocab_size: int) -> Tensor:
    """Returns whether each row of q is a distribution that its draft can have been sampled from, bool [D].

    Ids must be in range and distinct, probabilities finite, not negative and sum to one within 1e-3, and the draft's
    own must be above 0. draft_ids: int64 [D]; q_ids: int64 [D, n]; q_probs: float32 [D, n].
    """
    in_range = valid_ids(q_ids, vocab_size).all(-1)
    ordered = q_ids.sort(-1).values
    distinct = (ordered[:, 1:] != ordered[:, :-1]).all(-1)
    # NaN fails every comparison, so each must hold for a good value.
    proper = (q_probs >= 0).all(-1) & ((q_probs.sum(-1) - 1).abs() <= Q_SUM_TOLERANCE)
    drawn = ((q_ids == draft_ids.unsqueeze(1)) & (q_probs > 0)).any(-1)
    return in_range & distinct & proper & drawn


def leading(true: Tensor) -> Tensor:
    """Counts the true values before the first false one, int64 [B]. true: bool [B, K]."""
    return true.cumprod(-1).sum(-1)


def _constraints(s: Sampling, vocab_size: int) -> tuple[list[NDArray[Any]], tuple[int, bool, bool, bool]]:
    """Returns the arrays of `Constraints` by request, not yet by row, and the host's summary of them."""
    greedy = s.mode == 0
    top_k = np.where(greedy | (s.top_k >= vocab_size), 0, s.top_k)
    top_p, min_p, temperature = s.top_p, s.min_p, s.temperature
    if greedy.any():
        one, zero = np.float32(1), np.float32(0)
        top_p, min_p = np.where(greedy, one, top_p), np.where(greedy, zero, min_p)
        temperature = np.where(greedy, one, temperature)
    return [temperature, top_k, top_p, min_p], summary_of(top_k, top_p, min_p)


def _groups(mode: NDArray[np.int64], num_drafts: NDArray[np.int64]) -> tuple[RowGroup, ...]:
    """Returns the runs of equal modes."""
    requests = len(mode)
    if not requests:
        return ()
    starts = [0, *((mode[1:] != mode[:-1]).nonzero()[0] + 1).tolist(), requests]
    ends = (num_drafts + 1).cumsum().tolist()
    return tuple(
        RowGroup(Mode(int(mode[start])), slice(ends[start - 1] if start else 0, ends[stop - 1]))
        for start, stop in itertools.pairwise(starts)
    )
