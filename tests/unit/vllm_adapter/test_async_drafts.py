"""Steps that are scheduled ahead and put right: by themselves, and with vLLM's scheduler against ranks made of a book.

The ranks here keep what vLLM's runner keeps (a request's tokens, and which of them have their KV) and check each step
against it.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.request import Request

from outrider.actors.round.request import Deployment
from outrider.actors.round.request import Request as RoundRequest
from outrider.actors.vllm_adapter import async_drafts
from tests.unit.vllm_adapter.book import EOS, MAX_MODEL_LEN, K, ahead_config, ask, make_scheduler, next_token, serve


def step(counts: dict[str, int], slots: dict[str, int], cached: dict[str, int]) -> SchedulerOutput:
    """cached: the position that the scheduler expects, of requests that are not new."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens, output.total_num_scheduled_tokens = counts, sum(counts.values())
    output.scheduled_spec_decode_tokens = {
        request_id: [async_drafts.UNKNOWN] * count for request_id, count in slots.items()
    }
    data = CachedRequestData.make_empty()
    data.req_ids, data.num_computed_tokens = list(cached), list(cached.values())
    data.new_block_ids, data.num_output_tokens = [([i],) for i in range(len(cached))], [9] * len(cached)
    output.scheduled_cached_reqs = data
    return output


def test_a_step_gets_the_drafts_there_are_and_the_positions_that_are_right():
    scheduled = step({"a": 5, "b": 5, "n": 8, "p": 6}, {"a": 4, "b": 4}, {"a": 25, "b": 30, "p": 12})
    async_drafts.reconcile_scheduler_output(
        scheduled, {"a": [1, 2], "b": [], "n": [], "p": []}, {"a": 22, "b": 31, "p": 40}
    )
    assert scheduled.num_scheduled_tokens == {"a": 3, "b": 1, "n": 8, "p": 6}
    assert scheduled.total_num_scheduled_tokens == 18
    assert scheduled.scheduled_spec_decode_tokens == {"a": [1, 2]}
    assert scheduled.scheduled_cached_reqs.num_computed_tokens == [21, 30, 12]


def test_who_has_ended_gets_no_row():
    scheduled = step({"a": 5, "b": 5}, {"a": 4, "b": 4}, {"a": 25, "b": 30})
    scheduled.scheduled_cached_reqs.resumed_req_ids = {"a"}
    async_drafts.reconcile_scheduler_output(scheduled, {"a": None, "b": [3]}, {"a": 22, "b": 31})
    cached = scheduled.scheduled_cached_reqs
    assert (scheduled.num_scheduled_tokens, scheduled.total_num_scheduled_tokens) == ({"b": 2}, 2)
    assert (cached.req_ids, cached.num_computed_tokens, cached.new_block_ids) == (["b"], [30], [([1],)])
    assert (cached.num_output_tokens, cached.resumed_req_ids) == ([9], set())


def test_masks_are_those_of_the_rows_that_there_are():
    rows = np.arange(9, dtype=np.int32).reshape(9, 1)
    grammar = GrammarOutput(["a", "gone", "b"], rows, [2, 0, 1])
    fit = async_drafts.fit_mask(grammar, {"a": 4, "gone": 1, "b": 1}, {"a": [1, 2], "b": [3]})
    assert fit.grammar_bitmask[:, 0].tolist() == [0, 1, 2, 5, 7, 8]
    assert fit.structured_output_request_ids == ["a", "gone", "b"]


