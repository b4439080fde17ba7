"""vLLM's events become the round's, each with its step: what the scheduler says, and a runner that only keeps books."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.outputs import SamplerOutput

from outrider.actors.round.request import PLACEHOLDER_TOKEN_ID, Draft
from outrider.actors.verification.batch import Status
from outrider.actors.vllm_adapter import target_runner
from outrider.actors.vllm_adapter.target_runner import RoundRunner

PARAMS = SamplingParams()


def new(
    request_id: str,
    prompt: list[int] | None,
    embeds: torch.Tensor | None = None,
    lora_request: LoRARequest | None = None,
    features: Sequence[Any] = (),
) -> NewRequestData:
    return NewRequestData(request_id, prompt, list(features), PARAMS, None, ([],), 0, lora_request, embeds)


def scheduled(counts: dict[str, int], **changes: Any) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens, output.total_num_scheduled_tokens = counts, sum(counts.values())
    for name, value in changes.items():
        setattr(output, name, value)
    return output


class Round:
    """Writes down what it is called with."""

    def __init__(self, status: int, settled: list[list[int] | None] | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status, self.settled = status, settled

    def begin(self, step: Any) -> None:
        self.calls.append(("begin", step))

    def choose(self, step: Any, request_ids: list[str], logits: Any, metadata: Any) -> Any:
        self.calls.append(("choose", step))
        return SamplerOutput(torch.tensor([[5, -1, self.status]]), None)

    def is_structured(self, request_id: str) -> bool:
        return True

    def has_no_next_token(self, request_id: str) -> None:
        self.calls.append(("no next token", request_id))

    def proposal_was_bad(self, request_id: str) -> None:
        self.calls.append(("bad", request_id))

    def commit(self, step: Any, committed: Any) -> None:
        self.calls.append(("commit", step, committed))

    def insert_drafts(self, step: Any, request_ids: list[str], slots: list[int]) -> list[list[int] | None]:
        self.calls.append(("insert_drafts", step, request_ids, slots))
        step.drafts = {name: Draft(list(ids)) for name, ids in zip(request_ids, self.settled, strict=True) if ids}
        return self.settled

    def take_drafts(self, step: Any, request_ids: list[str]) -> list[list[int]]:
        self.calls.append(("take_drafts", step, request_ids))
        return [[1, 2]]


class Stock:
    """What the round needs of vLLM's runner."""

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(req_ids=["a"], generators={0: object()}, sampling_metadata=None)
        self.discard_request_mask = SimpleNamespace(np=np.zeros(1, bool))
        self.requests = {"a": SimpleNamespace(num_tokens=21)}
        self.masks: Any = None

    def execute_model(self, scheduler_output: Any) -> None: ...

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.masks = grammar_output
        chosen = self._sample(None, None)  # type: ignore[attr-defined]
        ids = [[token for token in row if token >= 0] for row in chosen.sampled_token_ids.tolist()]
        return SimpleNamespace(req_ids=["a"], sampled_token_ids=ids, num_nans_in_logits=None)


class Runner(RoundRunner, Stock): ...


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.setattr(target_runner, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(target_runner, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True))
    return Runner()


def test_the_order_of_events_is_the_round_s_each_with_its_step(runner):
    runner.install(round_ := Round(Status.OK))
    for _ in range(2):
        runner.execute_model(scheduled({"a": 1}))
        assert runner.sample_tokens(None).num_nans_in_logits == {}
        assert runner.take_draft_token_ids().draft_token_ids == [[1, 2]]
    assert [call[0] for call in round_.calls] == ["begin", "choose", "commit", "take_drafts"] * 2
    assert [call[1].number for call in round_.calls] == [1] * 4 + [2] * 4
    assert round_.calls[2][2] == {"a": [5]}
    assert round_.calls[0][1].target_s > 0
    assert runner.input_batch.generators == {}


@pytest.mark.parametrize("discarded", [False, True], ids=["", "part of a prompt"])
def test_a_request_without_a_next_token_is_reported_unless_nobody_wants_one(runner, discarded, caplog):
    runner.install(Round(Status.BAD_LOGITS))
    runner.discard_request_mask.np[0] = discarded
    runner.execute_model(scheduled({"a": 1}))
    assert runner.sample_tokens(None).num_nans_in_logits == ({} if discarded else {"a": 1})
    assert (("no next token", "a") in runner.round.calls) == (not discarded)
    assert ("no token can be chosen" in caplog.text) == (not discarded)


def test_a_proposal_that_verification_could_not_use_is_told_before_the_commit(runner):
    runner.install(round_ := Round(Status.BAD_PROPOSAL))
    runner.execute_model(scheduled({"a": 1}))
    runner.sample_tokens(None)
    assert [call[0] for call in round_.calls] == ["begin", "choose", "bad", "commit"]


def test_room_that_nobody_proposed_drafts_for_is_no_proposal(runner):
    """vLLM's scheduler gives it to a waiting request that needs one token."""
    runner.install(round_ := Round(Status.BAD_PROPOSAL))
    drafts = {"a": [PLACEHOLDER_TOKEN_ID] * 3, "b": [7, 8, 9]}
    runner.execute_model(scheduled({"a": 4, "b": 4}, scheduled_spec_decode_tokens=drafts))
    runner.sample_tokens(None)
    assert [call[0] for call in round_.calls] == ["begin", "choose", "commit"]
    step = round_.calls[2][1]
    assert (step.num_drafts("a"), step.num_drafts("b"), step.width) == (0, 3, 4)


def scheduled_ahead(slots: int) -> SchedulerOutput:
    cached = CachedRequestData.make_empty()
    cached.req_ids, cached.num_computed_tokens = ["a"], [25]
    cached.new_block_ids, cached.num_output_tokens = [None], [9]
    drafts = {"a": [-1] * slots} if slots else {}
    return scheduled({"a": 1 + slots}, scheduled_spec_decode_tokens=drafts, scheduled_cached_reqs=cached)


def test_drafts_that_a_grammar_does_not_allow_are_cut_and_are_nobody_s_mistake(runner):
    runner.install(round_ := Round(Status.BAD_PROPOSAL, settled=[[5, 6]]), runs_ahead=True)
    runner.execute_model(scheduled_ahead(4))
    output = runner.sample_tokens(GrammarOutput(["a"], np.arange(5, dtype=np.int32).reshape(5, 1), [1]))
    assert output.num_drafts == {"a": 1}
    assert runner.masks.grammar_bitmask[:, 0].tolist() == [0, 1, 2]
    assert round_.calls[0][1].drafts == {"a": Draft([5, PLACEHOLDER_TOKEN_ID])}
    assert "bad" not in [call[0] for call in round_.calls]


@pytest.mark.parametrize("pending", [False, True])
def test_a_structured_request_has_no_drafts_where_its_masks_were_made_without_them(runner, pending):
    """It sat a step out: nothing of its is in flight, and the core made its masks at once."""
    runner.install(round_ := Round(Status.OK, settled=[[]]), runs_ahead=True)
    output = scheduled_ahead(4)
    output.has_structured_output_requests, output.pending_structured_output_tokens = True, pending
    runner.execute_model(output)
    assert round_.calls[1][3] == ([4] if pending else [0])
