"""Drawing drafts: each row of a step as its request asks, and what it was drawn from. Knows of no engine.

Rows that can be drawn together form a group: the same way to draw, the same n, biases or none. A row's draw depends on
its own logits, sampling, seed and positions, never on the rows beside it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
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


@dataclass(slots=True)
class DrawnRow:
    """What was drawn for one row: fewer tokens than steps only with bad_logits or exhausted.

    q_ids: int32 [k, n], q_probs: float32 [k, n], what each was drawn from. None where no q need travel.
    alternatives: int32 [k, A], other tokens that verification may choose, likeliest first, -1 where there is none or
        fewer were asked for. confidence: float32 [k, 1 + A], the drafter's probabilities of the token drawn and of
        these, 0 beside -1. None where no step asked.
    bad_logits: the model gave NaN, infinity or nothing but minus infinity where the next token was to be drawn.
    exhausted: none of the tokens that the request allows is in the draft vocabulary.
    """

    token_ids: list[int]
    q_ids: np.ndarray | None = None
    q_probs: np.ndarray | None = None
    alternatives: np.ndarray | None = None
    confidence: np.ndarray | None = None
    bad_logits: bool = False
    exhausted: bool = False


class _Kind(NamedTuple):
    mode: Mode
    """GREEDY, COUPLED or REJECTION: block verification takes the same draws."""

    top_n: int
    biased: bool

    @classmethod
    def of(cls, sampling: DraftSampling) -> _Kind:
        mode, biased = sampling.mode, bool(sampling.biases)
        if mode.samples_q:
            mode = Mode.REJECTION if sampling.top_n else Mode.GREEDY
        return cls(mode, sampling.top_n if mode is Mode.REJECTION else 0, biased)


class _End(enum.IntEnum):
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
class _Drawn:
    """One step's draws for m rows of a kind. end: uint8 [m], an _End each. sample: of m rows."""

    row_ids: list[Hashable]
    end: Tensor
    sample: DraftSample


