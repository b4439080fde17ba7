"""Adds fairness, deadlines and failures to vLLM's schedulers, by mixins.

`FairScheduling` orders requests and limits a long prompt's share of a step, by the rules of
``actors/round/scheduling.py``. `RoundScheduling` ends requests whose deadline has passed or that have no token to
choose, and sends every round's counts along with its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.request import Request, RequestStatus

from outrider.actors.round.request import carried
from outrider.actors.round.scheduling import MAX_OVERTAKING_S, FairOrder, prefill_threshold
from outrider.actors.vllm_adapter.async_drafts import AsyncDraftScheduler
from outrider.actors.vllm_adapter.path_rows import PathReserve
from outrider.actors.vllm_adapter.pipeline_stages import StagedScheduling
from outrider.actors.vllm_adapter.structured_outputs import serve_both

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler
else:
    _Scheduler = object


class FairScheduling(_Scheduler):
    """Orders requests fairly. A mixin of a vLLM Scheduler with ``scheduling_policy="priority"``."""

    def __init__(self, *args: Any, arrival_clock: Callable[[], float] = time.monotonic, **kwargs: Any) -> None:
        """arrival_clock: a monotonic clock. vLLM's arrival_time follows the time of day, which may jump."""
        super().__init__(*args, **kwargs)
        serving = self.vllm_config.additional_config["outrider"]["serving"]
        self._order = FairOrder(MAX_OVERTAKING_S)
        # Without keys a caller is an address, which many clients may share.
        self._by_caller = serving["gateway"] != "off" and serving["gateway"]["keys_file"] is not None
        self._arrival_clock = arrival_clock

    def add_request(self, request: Any) -> None:
        request.priority = self._order.virtual_arrival_ms(
            self._arrival_clock(),
            request.num_prompt_tokens,
            request.max_tokens,
            caller=carried(request.sampling_params).get("caller", 0) if self._by_caller else 0,
            priority=request.priority,
            answer=_answer_index(request.request_id),
        )
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        # vLLM reads the threshold at each step, and ignores it for a single request. Without chunked prefill, prompts
        # must stay whole.
        if self.scheduler_config.enable_chunked_prefill:
            self.scheduler_config.long_prefill_token_threshold = prefill_threshold(
                self.scheduler_config.max_num_batched_tokens,
                sum(request.is_prefill_chunk for request in self.running),
                at_least=max(1 + self.num_spec_tokens, self._longest_picture()),
            )
        return super().schedule(*args, **kwargs)

    def _longest_picture(self) -> int:
        """Returns the tokens of the longest image that the next step may have, where vLLM does not split images.

        An image that is longer than its prompt's share of a step would wait for ever.
        """
        if not self.scheduler_config.disable_chunked_mm_input:
            return 0
        requests = (*self.running, *self.waiting)
        return max((each.mm_position.length for request in requests for each in request.mm_features), default=0)


def _answer_index(request_id: str) -> int:
    """Returns which of its request's n answers a sequence is. vLLM puts the index and ``_`` before the id."""
    index, _, rest = request_id.partition("_")
    return min(int(index), 64) if rest and index.isdecimal() and len(index) <= 2 else 0


class RoundScheduling:
    """Ends requests by deadline or failure, and reports each round's counts. A mixin of a vLLM Scheduler."""

    requests: dict[str, Request]

    def __init__(self, *args: Any, clock: Callable[[], float] = time.monotonic, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        serve_both(self.structured_output_manager)  # type: ignore[attr-defined]
        self._deadlines: dict[str, float] = {}
        self._clock = clock

    def add_request(self, request: Request) -> None:
        super().add_request(request)  # type: ignore[misc]
        if (timeout_s := carried(request.sampling_params).get("timeout_s")) is not None:
            self._deadlines[request.request_id] = self._clock() + timeout_s

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Ends requests whose deadline has passed, running or waiting, before scheduling the next step.

        Their front end reports it to clients, by the same deadline.
        """
        now_s = self._clock()
        self._deadlines = {each: at_s for each, at_s in self._deadlines.items() if each in self.requests}
        if late := [request_id for request_id, at_s in self._deadlines.items() if at_s <= now_s]:
            self.finish_requests(late, RequestStatus.FINISHED_ABORTED)  # type: ignore[attr-defined]
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Finishes requests that the ranks report in num_nans_in_logits with an error, and adds counts to each output.

        vLLM only counts such requests, and one without tokens would wait for its next step for ever. They end by the
        list that vLLM has for requests whose grammar does not compile.

        vLLM sends a request's speculation metrics with the last round only; here each round has them.
        """
        failed = model_runner_output.num_nans_in_logits
        if failed:
            self.grammar_compile_error_reqs.update(failed)  # type: ignore[attr-defined]
            for request_id in failed:  # there is no output that its prompt's logprobs could go with
                model_runner_output.prompt_logprobs_dict.pop(request_id, None)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for of_client in outputs.values():
            for output in of_client.outputs:
                request = self.requests.get(output.request_id)
                if output.new_token_ids and request is not None and request.spec_decode_metrics is not None:
                    output.spec_decode_metrics = _as_of_now(request.spec_decode_metrics)
        return outputs


class RoundScheduler(RoundScheduling, StagedScheduling, FairScheduling, Scheduler):
    """Schedules one step at a time."""


class AsyncDraftRoundScheduler(RoundScheduling, AsyncDraftScheduler, FairScheduling, PathReserve, AsyncScheduler):
    """Schedules a step while the one before it runs, with drafts of a remote drafter."""


class AsyncRoundScheduler(RoundScheduling, FairScheduling, AsyncScheduler):
    """Schedules steps that overlap in vLLM's own way, as with co-located drafting."""


def _as_of_now(metrics: RequestSpecDecodeMetrics) -> RequestSpecDecodeMetrics:
    """Copies the counts, since vLLM goes on counting while another thread serializes them."""
    return RequestSpecDecodeMetrics(metrics.num_spec_tokens, list(metrics.histogram), metrics.num_draft_tokens)
