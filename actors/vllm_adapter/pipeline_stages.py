"""Sends committed tokens to the pipeline stages before the last one.

The first stage embeds a step's tokens, but only the last one, the Verifier's, chooses tokens. Drafts reach every rank
in the step itself. vLLM's scheduler sends the chosen tokens that the step computes. That is right where each step adds
one token, but leaves out accepted drafts: their KV is there already, but a request that is preempted, or not scheduled
for a step, is rebuilt from their ids. `StagedScheduling` therefore sends accepted drafts before vLLM's tokens, and a
rank appends them (`apply_committed_tokens`) before vLLM's runner reads the rest.
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
    """Limits the engine core to one step in all stages together, since the next step needs the drafts that follow it.

    vLLM keeps a batch in each stage.
    """

    @property
    def max_concurrent_batches(self) -> int:
        return 1


class StagedScheduling(_Scheduler):
    """Sends all committed tokens to stages before the last one. A mixin of a synchronous vLLM Scheduler."""

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
    """Appends accepted drafts on a rank before the last stage, and removes them from ``cached``.

    Afterwards ``cached`` is as vLLM's scheduler made it, for vLLM's own update.

    cached: a step's CachedRequestData. requests, batch: the runner's. num_spec_tokens: the most drafts in a step.
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
    """Makes the runner's buffer for the hidden states of the stage before.

    vLLM makes it when it profiles the model, which it does not do on a CPU where the KV cache's size is given and the
    model is not compiled.
    """
    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _num_before(computed: int, num_spec_tokens: int) -> int:
    """Returns how many tokens a stage may lack at most: as many as a step can accept."""
    return min(computed, num_spec_tokens)
