"""The target's scheduler: vLLM's, with an end for requests that no token can be chosen for."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class RoundScheduler(Scheduler):
    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Requests that the ranks report in num_nans_in_logits finish with an error; nobody else is touched.

        vLLM only counts them, and a request without tokens would wait for its next step for ever. Requests whose
        grammar does not compile end the same way, by the same list.
        """
        failed = model_runner_output.num_nans_in_logits
        if failed:
            self.grammar_compile_error_reqs.update(failed)
            for request_id in failed:  # their prompt is done, but there is no output for its logprobs to go with
                model_runner_output.prompt_logprobs_dict.pop(request_id, None)
        return super().update_from_output(scheduler_output, model_runner_output)
