"""Steps that are launched before anybody has read the one before them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from outrider.actors.round.request import Request
from outrider.actors.verification.batch import Status
from outrider.actors.vllm_adapter import target_runner
from outrider.actors.vllm_adapter.target_runner import RoundRunner
from tests.unit.round.scripted_link import Engine, arrival, params
from tests.unit.vllm_adapter.device_rank import Group, counting, grouped, make_ranks, model, next_context
from tests.unit.vllm_adapter.test_target_runner import Stock, scheduled

PROMPT = [5, 6, 7]


class Output:
    """vLLM's AsyncGPUModelRunnerOutput: ids that are there once somebody has waited."""

    def __init__(self, ids: list[int], req_ids: tuple[str, ...] = ("a",)) -> None:
        self._ids, self.waited = ids, 0
        self.async_copy_ready_event = SimpleNamespace(synchronize=self._wait)
        self.read = SimpleNamespace(req_ids=list(req_ids), sampled_token_ids=[[each] for each in ids])

    def _wait(self) -> None:
        self.waited += 1

    @property
    def sampled_token_ids_cpu(self) -> torch.Tensor:
        assert self.waited, "read before it is there"
        return torch.tensor([[each] for each in self._ids])

    def get_output(self) -> Any:
        return self.read


def request(*output: int) -> Request:
    return Request("a", params(), None, [*PROMPT, *output], 3)


class Overlapping(Stock):
    """vLLM's runner where steps overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self.requests = {"a": SimpleNamespace(num_tokens=3, output_token_ids=[])}

    def sample_tokens(self, grammar_output: Any) -> Any:
        chosen = self._sample(None, None)  # type: ignore[attr-defined]
        self.sampled = chosen.sampled_token_ids.clone()
        output = Output(chosen.sampled_token_ids[:, 0].tolist())
        if not self.discard_request_mask.np[0]:
            known = self.requests["a"]
            known.output_token_ids.append(-1)
            known.num_tokens += 1
        return output


class Runner(RoundRunner, Overlapping): ...


@pytest.fixture
def rig(monkeypatch):
    """A runner with a real round, that chooses as told."""
    monkeypatch.setattr(target_runner, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(target_runner, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True))
    engine, runner = Engine(), Runner()
    rig = SimpleNamespace(engine=engine, runner=runner, chosen=[], rows=[[50, Status.OK]])

    def choose(logits: Any, requests: list[Request], drafts: Any, width: int, metadata: Any) -> Any:
        assert width == 1
        rig.chosen.append([list(each.token_ids) for each in requests])
        return SimpleNamespace(sampled_token_ids=torch.tensor(rig.rows, dtype=torch.int32), logprobs_tensors=None)

    engine.round._choose = choose
    runner.install(engine.round, overlaps=True)
    return rig


def step(rig: Any, of: Any = None, token: int = 50, status: int = Status.OK) -> Any:
    rig.rows = [[token, status]]
    new = [] if of is None else [arrival("a", PROMPT, of)]
    rig.runner.execute_model(scheduled({"a": 1}))
    for each in new:
        rig.engine.round._enter(each)
    return rig.runner.sample_tokens(None)


@pytest.mark.parametrize("discarded", [False, True], ids=["", "part of a prompt"])
def test_a_request_without_a_next_token_is_reported_when_it_is_read(rig, discarded, caplog):
    rig.runner.discard_request_mask.np[0] = discarded
    later = step(rig, of=params(), token=-1, status=Status.BAD_LOGITS)
    assert rig.runner.sampled.tolist() == [[0]], "no model has a row for -1"
    read = later.get_output()
    assert read.num_nans_in_logits == ({} if discarded else {"a": 1})
    if not discarded:  # else vLLM's own
        assert read.sampled_token_ids == [[]], "what stood in for a token is shown to nobody"
    assert ("no token can be chosen" in caplog.text) == (not discarded)


PROMPTS = {"plain": [11, 12, 13], "penalised": [21, 22], "in pieces": [31, 32, 33, 34, 35]}
CHUNK = 3
OVERLAPPED = 12
"""Tokens of each request."""

TABLE = model(1)


def plainly(name: str, penalty: float) -> list[int]:
    """One token after another, on the host."""
    text = list(PROMPTS[name])
    for _ in range(OVERLAPPED):
        logits = TABLE[next_context(text[-1], len(text))].clone()
        for token in set(text[len(PROMPTS[name]) :]):
            logits[token] -= penalty
        text.append(int(logits.argmax()))
    return text[len(PROMPTS[name]) :]


class Launches:
    """What the engine's core schedules where steps overlap: one token for each request, and prompts in pieces."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self._wanted = wanted
        self._computed: dict[str, int] = {}

    def next(self) -> SchedulerOutput:
        step, cached = SchedulerOutput.make_empty(), CachedRequestData.make_empty()
        for name, of in self._wanted.items():
            prompt, computed = PROMPTS[name], self._computed.get(name, 0)
            count = min(CHUNK, len(prompt) - computed) if computed < len(prompt) else 1
            step.num_scheduled_tokens[name] = count
            if computed:
                cached.req_ids.append(name)
                cached.num_computed_tokens.append(computed)
                cached.new_block_ids.append(None)
                cached.num_output_tokens.append(max(computed - len(prompt) + 1, 0))
            else:
                step.scheduled_new_reqs.append(NewRequestData(name, list(prompt), [], of, None, ([0],), 0, None, None))
            self._computed[name] = computed + count
        step.scheduled_cached_reqs = cached
        step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
        return step


@pytest.mark.parametrize("penalty", [0.0, 2.0], ids=["", "its tokens are read at once"])
def test_a_step_that_overlaps_is_waited_for_once_and_not_before_the_next_one_runs(penalty):
    """The core launches a step, then asks for the output of the one before it. That is where the host waits for that
    one: an event, which passes while the step launched last still runs. Only a choice that depends on tokens waits for
    the step before it when it is launched, and then its output is there when it is asked for.
    """
    wanted = {
        name: SamplingParams(temperature=0.0, presence_penalty=penalty * (name == "penalised")) for name in PROMPTS
    }
    found: dict[str, list[int]] = {name: [] for name in PROMPTS}
    with counting() as device, grouped(Group(1)):
        rank = make_ranks(1, TABLE, device, overlaps=True).ranks[0]
        launches, before = Launches(wanted), None

        def launch(synchronises: int) -> Any:
            with device.synchronises(synchronises, "a launch"):
                rank.execute_model(launches.next())
                return rank.sample_tokens(None)

        for number in range(OVERLAPPED + 1):
            late = bool(penalty) and number > 0
            launched = launch(late)
            if before is not None:
                with device.synchronises(not late, "an output"):
                    output = before.get_output()
                for name, ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
                    found[name] += ids
                assert device.busy, "the step launched last still runs"
                assert not launched._output.async_copy_ready_event.query()
            before = launched
    for name, ids in found.items():
        assert ids == plainly(name, penalty * (name == "penalised"))[: len(ids)]
        assert len(ids) >= OVERLAPPED - 1
