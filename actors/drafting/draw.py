"""Drawing drafts: each row of a step as its request asks, and what it was drawn from. Knows of no engine."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.drafting.draw_group import DrawEnd, DrawGroup, DrawKind, DrawRow, GroupDraws
from actors.verification.token_subset import TokenSubset


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

        self._groups: list[tuple[DrawKind, DrawGroup]] = []
        self._drawn: dict[DrawKind, list[GroupDraws]] = {}

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
                end = ends[places[count]] if count < len(places) else DrawEnd.NONE
                result = results[row_id] = DrawnRow(ids[:count], bad_logits=end == DrawEnd.BAD_LOGITS)
                result.exhausted = end == DrawEnd.EXHAUSTED
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
        places: dict[DrawKind, list[int]] = {}
        for place, row_id in enumerate(row_ids):
            row = self._rows.get(row_id)
            if row is not None:
                places.setdefault(DrawKind.of(row.sampling), []).append(place)
        self._groups = []
        for kind, members in places.items():
            rows = [self._rows[row_ids[place]] for place in members]
            drawn = [self._counts[row.row_id] for row in rows]
            some = members if len(members) < len(row_ids) else None
            self._groups.append((kind, DrawGroup(kind, rows, drawn, some, columns, device, self._subset)))
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
