"""Drafting with a smaller model: one batch per round over all sequences, prefill in bounded chunks between rounds."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

from actors.drafting.draft_plan import Drafted, DraftPlan, PlanRow
from actors.drafting.sequence import DraftSequence
from actors.drafting.strategy import Draft, SequenceKey, UnknownSequence
from actors.messages import DraftSampling, ProposalStatus, SparseQ

if TYPE_CHECKING:
    from actors.drafting.draft_engine import DraftEngine

logger = logging.getLogger(__name__)

_CATCH_UP_TOKENS = 32
"""Committed tokens a draft step may feed per sequence; further behind, it is prefill."""


class Engine(Protocol):
    """The part of DraftEngine that the policy needs."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def start(self, request_id: str, token_ids: list[int]) -> int: ...
    def append(self, request_id: str, token_ids: list[int]) -> None: ...
    def allocate(
        self, request_id: str, num_computed: int, num_new: int, num_lookahead: int
    ) -> tuple[list[int], ...] | None: ...
    def finish(self, request_id: str) -> None: ...
    def run(self, plan: DraftPlan) -> dict[str, Drafted]: ...
    @property
    def kv_cache_usage(self) -> float: ...


class _Resident:
    """A sequence, and what the engine and its ranks hold of it."""

    def __init__(self, sequence: DraftSequence, sampling: DraftSampling) -> None:
        self.sequence, self.sampling = sequence, sampling
        self.request_id = f"{sequence.key[0]}-{sequence.key[1]}"
        self.retired = False
        """Too long for the draft model: followed, so that commits stay known, but no longer in the engine."""

        self.on_ranks = False
        self.synced_len = 0
        """Leading committed tokens that the ranks hold; what they hold beyond is drafts."""

        self.holds_drafts = False

    @property
    def can_draft(self) -> bool:
        return not self.retired and self.sequence.num_uncomputed <= _CATCH_UP_TOKENS


