"""What the round adds to vLLM's model runner.

Rank 0 is the Verifier: it alone chooses tokens, and every rank takes its committed ids by broadcast, in every step.
Only names that vLLM's engine or runner calls are overridden here; what they do is in ``actors/round/round.py`` and
``actors/vllm_seam/target_sampler.py``.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.outputs import DraftTokenIds, SamplerOutput

from outrider.actors.observability.logs import about
from outrider.actors.round.request import EXTRA_ARGS_KEY, RequestSampling
from outrider.actors.round.round import TrackedRequest, Verifier
from outrider.actors.verification.batch import Status
from outrider.actors.vllm_seam.target_sampler import UNUSABLE, StepRequest, TargetSampler
from outrider.cluster.config import SpeculationConfig
from outrider.cluster.link.messages import CloseReason

logger = logging.getLogger(__name__)


class RoundRunner:
    """Mixed in front of the platform's model runner by `install`."""

    verifier: Verifier | None
    """None on every rank but 0, and without a drafter."""

    def install(self, speculation: SpeculationConfig, is_rank_0: bool, verifier: Verifier | None) -> None:
        self.verifier = verifier
        self._speculation = speculation
        self._target_sampler = (
            TargetSampler(self.vllm_config, self.sampler, self.device) if is_rank_0 else None  # type: ignore[attr-defined]
        )
        self._samplings: dict[str, RequestSampling] = {}
        self._status: torch.Tensor | None = None
        self._step: Any = None

    def warm_up_sampler(self) -> None:
        if self._target_sampler is not None:
            drafts, top_n = (self.num_spec_tokens, self._speculation.draft_top_n) if self.verifier else (0, 0)  # type: ignore[attr-defined]
            self._target_sampler.warm_up(self.input_batch.vocab_size, drafts, top_n)  # type: ignore[attr-defined]

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._step = scheduler_output
        verifier = self.verifier
        if verifier is None or not scheduler_output.total_num_scheduled_tokens:
            return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        drafts = scheduler_output.scheduled_spec_decode_tokens
        scheduled = scheduler_output.num_scheduled_tokens
        decodes_only = all(count == 1 + len(drafts.get(request_id, ())) for request_id, count in scheduled.items())
        verifier.step_starts(len(scheduled), scheduler_output.total_num_scheduled_tokens, decodes_only)
        started = time.perf_counter()
        output = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        verifier.add_target_time(time.perf_counter() - started)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        started = time.perf_counter()
        self._status = None
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self._status is not None:
            self._report(output, self._status.tolist())
        verifier = self.verifier
        if verifier is not None:
            verifier.add_target_time(time.perf_counter() - started)
            committed = dict(zip(output.req_ids, output.sampled_token_ids, strict=False))
            finished = [
                request_id for request_id, ids in committed.items() if ids and self._is_finished(request_id, ids)
            ]
            drafted = {i: len(ids) for i, ids in self._step.scheduled_spec_decode_tokens.items()}
            verifier.end_step(committed, drafted, finished)
        return output

    def take_draft_token_ids(self) -> Any:
        if self.verifier is None:
            return None
        request_ids = list(self.input_batch.req_ids)  # type: ignore[attr-defined]
        return DraftTokenIds(request_ids, self.verifier.take_drafts(request_ids))

    def _update_states(self, scheduler_output: Any) -> Any:
        for request_id in scheduler_output.finished_req_ids:
            self._samplings.pop(request_id, None)
        corrections = super()._update_states(scheduler_output)  # type: ignore[misc]
        if self.verifier is not None:
            self._update_book(scheduler_output)
        return corrections

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        # vLLM winds a seeded request's generator back after a partial prefill, which torch refuses on CPU. Nothing
        # here draws from it.
        self.input_batch.generators.clear()  # type: ignore[attr-defined]
        request_ids = self.input_batch.req_ids  # type: ignore[attr-defined]
        drafts = self._step.scheduled_spec_decode_tokens
        # Two columns at least: with one, vLLM takes what is in it for a token, and -1 says that there is none.
        width = max([1, *(len(drafts.get(request_id, ())) for request_id in request_ids)]) + 1
        group = get_tp_group()
        if self._target_sampler is not None:
            requests = [self._step_request(index, request_id) for index, request_id in enumerate(request_ids)]
            metadata = self.input_batch.sampling_metadata  # type: ignore[attr-defined]
            output, self._status = self._target_sampler(logits, requests, metadata, width)
        else:
            shape = (len(request_ids), width)
            output = SamplerOutput(torch.empty(shape, dtype=torch.int32, device=self.device), None)  # type: ignore[attr-defined]
        if group.world_size > 1:
            output.sampled_token_ids = group.broadcast(output.sampled_token_ids.contiguous(), src=0)
        return output

    def _step_request(self, index: int, request_id: str) -> StepRequest:
        state = self.requests[request_id]  # type: ignore[attr-defined]
        drafts = list(self._step.scheduled_spec_decode_tokens.get(request_id, ()))
        computed = int(self.input_batch.num_computed_tokens_cpu[index])  # type: ignore[attr-defined]
        request = StepRequest(
            params=state.sampling_params,
            sampling=self._sampling(request_id, state.sampling_params),
            output_token_ids=state.output_token_ids,
            drafts=drafts,
            position=computed + self._step.num_scheduled_tokens[request_id] - len(drafts),
        )
        if drafts and self.verifier is not None and request.sampling.mode.samples_q:
            known, request.q = self.verifier.q_of(request_id, drafts, request.position)
            if not known:
                request.drafts = [UNUSABLE] * len(drafts)
        return request

    def _sampling(self, request_id: str, params: Any) -> RequestSampling:
        """Made once a request, since those without a seed get a random one, and kept through preemption."""
        sampling = self._samplings.get(request_id)
        if sampling is None:
            sampling = self._samplings[request_id] = RequestSampling.of(params, self._speculation.verification)
        return sampling

    def _report(self, output: Any, statuses: list[int]) -> None:
        """Tell the scheduler of requests that have no next token, and count proposals that could not be used."""
        failed = {}
        for index, status in enumerate(statuses):
            if status & Status.BAD_LOGITS and not self.discard_request_mask.np[index]:  # type: ignore[attr-defined]
                failed[output.req_ids[index]] = 1
            if status & Status.BAD_PROPOSAL and self.verifier is not None:
                self.verifier.proposal_was_bad(output.req_ids[index])
        for request_id in failed:
            message = "request %s: no token can be chosen: its logits are not finite or all masked"
            logger.error(message, request_id, extra=about(request_id))
        output.num_nans_in_logits = failed  # also where vLLM was asked to count: RoundScheduler ends who is in here

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        # The stock answer decides for the whole batch at once; here length is each request's own matter.
        return False

    def _copy_draft_token_ids_to_cpu(self, scheduler_output: Any, zeros_only: bool = False) -> None:
        # Stock code proposes zeros when the in-process drafter is skipped; ours are taken in take_draft_token_ids.
        return None

    def _update_book(self, scheduler_output: Any) -> None:
        verifier, requests = self.verifier, self.requests  # type: ignore[attr-defined]
        assert verifier is not None
        for request_id in scheduler_output.finished_req_ids:
            verifier.untrack(request_id, CloseReason.FINISHED)
            if verifier.tracer is not None:
                verifier.tracer.finish(request_id)
        for request_id in scheduler_output.preempted_req_ids or ():
            verifier.untrack(request_id, CloseReason.PREEMPTED)
        for new in scheduler_output.scheduled_new_reqs:
            self._track(requests[new.req_id])
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            verifier.untrack(request_id, CloseReason.PREEMPTED)
            self._track(requests[request_id])
        verifier.begin_step()
        if not requests:
            verifier.goes_idle()

    def _track(self, state: Any) -> None:
        params = state.sampling_params
        ours = (params.extra_args or {}).get(EXTRA_ARGS_KEY, {})
        assert self.verifier is not None
        if self.verifier.tracer is not None and "trace_headers" in ours:
            self.verifier.tracer.track(state.req_id, ours["trace_headers"])
        limit = self.num_spec_tokens  # type: ignore[attr-defined]
        k = min(ours.get("num_speculative_tokens", limit), limit)
        if k <= 0 or state.prompt_token_ids is None:
            return  # decodes plainly
        vocab_size = self.input_batch.vocab_size  # type: ignore[attr-defined]
        top_n = min(self._speculation.draft_top_n, vocab_size)
        self.verifier.track(
            TrackedRequest(
                request_id=state.req_id,
                token_ids=[*state.prompt_token_ids, *state.output_token_ids],
                num_speculative_tokens=k,
                sampling=self._sampling(state.req_id, params).drafting(params, top_n, vocab_size),
            )
        )

    def _is_finished(self, request_id: str, token_ids: list[int]) -> bool:
        """Whether the scheduler will end this request on what was just committed, as far as a worker can tell."""
        state = self.requests[request_id]  # type: ignore[attr-defined]
        params = state.sampling_params
        ends = set(params.stop_token_ids or ()) if params.ignore_eos else params.all_stop_token_ids
        return (
            len(state.output_token_ids) >= (params.max_tokens or 1 << 62)
            or state.num_tokens >= self.max_model_len  # type: ignore[attr-defined]
            or not ends.isdisjoint(token_ids)
        )
