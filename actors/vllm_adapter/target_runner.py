"""Turns the events of vLLM's model runner into those of `Round`.

The Verifier, the first rank of the last pipeline stage, alone chooses tokens. Every rank of that stage takes its
committed ids by broadcast, in every step; those of earlier stages get them with the next step (pipeline_stages.py).
Only names that vLLM's engine or runner calls are overridden here, of vLLM 0.32's first model runner
(``VLLM_USE_V2_MODEL_RUNNER=0``); what they do is in ``actors/round/``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.outputs import DraftTokenIds, LogprobsTensors, SamplerOutput

from outrider.actors.drafter.hidden_state_drafter import HiddenStateDrafter
from outrider.actors.observability.logs import about
from outrider.actors.round.request import PLACEHOLDER_TOKEN_ID, Draft
from outrider.actors.round.round import Arrival, Round, Step
from outrider.actors.verification.batch import Status
from outrider.actors.verification.transfer import in_one_read
from outrider.actors.vllm_adapter import async_drafts, pipeline_stages
from outrider.actors.vllm_adapter.overlap import UNREAD, LaterOutput, Overlap
from outrider.actors.vllm_adapter.path_rows import PathRows
from outrider.actors.vllm_adapter.target_sampler import TargetSampler, reads_output
from outrider.cluster.config import SpeculationConfig

logger = logging.getLogger(__name__)


class RoundRunner:
    """Extends the platform's model runner, see TargetWorker.init_device."""

    round: Round | None
    """None on every rank but the Verifier."""

    num_prompt_logprobs: dict[str, int]
    """vLLM's: by request, where logprobs of the prompt are asked for."""

    def install(
        self,
        round_: Round | None,
        runs_ahead: bool = False,
        overlaps: bool = False,
        sampler: TargetSampler | None = None,
        hidden_state_drafter: HiddenStateDrafter | None = None,
    ) -> None:
        """Sets up what a runner needs for rounds.

        Args:
            runs_ahead: steps are scheduled while the one before them runs, see async_drafts.py.
            overlaps: they are launched then too, see overlap.py.
            sampler: of the Verifier, to be warmed up.
            hidden_state_drafter: of the Verifier, which it drafts from the hidden states of each step.
        """
        self._hidden_state_drafter = hidden_state_drafter
        self.round, self._target_sampler = round_, sampler
        self._runs_ahead = runs_ahead
        self._overlap = Overlap() if overlaps else None
        self._statuses: torch.Tensor | None = None
        """The statuses of a step that overlaps with the next one, on their way to the host."""

        self._path_rows: PathRows | None = None
        self._step = Step(0, 0, False, {})
        self._status: list[int] | None = None
        self._slots: dict[str, int] = {}
        """How many drafts each request has room for, where the step was scheduled ahead."""

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        step = self._step = _step(self._step.number + 1, scheduler_output)
        step.overlaps = self._overlap is not None
        if self._path_rows is not None:
            self._path_rows.remove(scheduler_output)
        if not self._runs_ahead:
            # vLLM gives a waiting request that needs one token room for drafts that were never proposed.
            unproposed = [each for each, draft in step.drafts.items() if draft.ids[0] == PLACEHOLDER_TOKEN_ID]
            step.allowed = dict.fromkeys(unproposed, 0)
        if self.round is not None:
            self.round.begin(step)
        if self._runs_ahead and step.num_tokens:
            self._reconcile(scheduler_output, step)
        if not get_pp_group().is_last_rank:
            cached, most = scheduler_output.scheduled_cached_reqs, self.num_spec_tokens  # type: ignore[attr-defined]
            pipeline_stages.apply_committed_tokens(cached, self.requests, self.input_batch, most)  # type: ignore[attr-defined]
        started = time.perf_counter()
        output = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        step.target_s += time.perf_counter() - started
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        step, started = self._step, time.perf_counter()
        self._status = None
        ran = None if self._hidden_state_drafter is None else self.execute_model_state  # type: ignore[attr-defined]
        if grammar_output is not None and self._runs_ahead:
            self._mark_disallowed(grammar_output)
            grammar_output = async_drafts.fit_mask(grammar_output, self._slots, self._draft_ids())
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self._overlap is not None and self._statuses is not None:
            return self._read_later(output, started)
        if self._runs_ahead and output.req_ids:
            # Ours: AsyncDraftScheduler.update_from_output corrects the engine core's counts by it.
            output.num_drafts = {request_id: step.num_drafts(request_id) for request_id in step.drafts}
        if self._status is not None:
            discarded = self.discard_request_mask.np[: len(self._status)]
            self._report(output, self._status, np.flatnonzero(discarded))
        step.target_s += time.perf_counter() - started
        if self.round is not None:
            rows = zip(output.req_ids, output.sampled_token_ids, strict=False)
            committed = {row_id: token_ids for row_id, token_ids in rows if row_id not in step.path_rows}
            if self._hidden_state_drafter is not None and ran is not None:
                self._hidden_state_drafter.keep_hidden(ran.sample_hidden_states, self._last_rows(committed))
            self.round.commit(step, committed)
        return output

    def _last_rows(self, committed: Mapping[str, list[int]]) -> dict[int, int]:
        """Returns, by the request's handle, the step's row that its last committed token was chosen from.

        committed: tokens by request, in the order of the rows, a row for each draft of a request and one more.
        """
        assert self.round is not None
        rows, first = {}, 0
        for request_id, token_ids in committed.items():
            request = self.round.requests.get(request_id)
            if token_ids and request is not None and request.handle is not None:
                rows[request.handle] = first + len(token_ids) - 1
            first += 1 + len(self._step.draft(request_id).ids)
        return rows

    def _read_later(self, output: Any, started: float) -> LaterOutput:
        """Commits a step that overlaps with the next one, before its ids are read. output: vLLM's."""
        assert self.round is not None
        assert self._overlap is not None
        assert self._statuses is not None
        step, discarded = self._step, set(np.flatnonzero(self.discard_request_mask.np[: len(self._statuses)]))  # type: ignore[attr-defined]
        request_ids = list(self.input_batch.req_ids)  # type: ignore[attr-defined]
        given = [None if row in discarded else request_id for row, request_id in enumerate(request_ids)]
        step.target_s += time.perf_counter() - started
        self.round.commit(step, {request_id: [UNREAD] for request_id in given if request_id is not None})
        self._overlap.chose(output, [None if each is None else self.round.requests.get(each) for each in given])
        statuses, self._statuses = self._statuses, None
        return LaterOutput(output, statuses, lambda read, values: self._report(read, values, discarded))

    def take_draft_token_ids(self) -> Any:
        if self.round is None:
            return None
        if self._runs_ahead:  # the core asks before it makes a grammar's masks for the step that runs
            drafts = self._draft_ids()
            return DraftTokenIds(list(drafts), list(drafts.values()))
        request_ids = list(self.input_batch.req_ids)  # type: ignore[attr-defined]
        return DraftTokenIds(request_ids, self.round.take_drafts(self._step, request_ids))

    def _reconcile(self, scheduled: Any, step: Step) -> None:
        """Corrects what was scheduled to what is to run, now that the step before this one is done."""
        request_ids = list(scheduled.num_scheduled_tokens)
        self._slots = {request_id: len(ids) for request_id, ids in self._draft_ids().items()}
        chosen: list[list[int] | None] = []
        if self.round is not None:
            # A request without a token in flight has its masks already, for one row.
            masked = scheduled.has_structured_output_requests and not scheduled.pending_structured_output_tokens
            room = [
                0 if masked and self.round.is_structured(request_id) else self._slots.get(request_id, 0)
                for request_id in request_ids
            ]
            chosen = self.round.insert_drafts(step, request_ids, room)  # and the drafts are the step's, with their q
        group = get_tp_group()
        if group.world_size > 1:  # the Verifier's, over shared memory where the ranks share a node
            chosen, step.paths = group.broadcast_object((chosen, step.paths))
        drafts = dict(zip(request_ids, chosen, strict=True))
        if self.round is None:
            step.drafts = {request_id: Draft(list(ids)) for request_id, ids in drafts.items() if ids}
        known = self.requests  # type: ignore[attr-defined]
        async_drafts.reconcile_scheduler_output(
            scheduled,
            drafts,
            {request_id: known[request_id].num_tokens for request_id in scheduled.scheduled_cached_reqs.req_ids},
        )
        if self._path_rows is not None:
            self._path_rows.add(scheduled, step)
        step.count(scheduled.num_scheduled_tokens)

    def enable_path_rows(self, speculation: SpeculationConfig) -> None:
        """Makes this runner verify further paths. Call it when the KV cache is allocated."""
        self._path_rows = PathRows(self, speculation)

    def _draft_ids(self) -> dict[str, list[int]]:
        drafts = self._step.drafts.items()
        return {row_id: list(draft.ids) for row_id, draft in drafts if row_id not in self._step.path_rows}

    def _mark_disallowed(self, grammar_output: Any) -> None:
        """Replaces drafts that a grammar refuses by placeholders: they keep their rows, and have no masks."""
        allowed = grammar_output.num_acceptable_drafts or [0] * len(grammar_output.structured_output_request_ids)
        for request_id, count in zip(grammar_output.structured_output_request_ids, allowed, strict=True):
            ids = self._step.draft(request_id).ids
            if len(ids) > count:
                ids[count:] = [PLACEHOLDER_TOKEN_ID] * (len(ids) - count)
                self._step.allowed[request_id] = count

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        # vLLM rewinds a seeded request's generator after a partial prefill, which torch refuses on CPU. Nothing here
        # draws from it.
        self.input_batch.generators.clear()  # type: ignore[attr-defined]
        request_ids = self.input_batch.req_ids  # type: ignore[attr-defined]
        if self.round is not None:
            metadata = self.input_batch.sampling_metadata  # type: ignore[attr-defined]
            if self._overlap is not None:
                self._catch_up(request_ids)
            output = self.round.choose(self._step, request_ids, logits, metadata)
        else:
            shape = (len(request_ids), self._step.width + 1)
            output = SamplerOutput(torch.empty(shape, dtype=torch.int32, device=self.device), None)  # type: ignore[attr-defined]
        chosen, group = output.sampled_token_ids, get_tp_group()
        if group.world_size > 1:
            chosen = group.broadcast(chosen, src=0)
        if self._overlap is not None:
            # The model has no row for -1; a request with that ends without it.
            output.sampled_token_ids = chosen[:, :1].clamp(min=0)
            if self.round is not None:
                self._statuses = chosen[:, -1].to("cpu", non_blocking=True)
            return output
        # This is the step's one read of the device: vLLM's runner gets host memory.
        if (logprobs := output.logprobs_tensors) is None:
            chosen = chosen.cpu()
        else:
            chosen, *parts = in_one_read([chosen, *logprobs[:3]])
            output.logprobs_tensors = LogprobsTensors(*parts)
        output.sampled_token_ids = chosen[:, :-1]
        if self._path_rows is not None:
            self._path_rows.take_best(self._step, request_ids, output.sampled_token_ids, output.logprobs_tensors)
        if self.round is not None:
            self._status = chosen[:, -1].tolist()
        return output

    def warm_up_sampler(self) -> None:
        """Compiles what verification compiles on first use."""
        if self._target_sampler is not None and self.round is not None:
            deployment = self.round.deployment
            drafts = deployment.num_speculative_tokens
            top_n = deployment.draft_top_n if drafts else 0
            self._target_sampler.warm_up(deployment.vocab_size, drafts, top_n)

    @torch.inference_mode()
    def _dummy_sampler_run(self, hidden_states: Tensor) -> Tensor:
        """Runs our sampler in place of vLLM's, with as many rows as a step may have. Returns logits.

        vLLM calls this while it profiles memory, and again before it watches for kernels that are compiled late.
        hidden_states: [requests, H].
        """
        if self.device.type == "cpu":  # type: ignore[attr-defined]  # nothing is profiled there
            return super()._dummy_sampler_run(hidden_states)  # type: ignore[misc]
        logits: Tensor = self.model.compute_logits(torch.rand_like(hidden_states))  # type: ignore[attr-defined]
        if self._target_sampler is not None and self.round is not None:
            self.warm_up_sampler()
            deployment = self.round.deployment
            rows = 1 + deployment.num_speculative_tokens
            requests = max(1, min(self.max_num_reqs, self.max_num_tokens // rows))  # type: ignore[attr-defined]
            largest = logits.new_zeros(requests * rows, logits.shape[1])
            self._target_sampler.profile(largest, deployment.num_speculative_tokens, deployment.draft_top_n)
        return logits

    def _catch_up(self, request_ids: list[str]) -> None:
        """Brings texts up to date with the runner's: a preempted request loses the token that was in flight."""
        assert self.round is not None
        assert self._overlap is not None
        for request_id in request_ids:
            known, request = self.requests[request_id], self.round.requests[request_id]  # type: ignore[attr-defined]
            if known.num_tokens != len(request.token_ids):
                request.token_ids[request.num_prompt_tokens :] = known.output_token_ids
                self._overlap.forget(request)
        self._overlap.read(any(reads_output(self.round.requests[request_id].params) for request_id in request_ids))

    def _get_prompt_logprobs_dict(self, hidden_states: Any, num_scheduled_tokens: Any) -> Any:
        """Computes prompts' logprobs one request after the other where there are adapters.

        vLLM's output head looks up the adapter of each row, and knows those of the rows that tokens are chosen from,
        not those of a prompt's.
        """
        asked = self.num_prompt_logprobs
        if not asked or self.lora_config is None:  # type: ignore[attr-defined]
            return super()._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)  # type: ignore[misc]
        found: dict[str, Any] = {}
        try:
            for request_id in [each for each in asked if each in num_scheduled_tokens]:
                self.num_prompt_logprobs = {request_id: asked[request_id]}
                self._map_prompt(self.requests[request_id], num_scheduled_tokens[request_id])  # type: ignore[attr-defined]
                found |= super()._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)  # type: ignore[misc]
                if not self.num_prompt_logprobs:  # its prompt is done
                    del asked[request_id]
        finally:
            self.num_prompt_logprobs = asked
        return found

    def _map_prompt(self, request: Any, num_tokens: int) -> None:
        """Sets the adapter of the output head's next rows: those of a prompt of which num_tokens were scheduled."""
        if request.prompt_token_ids is None:
            return
        count = min(num_tokens, len(request.prompt_token_ids) - request.num_computed_tokens - 1)
        if count > 0:
            adapter = request.lora_request
            mapping = (0 if adapter is None else adapter.lora_int_id,) * count
            self._set_active_loras(mapping, mapping, set() if adapter is None else {adapter})  # type: ignore[attr-defined]

    def _report(self, output: Any, statuses: list[int], discarded: Collection[int]) -> None:
        """Reports requests without a next token to the scheduler, and counts proposals that could not be used.

        discarded: rows whose prompt is not done.
        """
        failed = {}
        for index, status in enumerate(statuses):
            request_id = output.req_ids[index]
            if request_id in self._step.path_rows:  # without it the request has what its own row chose
                continue
            if status & Status.BAD_LOGITS and index not in discarded:
                failed[request_id] = 1
                output.sampled_token_ids[index] = []  # where steps overlap an id stands in for it
                if self.round is not None and self._overlap is None:
                    self.round.has_no_next_token(request_id)
                message = "request %s: no token can be chosen: its logits are not finite or all masked"
                logger.error(message, request_id, extra=about(request_id))
            if status & Status.BAD_PROPOSAL and self.round is not None and request_id not in self._step.allowed:
                self.round.proposal_was_bad(request_id)
        output.num_nans_in_logits = failed  # also where vLLM was asked to count: RoundScheduler ends who is in here

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        # vLLM decides this for the whole batch; here each request has its own length.
        return False

    def _copy_draft_token_ids_to_cpu(self, scheduler_output: Any, zeros_only: bool = False) -> None:
        # vLLM proposes zeros when the in-process drafter is skipped; ours come by take_draft_token_ids.
        return None


def _step(number: int, scheduled: Any) -> Step:
    """Makes a step of vLLM's SchedulerOutput."""
    return Step.of(
        number,
        scheduled.num_scheduled_tokens,
        scheduled.scheduled_spec_decode_tokens,
        arrived=[
            Arrival(
                new.req_id,
                new.sampling_params,
                new.prompt_token_ids,
                _prompt_length(new),
                "" if new.lora_request is None else new.lora_request.lora_name,
                len(new.mm_features),
            )
            for new in scheduled.scheduled_new_reqs
        ],
        resumed=scheduled.scheduled_cached_reqs.resumed_req_ids,
        finished=scheduled.finished_req_ids,
        preempted=scheduled.preempted_req_ids or (),
    )


def _prompt_length(new: Any) -> int:
    return len(new.prompt_token_ids if new.prompt_token_ids is not None else new.prompt_embeds)
