"""A choice and a draw have the host wait for the device once, for their results, and for nothing before. Whole steps
are in test_device_steps.py and test_draft_step.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample import sampler as sampler_module
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from outrider.actors.drafter.draw import draw
from outrider.actors.drafter.engine import Draw
from outrider.actors.round.request import Request
from outrider.actors.round.round import Step
from outrider.actors.verification import torch_kernel
from outrider.actors.verification.search import TokenSubset
from outrider.actors.vllm_adapter import target_runner, target_sampler
from outrider.actors.vllm_adapter.target_runner import RoundRunner
from outrider.actors.vllm_adapter.target_sampler import TargetSampler
from outrider.cluster.link.messages import DraftSampling, SparseQ
from outrider.cluster.modes import Mode
from tests.support.devices.counting_device import DEVICE, CountingDevice
from tests.unit.vllm_adapter.draw_kernels import draw_on

V, K, N = 300, 3, 5
ALL = [*Mode]


def requests_of(modes: list[Mode], **params: Any) -> list[Request]:
    made = []
    for number, mode in enumerate(modes):
        p = SamplingParams(temperature=float(mode is not Mode.GREEDY), **params)
        sampling = DraftSampling(mode, p.temperature, top_p=params.get("top_p", 1.0), seed=number)
        made.append(Request(f"r{number}", p, sampling, [1, 2, 3, 4], 3))
    return made


def step_of(requests: list[Request]) -> Step:
    step = Step.of(1, {}, {request.request_id: [5, 6, 7] for request in requests[1:]})
    ids = np.tile(np.arange(5, 5 + N, dtype=np.int32), (K, 1))
    for request in requests[1:]:
        if request.sampling.mode is Mode.REJECTION:
            step.drafts[request.request_id].q = SparseQ(ids, np.full(ids.shape, 1 / N, np.float32))
    return step


class Stock:
    """What vLLM's runner does around the choice."""

    def __init__(self, requests: list[Request], logits: torch.Tensor, metadata: Any) -> None:
        self.logits, self.device, self.logprobs = logits, DEVICE, None
        self.input_batch = SimpleNamespace(
            req_ids=[request.request_id for request in requests], generators={}, sampling_metadata=metadata
        )
        self.discard_request_mask = SimpleNamespace(np=np.zeros(len(requests), bool))

    def sample_tokens(self, grammar_output: Any) -> Any:
        chosen = self._sample(self.logits, None)  # type: ignore[attr-defined]
        ids, self.logprobs = RejectionSampler.parse_output(
            chosen.sampled_token_ids, V, logprobs_tensors=chosen.logprobs_tensors
        )
        return SimpleNamespace(req_ids=self.input_batch.req_ids, sampled_token_ids=ids)


class Runner(RoundRunner, Stock): ...


class Round:
    def __init__(self, sampler: Any, requests: list[Request]) -> None:
        self.sampler, self.requests, self.committed = sampler, requests, {}

    def choose(self, step: Step, request_ids: list[str], logits: Any, metadata: Any) -> Any:
        return self.sampler(logits, self.requests, step, metadata)

    def commit(self, step: Step, committed: dict[str, list[int]]) -> None:
        self.committed = committed


