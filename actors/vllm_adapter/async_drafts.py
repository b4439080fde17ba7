"""One step ahead: the engine's core schedules a step while the one before it runs, and each rank puts it right.

vLLM's asynchronous scheduler counts what it does not know yet at its most: every draft accepted, every request with as
many drafts as it may have. When a rank begins the step it knows what the step before came to, and rank 0 knows the
drafts. So the step that runs has the right positions, no more rows than there are drafts, and nobody who has ended.
What vLLM's runner is told is what it is told where nothing runs ahead; the scheduler hears afterwards what there was
less (`AsyncDraftScheduler.update_from_output`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig

from outrider.actors.round.request import carried

if TYPE_CHECKING:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
else:
    AsyncScheduler = object

UNKNOWN = -1
"""In place of a draft's id, until a rank knows it."""


class AsyncDraftVllmConfig(VllmConfig):
    """Of an engine core with two steps in flight, on ranks that run one after the other. vLLM's own flag for it also
    sets the ranks' runner to read token ids from a device, and is not to be had on CPU or with ``custom_class``."""

    @property
    def max_concurrent_batches(self) -> int:
        return 2


class AsyncDraftScheduler(AsyncScheduler):
    """Mixin of vLLM's AsyncScheduler: room for as many drafts as a request may have, and the truth afterwards."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        # Slots are taken off a step's budget whether drafts come for them or not: half of it is left to prompts, and
        # nobody waits for others' slots.
        room = max(0, self.max_num_scheduled_tokens // 2 // max(1, len(self.running)) - 1)
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            if request.spec_token_ids:
                request.spec_token_ids = [UNKNOWN] * min(room, self._most_drafts(request))

    def _most_drafts(self, request: Any) -> int:
        params = request.sampling_params
        asked = self.num_spec_tokens if params is None else carried(params).get("num_speculative_tokens")
        return self.num_spec_tokens if asked is None else max(0, min(asked, self.num_spec_tokens))

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        """Slots that no draft came for have been counted as scheduled, and are taken back first: vLLM's own count of
        drafts, here and in the request's metrics, is then that of drafts."""
        drafted: Mapping[str, int] = getattr(model_runner_output, "num_drafts", {})  # of our ranks' own steps
        slots = scheduler_output.scheduled_spec_decode_tokens
        for request_id, ids in list(slots.items()):
            count = drafted.get(request_id, 0)
            request = self.requests.get(request_id)
            if request is not None and request.num_output_placeholders:  # none after a preemption
                request.num_computed_tokens -= len(ids) - count
                request.num_output_placeholders -= len(ids) - count
            if count:
                slots[request_id] = ids[:count]
            else:
                del slots[request_id]
        scheduler_output.num_invalid_spec_tokens = None
        return super().update_from_output(scheduler_output, model_runner_output)


def reconcile_scheduler_output(
    scheduled: SchedulerOutput, drafts: Mapping[str, list[int] | None], num_tokens: Mapping[str, int]
) -> None:
    """Make of a step that was scheduled ahead the one that is to run, in place.

    drafts: of each request of the step, no more than it has slots; None: it has ended, and gets no row. num_tokens: of
    each request that this rank knows, prompt and output, the last step's included.
    """
    counts, slots = scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
    for request_id, ids in drafts.items():
        unused = len(slots.pop(request_id, ()))
        if ids is None:
            del counts[request_id]
            continue
        counts[request_id] -= unused - len(ids)
        if ids:
            slots[request_id] = ids
    scheduled.total_num_scheduled_tokens = sum(counts.values())
    cached = scheduled.scheduled_cached_reqs
    # Of a request whose prompt is done only its last token's KV is missing; one in its prompt is not that far.
    cached.num_computed_tokens = [
        min(expected, num_tokens[request_id] - 1)
        for request_id, expected in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    ]
    if any(request_id not in counts for request_id in cached.req_ids):
        _forget(cached, [index for index, request_id in enumerate(cached.req_ids) if request_id in counts])


def _forget(cached: Any, kept: Sequence[int]) -> None:
    """Of vLLM's parallel lists keep these places. new_token_ids has entries under pipeline parallelism alone."""
    for name in ("req_ids", "new_token_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens"):
        column = getattr(cached, name)
        if column:
            setattr(cached, name, [column[index] for index in kept])
    cached.resumed_req_ids = cached.resumed_req_ids & set(cached.req_ids)


def fit_mask(grammar: GrammarOutput, slots: Mapping[str, int], drafts: Mapping[str, Sequence[int]]) -> GrammarOutput:
    """grammar: masks for a row of each slot and one more, request after request. slots: how many there were; drafts:
    what came for them. Returns masks for the rows that there are; a request that got no row keeps one, which vLLM
    skips."""
    kept: list[int] = []
    start = 0
    for request_id in grammar.structured_output_request_ids:
        kept += range(start, start + 1 + len(drafts.get(request_id, ())))
        start += 1 + slots.get(request_id, 0)
    return replace(grammar, grammar_bitmask=grammar.grammar_bitmask[kept])
