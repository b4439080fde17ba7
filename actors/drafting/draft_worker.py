"""A rank of the draft model: vLLM's worker, plus a K-step decode loop that runs a DraftPlan in one call.

The loop hands vLLM's model runner hand-built scheduler outputs. Rolling back rejected drafts is a rewrite of the
token ids that the runner caches, followed by scheduling from the length that is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import SamplerOutput

from actors.drafting.draft_plan import Drafted, DraftPlan, PlanRow
from actors.drafting.draw import PlanDraws
from cluster.platform import worker_class

# How tokens are really chosen stands in the plan.
_PARAMS = SamplingParams(temperature=0.0, max_tokens=1 << 30, ignore_eos=True, detokenize=False)


class DrawingRunner:
    """Mixed in front of the platform's model runner: drafts are drawn as their requests ask.

    draws: of the plan that runs; None on every rank but 0, whose ids the others take, so ranks cannot disagree.
    """

    draws: PlanDraws | None

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> SamplerOutput:
        request_ids, device = self.input_batch.req_ids, self.device  # type: ignore[attr-defined]
        if self.draws is not None:
            ids = self.draws.draw(logits, request_ids)
        else:
            ids = torch.zeros(len(request_ids), 1, dtype=torch.int32, device=device)
        group = get_tp_group()
        if group.world_size > 1:
            ids = group.broadcast(ids.contiguous(), src=0)
        return SamplerOutput(sampled_token_ids=ids, logprobs_tensors=None)


class DraftWorker(worker_class()):  # type: ignore[misc]
    def init_device(self) -> None:
        super().init_device()
        runner = self.model_runner
        runner.__class__ = type("DraftModelRunner", (DrawingRunner, type(runner)), {})
        runner.draws = None

    def draft(self, plan: DraftPlan) -> dict[str, Drafted]:
        """Run every row's prefill chunk or drafts. Rank 0 returns request_id -> what was drafted for each row with
        num_drafts; nothing elsewhere.

        All tensor-parallel ranks run the same plan, all of it: bad logits, which rank 0 alone looks for, shorten the
        answer and not the steps.
        """
        runner = self.model_runner
        rows = plan.rows
        drafts: dict[str, list[int]] = {row.request_id: [] for row in rows if row.num_drafts}
        runner.draws = PlanDraws(rows) if self.rank == 0 else None
        for row in rows:
            if row.rewrite_from is not None:
                _rewrite(runner, row)
        if not rows:
            runner.execute_model(_scheduler_output([], [], {}, plan.finished))
            return {}
        new = [_new_request(row) for row in rows if row.start_token_ids is not None]
        cached = [(row, row.num_computed, row.new_block_ids) for row in rows if row.start_token_ids is None]
        step = _scheduler_output(new, cached, {r.request_id: r.num_scheduled for r in rows}, plan.finished, runner)
        self._step(step, drafts)
        for index in range(1, max(row.num_drafts for row in rows)):
            live = [row for row in rows if row.num_drafts > index]
            cached = [(row, row.num_computed + row.num_scheduled + index - 1, None) for row in live]
            self._step(_scheduler_output([], cached, {r.request_id: 1 for r in live}, [], runner), drafts)
        return {} if runner.draws is None else runner.draws.results(drafts)

    def _step(self, step: SchedulerOutput, drafts: dict[str, list[int]]) -> None:
        runner = self.model_runner
        output = runner.execute_model(step)
        if output is None:
            output = runner.sample_tokens(None)
        for request_id, sampled in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if sampled and request_id in drafts:
                drafts[request_id].append(sampled[0])


def _new_request(row: PlanRow) -> NewRequestData:
    assert row.new_block_ids is not None
    return NewRequestData(
        req_id=row.request_id,
        prompt_token_ids=row.start_token_ids,
        mm_features=[],
        sampling_params=_PARAMS,
        pooling_params=None,
        block_ids=row.new_block_ids,
        num_computed_tokens=row.num_computed,
        lora_request=None,
    )


def _scheduler_output(
    new: list[NewRequestData],
    cached: list[tuple[PlanRow, int, tuple[list[int], ...] | None]],
    num_scheduled: dict[str, int],
    finished: list[str],
    runner: Any = None,
) -> SchedulerOutput:
    return SchedulerOutput(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=CachedRequestData(
            req_ids=[row.request_id for row, _, _ in cached],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[blocks for _, _, blocks in cached],
            num_computed_tokens=[computed for _, computed, _ in cached],
            num_output_tokens=[len(runner.requests[row.request_id].output_token_ids) for row, _, _ in cached],
        ),
        num_scheduled_tokens=num_scheduled,
        total_num_scheduled_tokens=sum(num_scheduled.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=set(finished),
        free_encoder_mm_hashes=[],
    )


def _rewrite(runner: Any, row: PlanRow) -> None:
    """Make the runner's cached tokens of a sequence the committed ones, from row.rewrite_from on."""
    state = runner.requests[row.request_id]
    num_prompt = state.num_prompt_tokens
    start, ids = row.rewrite_from, row.rewrite_token_ids
    assert start is not None
    assert start >= num_prompt
    state.output_token_ids[start - num_prompt :] = ids
    batch = runner.input_batch
    index = batch.req_id_to_index.get(row.request_id)
    if index is not None:
        end = start + len(ids)
        batch.token_ids_cpu[index, start:end] = ids
        batch.is_token_ids[index, start:end] = True
        batch.num_tokens_no_spec[index] = end