@pytest.fixture
def device(monkeypatch):
    device = CountingDevice()
    verify = torch_kernel.verify
    monkeypatch.setattr(target_sampler, "choose", lambda _: lambda batch: device.kernel(verify, batch))
    monkeypatch.setattr(target_runner, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    return device


def metadata_of(max_num_logprobs: int | None = None) -> SamplingMetadata:
    return SamplingMetadata(
        temperature=None,
        all_greedy=False,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=max_num_logprobs,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.empty(0),
        presence_penalties=torch.empty(0),
        repetition_penalties=torch.empty(0),
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def sampler_on(device: torch.device) -> TargetSampler:
    return TargetSampler(VllmConfig(), Sampler(), device)


def run_step(sampler: TargetSampler, requests: list[Request], logits: torch.Tensor) -> dict[str, list[int]]:
    runner = Runner(requests, logits, metadata_of())
    runner.install(Round(sampler, requests))
    runner._step = step_of(requests)
    runner.sample_tokens(None)
    return runner.round.committed


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize(
    "modes", [ALL, *([mode, mode] for mode in Mode)], ids=lambda modes: modes[-1].name + str(len(modes))
)
def test_a_target_step_waits_once_for_its_tokens_and_their_status(device, modes, top_p):
    requests = requests_of(modes, top_p=top_p)
    logits = torch.randn(len(modes) + K * (len(modes) - 1), V, generator=torch.Generator().manual_seed(0))
    expected = run_step(sampler_on(logits.device), requests, logits.clone())
    with device:
        sampler, there = sampler_on(DEVICE), logits.to(DEVICE)
        with device.synchronises(1, "a choice"):
            found = run_step(sampler, requests, there)
    assert found == expected
    assert all(found.values())


def test_a_step_with_logprobs_waits_once_too(device, monkeypatch):
    # vLLM's is compiled, which the device that counts is not for.
    monkeypatch.setattr(sampler_module, "batched_count_greater_than", lambda x, values: (x >= values).sum(-1))
    requests = requests_of(ALL)
    logits = torch.randn(len(ALL) + K * (len(ALL) - 1), V, generator=torch.Generator().manual_seed(0))

    def runner_of(logits: torch.Tensor) -> Runner:
        runner = Runner(requests, logits, metadata_of(2))
        runner.install(Round(sampler_on(logits.device), requests))
        runner._step = step_of(requests)
        return runner

    host = runner_of(logits.clone())
    host.sample_tokens(None)
    with device:
        runner = runner_of(logits.to(DEVICE))
        with device.synchronises(1, "a choice with logprobs"):
            runner.sample_tokens(None)
    expected, found = host.logprobs, runner.logprobs
    assert found.logprobs.shape[1] == 3
    for mine, its in zip(expected, found, strict=True):
        np.testing.assert_array_equal(mine, its)


SAMPLINGS = [
    DraftSampling(),
    DraftSampling(biases=((7, 2.0), (V + 9, 1.0))),
    DraftSampling(biases=((7, 2.0), (11, 1.0)), only_biased=True),
    DraftSampling(Mode.COUPLED, temperature=0.8, seed=5),
    DraftSampling(Mode.COUPLED, temperature=1.0, top_p=0.9, top_k=40, seed=2**62),
    DraftSampling(Mode.REJECTION, temperature=0.7, top_p=0.8, top_n=16, seed=11),
    DraftSampling(Mode.BLOCK, temperature=1.0, min_p=0.01, top_n=16, seed=-3),
]


@pytest.mark.parametrize("alternatives", [0, 2])
@pytest.mark.parametrize("samplings", [SAMPLINGS, *([one] for one in SAMPLINGS)], ids=range(len(SAMPLINGS) + 1))
@pytest.mark.parametrize("cut", [False, True], ids=["whole head", "cut head"])
def test_a_draft_step_waits_once_for_all_that_was_drawn(device, monkeypatch, cut, samplings, alternatives):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randperm(V, generator=generator)[:200]
    logits = torch.randn(len(samplings), len(ids) if cut else V, generator=generator) * 3
    draws = [Draw(sampling, 40 + row, 38, alternatives) for row, sampling in enumerate(samplings)]
    expected = draw(logits, draws, TokenSubset(ids) if cut else None)

    draw_on(device, monkeypatch)
    with device:
        subset = TokenSubset(ids.to(DEVICE)) if cut else None
        there = logits.to(DEVICE)
        with device.synchronises(1, "a draw"):
            found = draw(there, draws, subset)
    for mine, its in zip(expected, found, strict=True):
        assert (mine.token, mine.usable) == (its.token, its.usable)
        assert [token for token, _ in mine.alternatives] == [token for token, _ in its.alternatives]
        assert mine.confidence == pytest.approx(its.confidence, abs=1e-6)
        if mine.q_ids is not None:
            assert dict(zip(mine.q_ids.tolist(), mine.q_probs.tolist(), strict=True)) == pytest.approx(
                dict(zip(its.q_ids.tolist(), its.q_probs.tolist(), strict=True)), abs=1e-6
            )
