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

from outrider.actors.round.request import Draft
from outrider.actors.round.round import UNUSABLE, Arrival
from outrider.actors.verification.batch import Status
from outrider.actors.vllm_adapter import target_runner
from outrider.actors.vllm_adapter.target_runner import RoundRunner, _step

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


def test_a_step_is_what_the_scheduler_said():
    cached = CachedRequestData.make_empty()
    cached.resumed_req_ids = {"r"}
    step = _step(
        7,
        scheduled(
            {"d": 3, "p": 1, "n": 2, "e": 4, "r": 5, "s": 2},
            scheduled_new_reqs=[
                new("n", [1, 2], lora_request=LoRARequest("mine", 3, "/a")),
                new("e", None, torch.zeros(4, 8)),
                new("s", [3, 3], features=["a picture's", "another's"]),
            ],
            scheduled_cached_reqs=cached,
            scheduled_spec_decode_tokens={"d": [5, 6], "p": []},
            finished_req_ids={"f"},
            preempted_req_ids={"q"},
        ),
    )
    assert (step.number, step.num_requests, step.num_tokens, step.decodes_only) == (7, 6, 17, False)
    assert step.drafts == {"d": Draft([5, 6])}
    assert step.arrived == [
        Arrival("n", PARAMS, [1, 2], 2, "mine"),
        Arrival("e", PARAMS, None, 4),
        Arrival("s", PARAMS, [3, 3], 2, num_pictures=2),
    ]
    assert (set(step.resumed), set(step.finished), set(step.preempted)) == ({"r"}, {"f"}, {"q"})
    assert step.width == 3


def test_a_step_s_drafts_are_no_alias_of_the_scheduler_s():
    drafts = {"d": [5, 6]}
    step = _step(1, scheduled({"d": 3}, scheduled_spec_decode_tokens=drafts))
    step.drafts["d"].ids[:] = [-1, -1]
    assert drafts == {"d": [5, 6]}


@pytest.mark.parametrize(
    ("counts", "drafts", "decodes_only"),
    [
        ({"a": 1, "b": 3}, {"b": [1, 2]}, True),
        ({"a": 1, "b": 3}, {"b": [1]}, False),
        ({"a": 1, "b": 3}, {}, False),
    ],
)
def test_decodes_are_told_from_prefill(counts, drafts, decodes_only):
    assert _step(1, scheduled(counts, scheduled_spec_decode_tokens=drafts)).decodes_only == decodes_only


def test_a_step_without_drafts_is_two_columns_wide():
    assert _step(1, scheduled({"a": 1})).width == 2


def test_a_step_without_tokens_tells_who_is_gone():
    step = _step(1, scheduled({}, finished_req_ids={"f"}))
    assert (step.num_tokens, step.num_requests, set(step.finished), set(step.preempted)) == (0, 0, {"f"}, set())


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

    def settle(self, step: Any, request_ids: list[str], slots: list[int]) -> list[list[int] | None]:
        self.calls.append(("settle", step, request_ids, slots))
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


def test_a_step_without_tokens_only_begins(runner):
    runner.install(round_ := Round(Status.OK))
    runner.execute_model(scheduled({}, finished_req_ids={"a"}))
    assert [call[0] for call in round_.calls] == ["begin"]


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
    drafts = {"a": [UNUSABLE] * 3, "b": [7, 8, 9]}
    runner.execute_model(scheduled({"a": 4, "b": 4}, scheduled_spec_decode_tokens=drafts))
    runner.sample_tokens(None)
    assert [call[0] for call in round_.calls] == ["begin", "choose", "commit"]
    step = round_.calls[2][1]
    assert (step.num_drafts("a"), step.num_drafts("b"), step.width) == (0, 3, 4)


def test_a_rank_without_the_round_chooses_nothing(runner):
    runner.device = torch.device("cpu")
    runner.install(None)
    runner.execute_model(scheduled({"a": 3}, scheduled_spec_decode_tokens={"a": [1, 2]}))
    assert runner._sample(None, None).sampled_token_ids.shape == (1, 3)
    assert runner.take_draft_token_ids() is None


def scheduled_ahead(slots: int) -> SchedulerOutput:
    cached = CachedRequestData.make_empty()
    cached.req_ids, cached.num_computed_tokens = ["a"], [25]
    cached.new_block_ids, cached.num_output_tokens = [None], [9]
    drafts = {"a": [-1] * slots} if slots else {}
    return scheduled({"a": 1 + slots}, scheduled_spec_decode_tokens=drafts, scheduled_cached_reqs=cached)


