"""Rows that can be drawn together: the same way to draw, the same n, biases or none.

A row's draw depends on its own logits, sampling, seed and positions, never on the rows beside it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from actors.messages import DraftSampling
from actors.verification.constraints import Constraints
from actors.verification.draft_sample import DraftSample
from actors.verification.draft_sampler import sample_drafts
from actors.verification.mode import Mode
from actors.verification.token_subset import TokenSubset

_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-6, 1e6
"""Beyond, float32 overflows, and the choice is greedy or uniform as it is."""


@dataclass(frozen=True, slots=True)
class DrawRow:
    """A row to draw for. position: of the first token drawn; the i-th from 0 is for position + i, all of them for the
    round that starts at round_start."""

    row_id: Hashable
    sampling: DraftSampling
    position: int
    round_start: int


class DrawKind(NamedTuple):
    mode: Mode
    """GREEDY, COUPLED or REJECTION: block verification takes the same draws."""

    top_n: int
    biased: bool

    @classmethod
    def of(cls, sampling: DraftSampling) -> DrawKind:
        mode, biased = sampling.mode, bool(sampling.biases)
        if mode.samples_q:
            mode = Mode.REJECTION if sampling.top_n else Mode.GREEDY
        return cls(mode, sampling.top_n if mode is Mode.REJECTION else 0, biased)


class DrawEnd(enum.IntEnum):
    """Why a row's drafts end, a byte a row on the device."""

    NONE = 0
    BAD_LOGITS = 1
    EXHAUSTED = 2


class _Biases:
    """Of m rows, flat over their biased tokens: row, column int64 [E], value float32 [E].

    exhausted: bool [m], rows that may have nothing but tokens outside the subset; None without any such risk.
    """

    def __init__(self, samplings: Sequence[DraftSampling], device: torch.device, subset: TokenSubset | None) -> None:
        entries = [(i, token) for i, sampling in enumerate(samplings) for token, _ in sampling.biases]
        values = [bias for sampling in samplings for _, bias in sampling.biases]
        only = [i for i, sampling in enumerate(samplings) if sampling.only_biased]
        self._row, self._column = torch.tensor(entries, device=device).unbind(1)
        self._value = torch.tensor(values, dtype=torch.float32, device=device)
        self._only = torch.tensor(only, device=device) if only else None
        self._cut = subset is not None
        self.exhausted: Tensor | None = None
        if subset is None:
            return
        self._column = subset.columns_of(self._column)
        if self._only is not None:
            allowed = (self._column < len(subset.ids)) & (self._value > -math.inf)
            none_left = torch.zeros(len(samplings), dtype=torch.int64, device=device)
            none_left.index_fill_(0, self._only, 1)
            # Negative or 0 where at least one allowed token is counted off.
            self.exhausted = none_left.index_add_(0, self._row, -allowed.to(torch.int64)) > 0

    def added_to(self, logits: Tensor) -> Tensor:
        """A biased copy. logits: float32 [m, V]."""
        vocab_size = logits.shape[1]
        # Biased tokens outside the subset share a column past its end, and no host need know which they are.
        copy = logits.new_empty(len(logits), vocab_size + self._cut)
        copy[:, :vocab_size] = logits
        if self._cut:
            copy[:, vocab_size] = 0.0
        biased = copy[self._row, self._column] + self._value
        if self._only is not None:
            copy.index_fill_(0, self._only, -math.inf)
        copy[self._row, self._column] = biased
        return copy[:, :vocab_size]


@dataclass(frozen=True, eq=False)
class GroupDraws:
    """One step's draws for m rows of a kind. end: uint8 [m], a DrawEnd each. sample: of m rows."""

    row_ids: list[Hashable]
    end: Tensor
    sample: DraftSample


class DrawGroup:
    """Rows of one kind. places: int64 [m], where they stand in the step's logits; None: they are all of it.

    drawn: how many tokens each row has had before. vocab_size: columns of the logits.
    """

    def __init__(
        self,
        kind: DrawKind,
        rows: Sequence[DrawRow],
        drawn: Sequence[int],
        places: list[int] | None,
        vocab_size: int,
        device: torch.device,
        subset: TokenSubset | None,
    ) -> None:
        samplings = [row.sampling for row in rows]
        self._kind = kind
        self._subset = subset
        self._row_ids = [row.row_id for row in rows]
        self.places = None if places is None else torch.tensor(places, device=device)
        self._seed, self._position, self._round_start, top_k = torch.tensor(
            [
                [s.seed for s in samplings],
                [row.position + before for row, before in zip(rows, drawn, strict=True)],
                [row.round_start for row in rows],
                [s.top_k if s.top_k < vocab_size else 0 for s in samplings],
            ],
            device=device,
        ).unbind()
        temperature, top_p, min_p = torch.tensor(
            [
                [min(max(s.temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE) for s in samplings],
                [s.top_p for s in samplings],
                [s.min_p for s in samplings],
            ],
            dtype=torch.float32,
            device=device,
        ).unbind()
        limits = [s.top_k for s in samplings if 0 < s.top_k < vocab_size]
        self._constraints = Constraints(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            max_top_k=max(limits, default=0),
            all_top_k=len(limits) == len(samplings),
            any_top_p=any(s.top_p < 1 for s in samplings),
            any_min_p=any(s.min_p > 0 for s in samplings),
        )
        self._biases = _Biases(samplings, device, subset) if kind.biased else None

    def draw(self, logits: Tensor, index: int, alternatives: int) -> GroupDraws:
        """The group's draws, `index` steps after its first. logits: float32 [rows of the step, V], not changed."""
        if self.places is not None:
            logits = logits.index_select(0, self.places)
        if self._biases is not None:
            logits = self._biases.added_to(logits)
        position = self._position + index if index else self._position
        kind, where = self._kind, (self._seed, position, self._round_start)
        sample = sample_drafts(logits, kind.mode, self._constraints, *where, kind.top_n, self._subset, alternatives)
        # NaN and infinity reach every probability of a row.
        finite = (logits.amax(-1) if sample.q_probs is None else sample.q_probs.sum(-1)).isfinite()
        end = (~finite).to(torch.uint8)
        if self._biases is not None and self._biases.exhausted is not None:
            end.masked_fill_(self._biases.exhausted, DrawEnd.EXHAUSTED)
        return GroupDraws(self._row_ids, end, sample)
