"""Drawing drafts: each row of a step as its request asks, and what it was drawn from. Knows of no engine.

Rows that can be drawn together form a group: the same way to draw, the same n, biases or none. A row's draw depends on
its own logits, sampling, seed and positions, never on the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from actors.drafting.draft_plan import Drafted, PlanRow
from actors.messages import DraftSampling
from actors.verification.constraints import Constraints
from actors.verification.draft_sampler import sample_drafts
from actors.verification.mode import Mode

_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-6, 1e6
"""Beyond, float32 overflows, and the choice is greedy or uniform as it is."""


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


class _Biases:
    """Of m rows, flat over their biased tokens: row, token int64 [E], value float32 [E]."""

    def __init__(self, samplings: Sequence[DraftSampling], device: torch.device) -> None:
        entries = [(i, token) for i, sampling in enumerate(samplings) for token, _ in sampling.biases]
        values = [bias for sampling in samplings for _, bias in sampling.biases]
        only = [i for i, sampling in enumerate(samplings) if sampling.only_biased]
        self._row, self._token = torch.tensor(entries, device=device).unbind(1)
        self._value = torch.tensor(values, dtype=torch.float32, device=device)
        self._only = torch.tensor(only, device=device) if only else None

    def add_to(self, logits: Tensor) -> None:
        """In place. logits: float32 [m, V]."""
        biased = logits[self._row, self._token] + self._value
        if self._only is not None:
            logits.index_fill_(0, self._only, -math.inf)
        logits[self._row, self._token] = biased


@dataclass(frozen=True, eq=False)
class _Drawn:
    """One step's draws for m rows of a kind. finite: bool [m]. q_ids: int64, q_probs: float32, [m, n] or None."""

    request_ids: list[str]
    finite: Tensor
    q_ids: Tensor | None
    q_probs: Tensor | None


class _Group:
    """Rows of one kind. places: int64 [m], where they stand in the step's logits; None: they are all of it."""

    def __init__(
        self, kind: _Kind, rows: Sequence[PlanRow], places: list[int] | None, vocab_size: int, device: torch.device
    ) -> None:
        samplings = [row.sampling for row in rows]
        self._kind = kind
        self._request_ids = [row.request_id for row in rows]
        self.places = None if places is None else torch.tensor(places, device=device)
        self._seed, self._committed_len, top_k = torch.tensor(
            [
                [s.seed for s in samplings],
                [row.num_computed + row.num_scheduled for row in rows],
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
        self._biases = _Biases(samplings, device) if kind.biased else None

    def draw(self, logits: Tensor, index: int) -> tuple[Tensor, _Drawn]:
        """The ids, int64 [m], of draft `index`. logits: float32 [rows of the step, V], not changed."""
        if self.places is not None:
            logits = logits.index_select(0, self.places)
        if self._biases is not None:
            logits = logits.clone() if self.places is None else logits
            self._biases.add_to(logits)
        start = self._committed_len
        position = start + index if index else start
        kind = self._kind
        drawn = sample_drafts(logits, kind.mode, self._constraints, self._seed, position, start, kind.top_n)
        # NaN and infinity reach every probability of a row.
        finite = (logits.amax(-1) if drawn.q_probs is None else drawn.q_probs.sum(-1)).isfinite()
        return drawn.ids, _Drawn(self._request_ids, finite, drawn.q_ids, drawn.q_probs)


class PlanDraws:
    """The draws of one plan, step by step. Draft i of a row (from 0) is drawn for position L + i in the round that
    starts at L, its committed length."""

    def __init__(self, rows: Sequence[PlanRow]) -> None:
        self._rows = {row.request_id: row for row in rows if row.num_drafts}
        self._arranged_for: list[str] = []
        self._groups: list[tuple[_Kind, _Group]] = []
        self._drawn: dict[_Kind, list[_Drawn]] = {}
        self._index = 0

    def draw(self, logits: Tensor, request_ids: Sequence[str]) -> Tensor:
        """The next draft of every row that drafts, 0 for the others: int32 [rows, 1], on the device of logits.

        logits: [rows, V] of any float type. request_ids: the rows' requests, in their order.
        """
        if request_ids != self._arranged_for:
            self._arrange(list(request_ids), logits.shape[1], logits.device)
        logits = logits.to(torch.float32)
        ids = None
        for kind, group in self._groups:
            chosen, drawn = group.draw(logits, self._index)
            self._drawn.setdefault(kind, []).append(drawn)
            if group.places is None:
                ids = chosen
            else:
                if ids is None:
                    ids = torch.zeros(len(request_ids), dtype=torch.int64, device=logits.device)
                ids.index_copy_(0, group.places, chosen)
        self._index += 1
        if ids is None:
            return torch.zeros(len(request_ids), 1, dtype=torch.int32, device=logits.device)
        return ids.to(torch.int32).unsqueeze(1)

    def results(self, token_ids: dict[str, list[int]]) -> dict[str, Drafted]:
        """What to answer for every row that drafts. token_ids: the drawn ids of each, num_drafts of them.

        A row ends before the first draft whose logits were not finite. Raises RuntimeError when token_ids are not as
        many as were drawn.
        """
        results: dict[str, Drafted] = {}
        for steps in self._drawn.values():
            finite = torch.cat([step.finite for step in steps]).tolist()
            q_ids, q_probs = _stacked([step.q_ids for step in steps]), _stacked([step.q_probs for step in steps])
            at: dict[str, list[int]] = {}
            for place, request_id in enumerate(request_id for step in steps for request_id in step.request_ids):
                at.setdefault(request_id, []).append(place)
            for request_id, places in at.items():
                ids = token_ids[request_id]
                if len(ids) != len(places):
                    raise RuntimeError(f"{request_id}: {len(ids)} draft ids of {len(places)} drawn")
                count = next((i for i, place in enumerate(places) if not finite[place]), len(places))
                result = results[request_id] = Drafted(ids[:count], bad_logits=count < len(places))
                if q_ids is not None and q_probs is not None and count:
                    result.q_ids = q_ids[places[:count]].to(torch.int32).numpy()
                    result.q_probs = q_probs[places[:count]].numpy()
        return results

    def _arrange(self, request_ids: list[str], vocab_size: int, device: torch.device) -> None:
        places: dict[_Kind, list[int]] = {}
        for place, request_id in enumerate(request_ids):
            row = self._rows.get(request_id)
            if row is not None:
                places.setdefault(_Kind.of(row.sampling), []).append(place)
        self._groups = []
        for kind, members in places.items():
            rows = [self._rows[request_ids[place]] for place in members]
            some = members if len(members) < len(request_ids) else None
            self._groups.append((kind, _Group(kind, rows, some, vocab_size, device)))
        self._arranged_for = request_ids


def _stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
    """All rows in one tensor on the host."""
    known = [part for part in parts if part is not None]
    return torch.cat(known).cpu() if known else None