class _Group:
    """Rows of one kind. places: int64 [m], where they stand in the step's logits; None: they are all of it.

    drawn: how many tokens each row has had before. vocab_size: columns of the logits.
    """

    def __init__(
        self,
        kind: _Kind,
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

    def draw(self, logits: Tensor, index: int, alternatives: int) -> _Drawn:
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
            end.masked_fill_(self._biases.exhausted, _End.EXHAUSTED)
        return _Drawn(self._row_ids, end, sample)


class Draws:
    """The draws of some rows, step by step. A row may join or leave at any step; its draws are counted by row.

    vocab_ids: int64 [N], the tokens that the columns of all logits stand for, in any order; None: all tokens. A
    TokenSubset that is kept while these are the same saves work.
    """

    def __init__(self, rows: Sequence[DrawRow], vocab_ids: Tensor | TokenSubset | None = None) -> None:
        self._rows = {row.row_id: row for row in rows}
        self._counts: dict[Hashable, int] = dict.fromkeys(self._rows, 0)
        self._subset = TokenSubset(vocab_ids) if isinstance(vocab_ids, Tensor) else vocab_ids
        self._arranged_for: list[Hashable] = []
        self._steps = 0
        """Since the rows were arranged."""

        self._groups: list[tuple[_Kind, _Group]] = []
        self._drawn: dict[_Kind, list[_Drawn]] = {}

    def draw(self, logits: Tensor, row_ids: Sequence[Hashable], alternatives: int = 0) -> Tensor:
        """The next token id of every row, 0 for rows that are none of these: int32 [rows, 1], on the device of logits.

        logits: [rows, V or N] of any float type. row_ids: the rows of this step, in their order. alternatives: how many
        other tokens to name for each; they stay on the device until results().
        """
        if row_ids != self._arranged_for:
            self._arrange(list(row_ids), logits.shape[1], logits.device)
        logits = logits.to(torch.float32)
        ids = None
        for kind, group in self._groups:
            drawn = group.draw(logits, self._steps, alternatives)
            self._drawn.setdefault(kind, []).append(drawn)
            if group.places is None:
                ids = drawn.sample.ids
            else:
                if ids is None:
                    ids = torch.zeros(len(row_ids), dtype=torch.int64, device=logits.device)
                ids.index_copy_(0, group.places, drawn.sample.ids)
        self._steps += 1
        if ids is None:
            return torch.zeros(len(row_ids), 1, dtype=torch.int32, device=logits.device)
        return ids.to(torch.int32).unsqueeze(1)

    def results(self, token_ids: Mapping[Any, Sequence[int]]) -> dict[Any, DrawnRow]:
        """What was drawn for every row that was in a step. token_ids: the ids of each, one a step.

        A row ends before its first draft whose logits were not finite or that had no token to draw. Raises RuntimeError
        when token_ids are not as many as were drawn.
        """
        results: dict[Any, DrawnRow] = {}
        for steps in self._drawn.values():
            ends = torch.cat([step.end for step in steps]).tolist()
            samples = [step.sample for step in steps]
            q_ids, q_probs = _stacked([s.q_ids for s in samples]), _stacked([s.q_probs for s in samples])
            width = max(0 if s.alternatives is None else s.alternatives.shape[1] for s in samples)
            others = _stacked([_widened(s.ids, s.alternatives, width, -1) for s in samples])
            confidence = _stacked([_widened(s.ids, s.confidence, width + 1, 0.0) for s in samples]) if width else None
            at: dict[Hashable, list[int]] = {}
            for place, row_id in enumerate(row_id for step in steps for row_id in step.row_ids):
                at.setdefault(row_id, []).append(place)
            for row_id, places in at.items():
                ids = list(token_ids[row_id])
                if len(ids) != len(places):
                    raise RuntimeError(f"{row_id}: {len(ids)} draft ids of {len(places)} drawn")
                count = next((i for i, place in enumerate(places) if ends[place]), len(places))
                end = ends[places[count]] if count < len(places) else _End.NONE
                result = results[row_id] = DrawnRow(ids[:count], bad_logits=end == _End.BAD_LOGITS)
                result.exhausted = end == _End.EXHAUSTED
                if not count:
                    continue
                kept = places[:count]
                if q_ids is not None and q_probs is not None:
                    result.q_ids = q_ids[kept].to(torch.int32).numpy()
                    result.q_probs = q_probs[kept].numpy()
                if others is not None and confidence is not None:
                    result.alternatives = others[kept].to(torch.int32).numpy()
                    result.confidence = confidence[kept].numpy()
        return results

    def _arrange(self, row_ids: list[Hashable], columns: int, device: torch.device) -> None:
        if self._subset is not None and len(self._subset.ids) != columns:
            raise ValueError(f"vocab_ids: {len(self._subset.ids)} tokens for {columns} columns of logits")
        for row_id in self._arranged_for:
            if row_id in self._counts:
                self._counts[row_id] += self._steps
        self._steps = 0
        places: dict[_Kind, list[int]] = {}
        for place, row_id in enumerate(row_ids):
            row = self._rows.get(row_id)
            if row is not None:
                places.setdefault(_Kind.of(row.sampling), []).append(place)
        self._groups = []
        for kind, members in places.items():
            rows = [self._rows[row_ids[place]] for place in members]
            drawn = [self._counts[row.row_id] for row in rows]
            some = members if len(members) < len(row_ids) else None
            self._groups.append((kind, _Group(kind, rows, drawn, some, columns, device, self._subset)))
        self._arranged_for = row_ids


def _widened(ids: Tensor, values: Tensor | None, width: int, filling: float) -> Tensor | None:
    """values, [m, some], to [m, width]; all of it filling for None. ids: [m]."""
    if not width:
        return None
    if values is None:
        dtype = torch.int64 if filling else torch.float32
        return torch.full((len(ids), width), filling, dtype=dtype, device=ids.device)
    return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=filling)


def _stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
    """All rows in one tensor on the host."""
    known = [part for part in parts if part is not None]
    return torch.cat(known).cpu() if known else None
