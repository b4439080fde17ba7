"""Pipeline stages: what those before the last one are told, so that they compute what the Verifier's drafts ask for.

The first stage embeds a step's tokens, and only the last one, the Verifier's, chooses any. Drafts reach every rank in
the step itself. Of what was chosen vLLM's scheduler sends no more than the step computes: right where each step adds
one token, and too little where drafts were accepted, whose KV is there and which a request that is preempted, or not
scheduled for a step, is rebuilt from. So ours sends the accepted ones too, before vLLM's, and a rank puts them in place
(`apply_committed_tokens`) before vLLM's runner reads the rest as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler
else:
    _Scheduler = object


class StagedVllmConfig(VllmConfig):
    """Of an engine core with one step in all stages together: the next one needs the drafts that answer it. vLLM's own
    keeps a batch in each stage."""

    @property
    def max_concurrent_batches(self) -> int:
        return 1


class StagedScheduling(_Scheduler):
    """Mixin of a vLLM Scheduler that schedules one step at a time: stages before the last one hear of all tokens."""

    def _make_cached_request_data(self, *args: Any, **kwargs: Any) -> Any:
        cached = super()._make_cached_request_data(*args, **kwargs)
        if self.use_pp:
            for index, (request_id, computed) in enumerate(
                zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            ):
                known = self.requests[request_id].all_token_ids
                first = computed - _num_before(computed, self.num_spec_tokens)
                cached.new_token_ids[index] = [*known[first:computed], *cached.new_token_ids[index]]
        return cached


def apply_committed_tokens(cached: Any, requests: Mapping[str, Any], batch: Any, num_spec_tokens: int) -> None:
    """On a rank before the last stage, ahead of vLLM's own update: tokens up to each request's computed ones go where
    the last stage has had them since it chose them, and ``cached`` becomes what vLLM's scheduler made.

    cached: a step's CachedRequestData. requests, batch: the runner's. num_spec_tokens: most drafts a step.
    """
    for index, (request_id, computed) in enumerate(zip(cached.req_ids, cached.num_computed_tokens, strict=True)):
        before = _num_before(computed, num_spec_tokens)
        accepted = cached.new_token_ids[index][:before]
        cached.new_token_ids[index] = cached.new_token_ids[index][before:]
        state = requests[request_id]
        missing = computed - state.num_tokens
        if missing <= 0:
            continue
        ids = accepted[-missing:]
        assert len(ids) == missing, f"{request_id}: {missing} tokens were never sent to this stage"
        state.output_token_ids.extend(ids)
        row = batch.req_id_to_index.get(request_id)
        if row is not None:
            batch.token_ids_cpu[row, computed - missing : computed] = ids
            batch.is_token_ids[row, computed - missing : computed] = True
            batch.num_tokens_no_spec[row] = computed


def make_room_between(runner: Any) -> None:
    """What a stage gets from the one before it goes into a buffer of the runner's, which vLLM makes when it first tries
    the model: never on CPU where the model is not compiled and the KV cache's size is given."""
    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _num_before(computed: int, num_spec_tokens: int) -> int:
    """A step accepts no more drafts than it has, so nobody lacks more tokens than these."""
    return min(computed, num_spec_tokens)