def answer(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens and len(tokens) < MAX_MODEL_LEN:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


class Rank:
    """What vLLM's runner keeps, without a model."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.tokens: dict[str, list[int]] = {}
        self.known: dict[str, int] = {}
        """How many of a request's tokens have their KV."""

        self.params: dict[str, SamplingParams] = {}
        self.prompts: dict[str, int] = {}
        self.ended: set[str] = set()
        self.dropped = self.rows = self.drafted = 0

    def run(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in scheduled.finished_req_ids:
            self.tokens.pop(request_id, None)
            self.ended.discard(request_id)
        for new in scheduled.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prompt_token_ids or ())
            self.prompts[new.req_id] = len(self.tokens[new.req_id])
            self.params[new.req_id], self.known[new.req_id] = new.sampling_params, new.num_computed_tokens
        slots = {request_id: len(ids) for request_id, ids in scheduled.scheduled_spec_decode_tokens.items()}
        drafts = {
            request_id: None if request_id in self.ended else self._drafts(request_id)[: slots.get(request_id, 0)]
            for request_id in scheduled.num_scheduled_tokens
        }
        self.dropped += sum(ids is None for ids in drafts.values())
        cached = scheduled.scheduled_cached_reqs
        async_drafts.reconcile_scheduler_output(
            scheduled, drafts, {request_id: len(self.tokens[request_id]) for request_id in cached.req_ids}
        )
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                self.known[request_id] = computed
            assert computed == self.known[request_id], "positions follow one another"
        if not scheduled.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        chosen = [self._choose(request_id, *each) for request_id, *each in self._rows(scheduled)]
        ids = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(ids, {request_id: i for i, request_id in enumerate(ids)}, chosen)
        output.num_drafts = {request_id: len(ids) for request_id, ids in scheduled.scheduled_spec_decode_tokens.items()}
        return output

    def _rows(self, scheduled: SchedulerOutput) -> Any:
        for request_id, count in scheduled.num_scheduled_tokens.items():
            self.rows += count
            yield request_id, count, scheduled.scheduled_spec_decode_tokens.get(request_id, [])

    def _choose(self, request_id: str, count: int, drafts: list[int]) -> list[int]:
        tokens = self.tokens[request_id]
        self.known[request_id] += count - len(drafts)
        if self.known[request_id] < len(tokens):
            assert not drafts
            return []
        assert self.known[request_id] == len(tokens), "a step ends with the last token that is known"
        chosen: list[int] = []
        for draft in [*drafts, None]:
            chosen.append(next_token([*tokens, *chosen]))
            if chosen[-1] != draft:
                break
        self.drafted += len(drafts)
        tokens += chosen
        self.known[request_id] = len(tokens) - 1
        request = SimpleNamespace(token_ids=tokens, num_prompt_tokens=self.prompts[request_id])
        request.params = self.params[request_id]
        if RoundRequest.is_finished_by(request, chosen, MAX_MODEL_LEN):  # type: ignore[arg-type]
            self.ended.add(request_id)
        return list(chosen)

    def _drafts(self, request_id: str) -> list[int]:
        """None, too few, right ones, wrong ones."""
        tokens, drafts = list(self.tokens[request_id]), []
        for _ in range(self._chance.choice([0, 0, 1, K, K, K + 2])):
            drafts.append(next_token([*tokens, *drafts]) if self._chance.random() < 0.8 else 3)
        return drafts


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory):
    return ahead_config(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("blocks", [200, 40], ids=["room for all", "preemptions"])
def test_answers_are_those_of_one_token_after_another(vllm_config, blocks):
    preempted = dropped = 0
    for seed in range(12):
        chance = random.Random(seed)
        scheduler, rank = make_scheduler(vllm_config, blocks), Rank(chance)
        prompts = [[chance.randrange(10, 90) for _ in range(chance.randint(1, 30))] for _ in range(14)]
        lengths = [chance.choice([1, 2, 5, 20, 60]) for _ in prompts]
        requests = [ask(i, p, n) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))]
        texts = serve(scheduler, rank, requests, chance)
        for request, prompt, length in zip(requests, prompts, lengths, strict=True):
            assert texts[request.request_id] == answer(prompt, length), (seed, request.request_id)
        assert not scheduler.requests
        assert rank.drafted > 0
        preempted += sum(request.num_preemptions for request in requests)
        dropped += rank.dropped
    assert dropped > 0, "some ended while their next step was scheduled already"
    assert (preempted > 0) == (blocks == 40)


def test_an_abort_disturbs_nobody(vllm_config):
    for seed in range(6):
        chance = random.Random(seed)
        scheduler = make_scheduler(vllm_config, 60)
        prompts = [[chance.randrange(10, 90) for _ in range(12)] for _ in range(12)]
        texts = serve(scheduler, Rank(chance), [ask(i, p, 30) for i, p in enumerate(prompts)], chance, aborts=4)
        for number, prompt in enumerate(prompts):
            whole = answer(prompt, 30)
            assert texts[f"r{number}"] == whole[: len(texts[f"r{number}"])]
        assert sum(texts[f"r{n}"] == answer(p, 30) for n, p in enumerate(prompts)) >= 8


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
        ours = RoundRequest.of("r", params, list(prompt), len(prompt), Deployment("rejection", K, 2, 100, 12))
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
