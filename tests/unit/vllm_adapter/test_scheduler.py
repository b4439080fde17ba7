"""Checks vLLM's scheduler with ours in front: ends by deadline and failure, room for drafts, and counts."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from outrider.actors.round.request import Deployment
from outrider.actors.round.request import Request as RoundRequest
from tests.unit.vllm_adapter.book import K, ahead_config, ask, make_scheduler


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


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory):
    return ahead_config(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("ours", "room"), [({}, K), ({"num_speculative_tokens": 2}, 2), ({"num_speculative_tokens": 0}, 0)]
)
def test_a_request_has_room_for_as_many_drafts_as_it_may_have(vllm_config, ours, room):
    scheduler = make_scheduler(vllm_config, 60)
    scheduler.add_request(ask(1, [11, 12, 13], 20, **ours))
    prefill, decode = scheduler.schedule(), scheduler.schedule()
    assert prefill.num_scheduled_tokens == {"r1": 3}
    assert decode.num_scheduled_tokens == {"r1": 1 + room}


def test_slots_are_no_reason_to_wait(vllm_config):
    """A step has 48 tokens: six requests with four slots each would take 30 of them, and leave a prompt 18."""
    scheduler = make_scheduler(vllm_config, 200)
    for number in range(6):
        scheduler.add_request(ask(number, [11, 12, 13], 30))
    scheduler.schedule()
    assert scheduler.schedule().num_scheduled_tokens == {f"r{number}": 48 // 2 // 6 for number in range(6)}


def test_drafts_are_counted_as_they_were_not_as_there_was_room(vllm_config):
    scheduler = make_scheduler(vllm_config, 60)
    scheduler.add_request(request := ask(1, [11, 12, 13], 20))
    request.spec_decode_metrics = counts = SimpleNamespace(seen=[])
    counts.observe = lambda num_draft_tokens, num_accepted, detailed: counts.seen.append(
        (num_draft_tokens, num_accepted)
    )
    counts.num_spec_tokens, counts.histogram, counts.num_draft_tokens = K, [0] * (K + 1), 0
    steps = [scheduler.schedule() for _ in range(2)]
    for scheduled, chosen, drafted in ((steps[0], [20], {}), (steps[1], [21, 22], {"r1": 3})):
        output = ModelRunnerOutput(["r1"], {"r1": 0}, [chosen])
        output.num_drafts = drafted
        scheduler.update_from_output(scheduled, output)
    assert counts.seen == [(3, 1)]
    assert request.num_tokens == 6
    assert request.num_computed_tokens == 5
    assert request.num_output_placeholders == 0


def test_who_has_ended_here_is_ended_by_the_scheduler():
    """Else a request without a row would be looked for in the step's output."""
    chance, ended = random.Random(5), 0
    for _ in range(2000):
        prompt = [11] * chance.randint(1, 8)
        params = SamplingParams(
            max_tokens=chance.randint(1, 6), stop_token_ids=chance.sample([3, 4, 5], chance.randint(0, 2)),
            ignore_eos=chance.random() < 0.5, min_tokens=0,
        )  # fmt: skip
        params.update_from_generation_config({}, 2)
        theirs = Request("r", list(prompt), params, None)
        ours = RoundRequest.of("r", params, list(prompt), Deployment("rejection", K, 2, 100, 12))
        while True:
            chosen = [chance.choice([2, 3, 4, 5, 30]) for _ in range(chance.randint(1, 4))]
            ours.token_ids += chosen
            if ours.is_finished_by(chosen, 12):
                kept, stopped = Scheduler._update_request_with_output(
                    SimpleNamespace(max_model_len=12), theirs, list(chosen)
                )
                assert (stopped, bool(kept)) == (True, True)
                ended += 1
                break
            for token in chosen:
                theirs.append_output_token_ids(token)
                assert not check_stop(theirs, 12)
    assert ended == 2000