def test_a_step_that_was_scheduled_ahead_is_put_right_before_it_runs(runner):
    runner.install(round_ := Round(Status.OK, settled=[[5, 6]]), runs_ahead=True)
    output = scheduled_ahead(4)
    runner.execute_model(output)
    assert round_.calls[1][2:] == (["a"], [4])
    assert (output.num_scheduled_tokens, output.total_num_scheduled_tokens) == ({"a": 3}, 3)
    assert output.scheduled_cached_reqs.num_computed_tokens == [20]
    step = round_.calls[0][1]
    assert (step.drafts, step.num_tokens, step.width, step.decodes_only) == ({"a": Draft([5, 6])}, 3, 3, True)
    assert runner.sample_tokens(None).num_drafts == {"a": 2}
    assert runner.take_draft_token_ids().draft_token_ids == [[5, 6]]
    assert [call[0] for call in round_.calls] == ["begin", "settle", "choose", "commit"]


def test_a_step_whose_requests_have_all_ended_has_nothing_to_do(runner):
    runner.install(Round(Status.OK, settled=[None]), runs_ahead=True)
    output = scheduled_ahead(4)
    runner.execute_model(output)
    assert (output.num_scheduled_tokens, output.total_num_scheduled_tokens) == ({}, 0)
    assert output.scheduled_cached_reqs.req_ids == []


def test_drafts_that_a_grammar_does_not_allow_are_cut_and_are_nobody_s_mistake(runner):
    runner.install(round_ := Round(Status.BAD_PROPOSAL, settled=[[5, 6]]), runs_ahead=True)
    runner.execute_model(scheduled_ahead(4))
    output = runner.sample_tokens(GrammarOutput(["a"], np.arange(5, dtype=np.int32).reshape(5, 1), [1]))
    assert output.num_drafts == {"a": 1}
    assert runner.masks.grammar_bitmask[:, 0].tolist() == [0, 1, 2]
    assert round_.calls[0][1].drafts == {"a": Draft([5, UNUSABLE])}
    assert "bad" not in [call[0] for call in round_.calls]


@pytest.mark.parametrize("pending", [False, True])
def test_a_structured_request_has_no_drafts_where_its_masks_were_made_without_them(runner, pending):
    """It sat a step out: nothing of its is in flight, and the core made its masks at once."""
    runner.install(round_ := Round(Status.OK, settled=[[]]), runs_ahead=True)
    output = scheduled_ahead(4)
    output.has_structured_output_requests, output.pending_structured_output_tokens = True, pending
    runner.execute_model(output)
    assert round_.calls[1][3] == ([4] if pending else [0])


class PromptLogprobs:
    """What vLLM's runner does with prompts whose logprobs are asked for: each is done with what is scheduled here."""

    def __init__(self, adapters: bool, **requests: Any) -> None:
        self.lora_config = object() if adapters else None
        self.requests, self.num_prompt_logprobs = requests, dict.fromkeys(requests, 2)
        self.mapped: Any = None
        self.found: list[Any] = []

    def _set_active_loras(self, of_logits: Any, of_tokens: Any, used: Any) -> None:
        assert of_logits == of_tokens
        self.mapped = of_logits, {adapter.lora_name for adapter in used}

    def _get_prompt_logprobs_dict(self, hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        asked = [each for each in self.num_prompt_logprobs if each in num_scheduled_tokens]
        self.found.append((asked, self.mapped))
        done = {}
        for request_id in asked:
            request = self.requests[request_id]
            if request.num_computed_tokens + num_scheduled_tokens[request_id] >= len(request.prompt_token_ids):
                done[request_id] = f"logprobs of {request_id}"
                del self.num_prompt_logprobs[request_id]
        return done


class PromptRunner(RoundRunner, PromptLogprobs):
    pass


def prompt(tokens: int, computed: int = 0, adapter: LoRARequest | None = None) -> Any:
    return SimpleNamespace(prompt_token_ids=[1] * tokens, num_computed_tokens=computed, lora_request=adapter)


def test_a_prompt_s_logprobs_are_of_its_own_adapter():
    """The output head would take those of the rows that tokens are chosen from, and end where there are fewer."""
    mine = LoRARequest("mine", 3, "/a")
    runner = PromptRunner(
        True, a=prompt(5, adapter=mine), b=prompt(4), c=prompt(9, computed=2, adapter=mine), waits=prompt(3)
    )
    found = runner._get_prompt_logprobs_dict("hidden", {"a": 5, "b": 4, "c": 4, "other": 1})
    assert found == {"a": "logprobs of a", "b": "logprobs of b"}
    assert runner.found == [(["a"], ((3,) * 4, {"mine"})), (["b"], ((0,) * 3, set())), (["c"], ((3,) * 4, {"mine"}))]
    assert runner.num_prompt_logprobs == {"c": 2, "waits": 2}


def test_without_adapters_prompts_logprobs_are_vllm_s_own():
    runner = PromptRunner(False, a=prompt(5), b=prompt(4))
    assert len(runner._get_prompt_logprobs_dict("hidden", {"a": 5, "b": 4})) == 2
    assert runner.found == [(["a", "b"], None)]
