"""Drafting with a smaller model: one batch per round over all sequences, prefill in bounded chunks between rounds."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Protocol

from actors.drafting.draft_plan import DraftPlan, PlanRow
from actors.drafting.sequence import DraftSequence
from actors.drafting.strategy import Draft, SequenceKey, UnknownSequence
from actors.messages import ProposalStatus

if TYPE_CHECKING:
    from actors.drafting.draft_engine import DraftEngine


class Engine(Protocol):
    """The part of DraftEngine that the policy needs."""

    max_model_len: int
    max_num_seqs: int

    def start(self, request_id: str, token_ids: list[int]) -> tuple[int, Any]: ...
    def append(self, request_id: str, token_ids: list[int]) -> None: ...
    def allocate(
        self, request_id: str, num_computed: int, num_new: int, num_lookahead: int, cached_blocks: Any = None
    ) -> tuple[list[int], ...] | None: ...
    def finish(self, request_id: str) -> None: ...
    def run(self, plan: DraftPlan) -> dict[str, list[int]]: ...
    @property
    def kv_cache_usage(self) -> float: ...


class _Resident:
    """A sequence that the engine knows, and what its ranks hold of it."""

    def __init__(self, sequence: DraftSequence) -> None:
        self.sequence = sequence
        self.request_id = f"{sequence.key[0]}-{sequence.key[1]}"
        self.cached_blocks: Any = None
        self.on_ranks = False
        self.synced_len = 0
        """Leading committed tokens that the ranks hold; what they hold beyond is drafts."""

        self.holds_drafts = False


_CATCH_UP_TOKENS = 32
"""Committed tokens a draft step may feed per sequence; further behind, it is prefill."""


class DraftModelStrategy:
    """Greedy drafts from a draft model. Implements DraftStrategy."""

    def __init__(self, engine: DraftEngine | Engine, prefill_chunk_tokens: int) -> None:
        self._engine = engine
        self._chunk = prefill_chunk_tokens
        self._residents: dict[SequenceKey, _Resident] = {}
        self._finished: list[str] = []

    def open(self, key: SequenceKey, token_ids: list[int], num_speculative_tokens: int) -> bool:
        self.close(key)
        resident = _Resident(DraftSequence(key, list(token_ids), num_speculative_tokens))
        resident.sequence.num_computed, resident.cached_blocks = self._engine.start(resident.request_id, token_ids)
        self._residents[key] = resident
        return self._can_draft(resident)

    def commit(self, key: SequenceKey, base_committed_len: int, token_ids: list[int]) -> None:
        resident = self._residents.get(key)
        if resident is None:
            raise UnknownSequence(key)
        resident.sequence.commit(base_committed_len, token_ids)
        self._engine.append(resident.request_id, token_ids)

    def close(self, key: SequenceKey) -> None:
        resident = self._residents.pop(key, None)
        if resident is None:
            return
        self._engine.finish(resident.request_id)
        if resident.on_ranks:
            self._finished.append(resident.request_id)

    def draft(self, keys: Collection[SequenceKey]) -> list[Draft]:
        answers: list[Draft] = []
        batch: list[tuple[_Resident, PlanRow]] = []
        for key in keys:
            resident = self._residents.get(key)
            if resident is None or len(batch) == self._engine.max_num_seqs:
                continue
            sequence = resident.sequence
            room = self._engine.max_model_len - sequence.committed_len
            k = min(sequence.num_speculative_tokens, room)
            status = ProposalStatus.OK
            if k <= 0:
                status = ProposalStatus.LENGTH
            elif not self._can_draft(resident):
                status = ProposalStatus.NOT_READY
            else:
                row = self._row(resident, sequence.num_uncomputed, num_drafts=k)
                if row is not None:
                    batch.append((resident, row))
                    continue
                status = ProposalStatus.OUT_OF_KV
            answers.append(Draft(key, sequence.committed_len, [], status))
        if not batch:
            return answers
        drafted = self._run([row for _, row in batch])
        for resident, row in batch:
            sequence = resident.sequence
            ids = drafted[row.request_id]
            sequence.drafted(ids)
            resident.holds_drafts = True
            answers.append(Draft(sequence.key, sequence.committed_len, ids, ProposalStatus.OK))
        return answers

    def prefill(self) -> list[Draft] | None:
        """The oldest sequences first, prefill_chunk_tokens over all of them a call."""
        budget = self._chunk
        rows: list[tuple[_Resident, PlanRow]] = []
        for resident in self._residents.values():
            sequence = resident.sequence
            pending = min(sequence.num_uncomputed - 1, self._engine.max_model_len - 1 - sequence.num_computed)
            if pending <= 0 or self._can_draft(resident):
                continue
            if budget == 0 or len(rows) == self._engine.max_num_seqs:
                break
            row = self._row(resident, min(pending, budget), num_drafts=0)
            if row is None:
                break
            budget -= row.num_scheduled
            rows.append((resident, row))
        if not rows:
            self._drop_finished()
            return None
        self._run([row for _, row in rows])
        ready = []
        for resident, row in rows:
            resident.sequence.num_computed += row.num_scheduled
            if self._can_draft(resident):
                sequence = resident.sequence
                ready.append(Draft(sequence.key, sequence.committed_len, [], ProposalStatus.READY))
        return ready

    def usage(self) -> dict[str, float]:
        return {
            "num_sequences": len(self._residents),
            "num_prefilling": sum(not self._can_draft(r) for r in self._residents.values()),
            "kv_cache_usage": self._engine.kv_cache_usage,
        }

    def _can_draft(self, resident: _Resident) -> bool:
        return resident.sequence.num_uncomputed <= _CATCH_UP_TOKENS

    def _row(self, resident: _Resident, num_scheduled: int, num_drafts: int) -> PlanRow | None:
        """Allocate KV and describe the step. None: out of KV, nothing changed."""
        sequence = resident.sequence
        blocks = self._engine.allocate(
            resident.request_id,
            sequence.num_computed,
            num_scheduled,
            max(num_drafts - 1, 0),
            resident.cached_blocks,
        )
        if blocks is None:
            return None
        resident.cached_blocks = None
        row = PlanRow(resident.request_id, sequence.num_computed, num_scheduled, blocks, num_drafts)
        if not resident.on_ranks:
            row.start_token_ids = list(sequence.token_ids)
            resident.on_ranks = True
        elif resident.holds_drafts or resident.synced_len < sequence.committed_len:
            row.rewrite_from = resident.synced_len
            row.rewrite_token_ids = sequence.token_ids[resident.synced_len :]
        resident.synced_len = sequence.committed_len
        resident.holds_drafts = False
        return row

    def _run(self, rows: list[PlanRow]) -> dict[str, list[int]]:
        finished, self._finished = self._finished, []
        return self._engine.run(DraftPlan(rows, finished))

    def _drop_finished(self) -> None:
        if self._finished:
            self._run([])