class DraftModelStrategy:
    """Drafts drawn from a draft model as each request asks. Implements DraftStrategy."""

    def __init__(self, engine: DraftEngine | Engine, prefill_chunk_tokens: int) -> None:
        self._engine = engine
        self._chunk = min(prefill_chunk_tokens, engine.max_num_batched_tokens)
        self._residents: dict[SequenceKey, _Resident] = {}
        self._finished: list[str] = []
        self._saw_bad_logits = False

    def open(
        self, key: SequenceKey, token_ids: list[int], num_speculative_tokens: int, sampling: DraftSampling
    ) -> bool:
        self.close(key)
        resident = _Resident(DraftSequence(key, list(token_ids), num_speculative_tokens), sampling)
        if len(token_ids) >= self._engine.max_model_len:
            resident.retired = True
        else:
            resident.sequence.num_computed = self._engine.start(resident.request_id, token_ids)
        self._residents[key] = resident
        return resident.can_draft

    def commit(self, key: SequenceKey, base_committed_len: int, token_ids: list[int]) -> None:
        resident = self._residents.get(key)
        if resident is None:
            raise UnknownSequence(key)
        resident.sequence.commit(base_committed_len, token_ids)
        if resident.retired:
            return
        if resident.sequence.committed_len >= self._engine.max_model_len:
            self._retire(resident)
        else:
            self._engine.append(resident.request_id, token_ids)

    def close(self, key: SequenceKey) -> None:
        resident = self._residents.pop(key, None)
        if resident is not None:
            self._retire(resident)

    def draft(self, keys: Collection[SequenceKey]) -> list[Draft]:
        answers: list[Draft] = []
        batch: list[tuple[_Resident, PlanRow]] = []
        room = self._engine.max_num_batched_tokens
        for key in keys:
            resident = self._residents.get(key)
            if resident is None:
                continue
            sequence = resident.sequence
            if resident.can_draft:
                if len(batch) == self._engine.max_num_seqs or sequence.num_uncomputed > room:
                    continue
                k = min(sequence.num_speculative_tokens, self._engine.max_model_len - sequence.committed_len)
                if k == 0:
                    answers.append(Draft(key, sequence.committed_len, [], ProposalStatus.OK))
                    continue
                row = self._row(resident, sequence.num_uncomputed, num_drafts=k)
                if row is not None:
                    room -= row.num_scheduled
                    batch.append((resident, row))
                    continue
                status = ProposalStatus.OUT_OF_KV
            else:
                status = ProposalStatus.LENGTH if resident.retired else ProposalStatus.NOT_READY
            answers.append(Draft(key, sequence.committed_len, [], status))
        if not batch:
            return answers
        drafted = self._run([row for _, row in batch])
        for resident, row in batch:
            answers.append(self._answer(resident, row, drafted[row.request_id]))
        return answers

    def _answer(self, resident: _Resident, row: PlanRow, drafted: Drafted) -> Draft:
        """Raises RuntimeError when the ranks dropped drafts for another reason than bad logits: see DraftStrategy."""
        sequence, ids = resident.sequence, drafted.token_ids
        if len(ids) != row.num_drafts and not (drafted.bad_logits and len(ids) < row.num_drafts):
            raise RuntimeError(f"sequence {sequence.key}: {len(ids)} drafts where {row.num_drafts} were to be drawn")
        if drafted.bad_logits and not self._saw_bad_logits:
            self._saw_bad_logits = True
            logger.warning("sequence %s: the draft model's logits are not finite: drafts end there", sequence.key)
        sequence.drafted(ids)
        resident.holds_drafts = True
        q = None
        if drafted.q_ids is not None and drafted.q_probs is not None:
            q = SparseQ(drafted.q_ids, drafted.q_probs)
        return Draft(sequence.key, sequence.committed_len, ids, ProposalStatus.OK, q)

    def prefill(self) -> list[Draft] | None:
        """The oldest sequences first, prefill_chunk_tokens over all of them a call."""
        budget = self._chunk
        rows: list[tuple[_Resident, PlanRow]] = []
        for resident in self._residents.values():
            if resident.retired or resident.can_draft:
                continue
            if budget == 0 or len(rows) == self._engine.max_num_seqs:
                break
            # The last token makes the first draft.
            row = self._row(resident, min(resident.sequence.num_uncomputed - 1, budget), num_drafts=0)
            if row is not None:  # else out of KV: a shorter one may still fit
                budget -= row.num_scheduled
                rows.append((resident, row))
        if not rows:
            if self._finished:
                self._run([])
            return None
        self._run([row for _, row in rows])
        ready = []
        for resident, row in rows:
            sequence = resident.sequence
            sequence.num_computed += row.num_scheduled
            if resident.can_draft:
                ready.append(Draft(sequence.key, sequence.committed_len, [], ProposalStatus.READY))
        return ready

    def usage(self) -> dict[str, float]:
        residents = list(self._residents.values())  # asked for by another thread than the loop's
        return {
            "num_sequences": len(residents),
            "num_prefilling": sum(not (r.can_draft or r.retired) for r in residents),
            "kv_cache_usage": self._engine.kv_cache_usage,
        }

    def _retire(self, resident: _Resident) -> None:
        if resident.retired:
            return
        resident.retired = True
        self._engine.finish(resident.request_id)
        if resident.on_ranks:
            self._finished.append(resident.request_id)

    def _row(self, resident: _Resident, num_scheduled: int, num_drafts: int) -> PlanRow | None:
        """Allocate KV and describe the step. None: out of KV, nothing changed."""
        sequence = resident.sequence
        blocks = self._engine.allocate(
            resident.request_id, sequence.num_computed, num_scheduled, max(num_drafts - 1, 0)
        )
        if blocks is None:
            return None
        row = PlanRow(resident.request_id, sequence.num_computed, num_scheduled, blocks, num_drafts, resident.sampling)
        if not resident.on_ranks:
            row.start_token_ids = list(sequence.token_ids)
            resident.on_ranks = True
        elif resident.holds_drafts or resident.synced_len < sequence.committed_len:
            row.rewrite_from = resident.synced_len
            row.rewrite_token_ids = sequence.token_ids[resident.synced_len :]
        resident.synced_len = sequence.committed_len
        resident.holds_drafts = False
        return row

    def _run(self, rows: list[PlanRow]) -> dict[str, Drafted]:
        finished, self._finished = self._finished, []
        return self._engine.run(DraftPlan(rows, finished))
