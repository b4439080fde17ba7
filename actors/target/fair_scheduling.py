"""Fairness in vLLM's scheduler: who is next, and how much of a step long prompts may take. The rules are pure
functions in routing.fair_order; this is where the scheduler asks them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actors.routing.fair_order import prefill_threshold, virtual_arrival_ms

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler
else:
    _Scheduler = object


class FairScheduling(_Scheduler):
    """Mixin of a vLLM Scheduler with ``scheduling_policy="priority"``. It holds for requests of every kind: they all
    come through here."""

    def add_request(self, request: Any) -> None:
        serving = self.vllm_config.additional_config["outrider"]["serving"]
        request.priority = virtual_arrival_ms(
            request.arrival_time,
            request.num_prompt_tokens,
            request.max_tokens,
            serving["max_overtaking_s"],
            request.priority,
        )
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        # vLLM reads it at each step, and leaves it alone when a request is the only one.
        self.scheduler_config.long_prefill_token_threshold = prefill_threshold(
            self.scheduler_config.max_num_batched_tokens,
            sum(request.is_prefill_chunk for request in self.running),
            at_least=1 + self.num_spec_tokens,
        )
        return super().schedule(*args, **kwargs)
