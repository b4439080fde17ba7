"""Schedules a step while the one before it runs, and corrects it on each rank when it begins.

vLLM's asynchronous scheduler counts what it does not know yet at its most: every draft accepted, every request with as
many drafts as it may have. When a rank begins the step it knows the outcome of the step before, and the Verifier the
drafts. So the step that runs has the right positions, no more rows than there are drafts, and no request that has
ended. vLLM's runner gets what it would get with synchronous scheduling; the scheduler hears afterwards how much less
there was (`AsyncDraftScheduler.update_from_output`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig

from outrider.actors.round.request import PLACEHOLDER_TOKEN_ID, carried

if TYPE_CHECKING:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
else:
    AsyncScheduler = object


class AsyncDraftVllmConfig(VllmConfig):
    """Lets the engine core have two steps in flight, while its ranks run them one after the other.

    vLLM's own flag for it also has the runner read token ids from a device, and is refused on CPU and with
    ``custom_class``.
    """

    @property
    def max_concurrent_batches(self) -> int:
        return 2


class AsyncDraftScheduler(AsyncScheduler):
    """Makes room for as many drafts as a request may have, and corrects the counts afterwards."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        # Slots count against a step's budget whether drafts come for them or not, so half of it is left to prompts.
        room = max(0, self.max_num_scheduled_tokens // 2 // max(1, len(self.running)) - 1)
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            if request.spec_token_ids:
                request.spec_token_ids = [PLACEHOLDER_TOKEN_ID] * min(room, self._most_drafts(request))

    def _most_drafts(self, request: Any) -> int:
        params = request.sampling_params
        asked = self.num_spec_tokens if params is None else carried(params).get("num_speculative_tokens")
        return self.num_spec_tokens if asked is None else max(0, min(asked, self.num_spec_tokens))

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        """Takes back the slots that no draft came for, so that vLLM's counts are those of drafts."""
        drafted: Mapping[str, int] = getattr(model_runner_output, "num_drafts", {})
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
    """Corrects a step that was scheduled ahead, in place, to the one that is to run.

    Args:
        drafts: for each request of the step, no more than it has slots; None for one that has ended and gets no row.
        num_tokens: of each request that this rank knows, prompt and output, the last step's included.
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
    # Once its prompt is done, only the KV of a request's last token is missing.
    cached.num_computed_tokens = [
        min(expected, num_tokens[request_id] - 1)
        for request_id, expected in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    ]
    if any(request_id not in counts for request_id in cached.req_ids):
        _keep(cached, [index for index, request_id in enumerate(cached.req_ids) if request_id in counts])


def _keep(cached: Any, kept: Sequence[int]) -> None:
    """Cuts vLLM's parallel lists to these places. new_token_ids has entries only under pipeline parallelism."""
    for name in ("req_ids", "new_token_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens"):
        column = getattr(cached, name)
        if column:
            setattr(cached, name, [column[index] for index in kept])
    cached.resumed_req_ids = cached.resumed_req_ids & set(cached.req_ids)


def fit_mask(grammar: GrammarOutput, slots: Mapping[str, int], drafts: Mapping[str, Sequence[int]]) -> GrammarOutput:
    """Returns a grammar's masks for the rows that there are; a request without a row keeps one, which vLLM skips.

    Args:
        grammar: masks for each slot of a request and one more, request after request.
        slots: the number of each request's slots.
        drafts: the drafts that came for them.
    """
    kept: list[int] = []
    start = 0
    for request_id in grammar.structured_output_request_ids:
        kept += range(start, start + 1 + len(drafts.get(request_id, ())))
        start += 1 + slots.get(request_id, 0)
    return replace(grammar, grammar_bitmask=grammar.grammar_bitmask[kept])
