"""The target's ranks: vLLM's worker and model runner with the round built in.

Rank 0 is the Verifier. Every rank samples, then takes rank 0's committed ids by broadcast, so ranks cannot disagree.
Only names that vLLM's engine or runner calls are overridden here; what they do is in ``actors/verifier.py``.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.sample import rejection_sampler

from actors.message_codec import frame_capacity_words, unpack
from actors.messages import CloseReason
from actors.round_settings import EXTRA_ARGS_KEY
from actors.rounds import TrackedRequest
from actors.verifier import Verifier
from cluster.config import OutriderConfig
from cluster.link_keeper import LinkKeeper, ReplicaIdentity
from cluster.platform import on_gpu, worker_class


class RemoteProposer:
    """vLLM's ``custom_class`` proposer: present on every rank, does nothing. Drafts come through the Verifier."""

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, model: Any) -> None: ...

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        raise RuntimeError("drafts come from a drafter actor; the in-process proposer must not be asked")


class RoundRunner:
    """Mixed in front of the platform's model runner. verifier is None on every rank but 0."""

    verifier: Verifier | None

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        verifier = self.verifier
        if verifier is None or not scheduler_output.total_num_scheduled_tokens:
            return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        verifier.step_starts()
        started = time.perf_counter()
        output = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        verifier.add_target_time(time.perf_counter() - started)
        self._scheduled_drafts = {
            request_id: len(ids) for request_id, ids in scheduler_output.scheduled_spec_decode_tokens.items()
        }
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        verifier = self.verifier
        if verifier is None:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        started = time.perf_counter()
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        verifier.add_target_time(time.perf_counter() - started)
        committed = dict(zip(output.req_ids, output.sampled_token_ids, strict=False))
        finished = [request_id for request_id, ids in committed.items() if ids and self._is_finished(request_id, ids)]
        verifier.end_step(committed, self._scheduled_drafts, finished)
        return output

    def take_draft_token_ids(self) -> Any:
        if self.verifier is None:
            return None
        request_ids = list(self.input_batch.req_ids)  # type: ignore[attr-defined]
        return DraftTokenIds(request_ids, self.verifier.take_drafts(request_ids))

    def _update_states(self, scheduler_output: Any) -> Any:
        corrections = super()._update_states(scheduler_output)  # type: ignore[misc]
        if self.verifier is not None:
            self._update_book(scheduler_output)
        return corrections

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        if spec_decode_metadata is not None and not spec_decode_metadata.draft_token_ids.numel():
            spec_decode_metadata = None  # nothing to verify, and vLLM's rejection sampler fails on no rows with a top_k
        output = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        group = get_tp_group()
        if group.world_size > 1:
            output.sampled_token_ids = group.broadcast(output.sampled_token_ids.contiguous(), src=0)
        return output

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
        limit = self.num_spec_tokens  # type: ignore[attr-defined]
        k = min(ours.get("num_speculative_tokens", limit), limit)
        if k <= 0 or state.prompt_token_ids is None:
            return  # decodes plainly
        assert self.verifier is not None
        self.verifier.track(
            TrackedRequest(
                request_id=state.req_id,
                token_ids=[*state.prompt_token_ids, *state.output_token_ids],
                num_speculative_tokens=k,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=max(params.top_k, 0),
                seed=params.seed,
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


def _expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """In place of vLLM 0.32's: its CPU kernel writes into a converted copy, so that temperature, top_k and top_p of
    drafted tokens are whatever the memory held."""
    if replace_from != replace_to:
        x = torch.where(x == replace_from, replace_to, x)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return x.repeat_interleave(counts, output_size=num_tokens)


class TargetWorker(worker_class()):  # type: ignore[misc]
    """One rank of the target. Rank 0 also holds the Verifier and keeps its link."""

    def init_device(self) -> None:
        super().init_device()
        if not on_gpu():
            rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens
        runner = self.model_runner
        runner.__class__ = type("RoundModelRunner", (RoundRunner, type(runner)), {})
        runner.verifier = None
        self._keeper: LinkKeeper | None = None
        if self.rank == 0:
            settings = self.vllm_config.additional_config
            config = OutriderConfig.model_validate(settings["outrider"])
            runner.verifier = Verifier(config.link)
            vocab_size, k = self.model_config.get_vocab_size(), config.num_speculative_tokens
            self._keeper = LinkKeeper(
                config,
                ReplicaIdentity(**settings["outrider_replica"]),
                vocab_size=vocab_size,
                capacity_words=frame_capacity_words(self.scheduler_config.max_num_seqs, k),
                decode=lambda payload: unpack(payload, vocab_size, k),
                on_link=runner.verifier.offer_link,
                device=None if self.device.type == "cpu" else str(self.device),
            )

    def open_link(self) -> bool:
        """Start keeping the link. Called once, by the target replica, when the engine is ready to serve."""
        if self._keeper is None:
            return False
        self.model_runner.verifier.reset_statistics()
        self._keeper.start()
        return True

    def round_status(self) -> dict[str, Any] | None:
        """Rank 0: the verifier's and the link's status, in plain values. None elsewhere."""
        if self._keeper is None:
            return None
        return {"rounds": self.model_runner.verifier.status(), "link": self._keeper.status()}

    def shutdown(self) -> None:
        if self._keeper is not None:
            self._keeper.stop()
        super().shutdown()
