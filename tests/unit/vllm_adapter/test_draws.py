"""Draws of every sampling method on the device that counts: the host waits once, and gets what the CPU draws."""

from __future__ import annotations

import pytest
import torch

from outrider.actors.drafter.draw import draw
from outrider.actors.drafter.engine import Draw
from outrider.actors.verification.search import TokenSubset
from outrider.cluster.link.messages import DraftSampling
from outrider.cluster.modes import Mode
from tests.support.devices.counting_device import DEVICE, CountingDevice
from tests.unit.vllm_adapter.draw_kernels import draw_on

V = 300
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
def test_drawing_waits_once_for_all_rows(monkeypatch, cut, samplings, alternatives):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randperm(V, generator=generator)[:200]
    logits = torch.randn(len(samplings), len(ids) if cut else V, generator=generator) * 3
    draws = [Draw(sampling, 40 + row, 38, alternatives) for row, sampling in enumerate(samplings)]
    expected = draw(logits, draws, TokenSubset(ids) if cut else None)

    device = CountingDevice()
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
