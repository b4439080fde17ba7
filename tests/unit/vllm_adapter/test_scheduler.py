"""Ends requests by deadline and failure, and reports counts, on vLLM's own scheduler."""

from __future__ import annotations

import time
from typing import Any

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import ModelRunnerOutput

from tests.unit.vllm_adapter.book import ahead_config, ask, make_scheduler


@pytest.fixture
def scheduler(tmp_path: Any) -> Any:
    return make_scheduler(ahead_config(tmp_path), 50)


def ran(scheduled: Any, tokens: dict[str, list[int]], **fields: Any) -> ModelRunnerOutput:
    """Returns what ranks report of a step."""
    ids = list(scheduled.num_scheduled_tokens)
    return ModelRunnerOutput(ids, {name: row for row, name in enumerate(ids)}, [tokens[name] for name in ids], **fields)


def outputs_of(scheduler: Any, scheduled: Any, output: ModelRunnerOutput) -> dict[str, Any]:
    found = scheduler.update_from_output(scheduled, output)
    return {each.request_id: each for of_client in found.values() for each in of_client.outputs}


def test_requests_whose_deadline_has_passed_get_no_further_step(scheduler: Any) -> None:
    scheduler.add_request(ask(1, [1, 2, 3], 5, timeout_s=0.05))
    scheduler.add_request(ask(2, [1, 2, 3], 5, timeout_s=600.0))
    scheduler.add_request(ask(3, [1, 2, 3], 5))
    time.sleep(0.06)
    assert set(scheduler.schedule().num_scheduled_tokens) == {"r2", "r3"}
    assert set(scheduler.requests) == {"r2", "r3"}


def test_a_request_without_a_token_to_choose_ends_with_an_error_and_alone(scheduler: Any) -> None:
    scheduler.add_request(ask(1, [1, 2, 3], 5))
    scheduler.add_request(ask(2, [1, 2, 3], 5))
    scheduled = scheduler.schedule()
    output = ran(scheduled, {"r1": [], "r2": [30]}, num_nans_in_logits={"r1": 1})
    found = outputs_of(scheduler, scheduled, output)
    assert (found["r1"].finish_reason, found["r1"].new_token_ids) == (FinishReason.ERROR, [])
    assert (found["r2"].finish_reason, found["r2"].new_token_ids) == (None, [30])
    assert set(scheduler.requests) == {"r2"}


def test_each_round_leaves_with_its_counts_which_later_rounds_do_not_change(scheduler: Any) -> None:
    request = ask(1, [1, 2, 3], 20)
    scheduler.add_request(request)
    first = scheduler.schedule()
    outputs_of(scheduler, first, ran(first, {"r1": [30]}))
    assert request.spec_decode_metrics is not None
    second = scheduler.schedule()
    request.spec_decode_metrics.observe(3, 1)
    told = outputs_of(scheduler, second, ran(second, {"r1": [31]}))["r1"].spec_decode_metrics
    before = list(told.histogram)
    request.spec_decode_metrics.observe(3, 3)
    assert told.histogram == before != request.spec_decode_metrics.histogram
