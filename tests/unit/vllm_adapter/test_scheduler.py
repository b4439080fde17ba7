"""What our scheduler adds to vLLM's, in front of a scheduler that only keeps books."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from outrider.actors.round.request import EXTRA_ARGS_KEY
from outrider.actors.vllm_adapter.scheduler import RoundScheduling


class Books:
    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.ended: list[tuple[str, RequestStatus]] = []
        self.grammar_compile_error_reqs: set[str] = set()
        self.outputs: dict[int, EngineCoreOutputs] = {}
        self.structured_output_manager = object.__new__(StructuredOutputManager)

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def schedule(self, throttle_prefills: bool = False) -> list[str]:
        return list(self.requests)

    def finish_requests(self, request_ids: list[str], status: RequestStatus) -> None:
        self.ended += [(request_id, status) for request_id in request_ids]
        for request_id in request_ids:
            del self.requests[request_id]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        return self.outputs


class Scheduler(RoundScheduling, Books): ...


def request(request_id: str, timeout_s: float | None = None, **fields: Any) -> Any:
    ours = None if timeout_s is None else {EXTRA_ARGS_KEY: {"timeout_s": timeout_s}}
    fields.setdefault("spec_decode_metrics", None)
    return SimpleNamespace(request_id=request_id, sampling_params=SamplingParams(extra_args=ours), **fields)


def test_requests_whose_time_is_up_get_no_further_step() -> None:
    now = 5_000.0
    scheduler = Scheduler(clock=lambda: now)
    for each in (request("late", 1.0), request("early", 60.0), request("any")):
        scheduler.add_request(each)
    pooling = SimpleNamespace(request_id="pooling", sampling_params=None, spec_decode_metrics=None)
    scheduler.add_request(pooling)
    assert scheduler.schedule() == ["late", "early", "any", "pooling"]
    now += 1.0
    assert scheduler.schedule() == ["early", "any", "pooling"]
    assert scheduler.ended == [("late", RequestStatus.FINISHED_ABORTED)]
    assert scheduler.schedule(True) == ["early", "any", "pooling"]
    assert len(scheduler.ended) == 1


@pytest.fixture
def nothing_failed() -> Any:
    return SimpleNamespace(num_nans_in_logits=None)


def test_each_round_leaves_with_its_counts_which_later_rounds_do_not_change(nothing_failed: Any) -> None:
    counts = RequestSpecDecodeMetrics.new(3)
    scheduler = Scheduler()
    scheduler.add_request(request("a", spec_decode_metrics=counts))
    scheduler.add_request(request("plain engine"))
    output, plain = EngineCoreOutput("a", [1, 2]), EngineCoreOutput("plain engine", [1])
    scheduler.outputs = {0: EngineCoreOutputs(outputs=[output, plain])}
    counts.observe(3, 1)
    assert scheduler.update_from_output(None, nothing_failed) is scheduler.outputs
    counts.observe(3, 3)
    assert output.spec_decode_metrics is not None
    assert (output.spec_decode_metrics.histogram, output.spec_decode_metrics.num_draft_tokens) == ([0, 1, 0, 0], 3)
    assert plain.spec_decode_metrics is None


def test_the_last_output_keeps_what_vllm_put_there(nothing_failed: Any) -> None:
    """The request is no longer among the scheduler's."""
    counts = RequestSpecDecodeMetrics.new(3)
    last = EngineCoreOutput("gone", [1], finish_reason=FinishReason.LENGTH, spec_decode_metrics=counts)
    scheduler = Scheduler()
    scheduler.outputs = {0: EngineCoreOutputs(outputs=[last])}
    scheduler.update_from_output(None, nothing_failed)
    assert last.spec_decode_metrics is counts


def test_requests_without_a_token_to_choose_end_with_an_error() -> None:
    scheduler = Scheduler()
    failed = SimpleNamespace(num_nans_in_logits={"a": 1}, prompt_logprobs_dict={"a": 1, "b": 2})
    scheduler.update_from_output(None, failed)
    assert scheduler.grammar_compile_error_reqs == {"a"}
    assert failed.prompt_logprobs_dict == {"b": 2}
