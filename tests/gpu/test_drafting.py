"""What a drafter draws on the device."""

import pytest
import torch

from outrider.actors.drafter.draw import draw
from outrider.actors.drafter.engine import Draw
from outrider.actors.verification.search import TokenSubset
from outrider.cluster.link.messages import DraftSampling
from outrider.cluster.modes import Mode

SAMPLINGS = [
    DraftSampling(),
    DraftSampling(Mode.COUPLED, temperature=0.8, seed=5),
    DraftSampling(Mode.COUPLED, temperature=1.0, top_p=0.9, seed=2**62),
    DraftSampling(Mode.REJECTION, temperature=0.7, top_n=64, seed=11),
    DraftSampling(Mode.BLOCK, temperature=1.0, top_k=20, top_n=64, seed=-3),
]


@pytest.mark.parametrize("cut", [False, True], ids=["whole head", "cut head"])
@pytest.mark.parametrize("vocab_size", [49152, 151936])
def test_drafts_and_their_q_are_those_of_the_cpu(device, vocab_size, cut):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(vocab_size, generator=generator)[: vocab_size // 8]
    logits = torch.randn(2 * len(SAMPLINGS), len(ids) if cut else vocab_size, generator=generator) * 3
    draws = [Draw(sampling, 40 + row, 38, alternatives=2) for row, sampling in enumerate([*SAMPLINGS, *SAMPLINGS])]
    here = draw(logits, draws, TokenSubset(ids) if cut else None)
    there = draw(logits.to(device), draws, TokenSubset(ids.to(device)) if cut else None)
    for mine, its in zip(here, there, strict=True):
        assert mine.token == its.token
        assert mine.confidence == pytest.approx(its.confidence, abs=1e-5)
        assert [token for token, _ in mine.alternatives] == [token for token, _ in its.alternatives]
        if mine.q_ids is not None:
            assert dict(zip(mine.q_ids.tolist(), mine.q_probs.tolist(), strict=True)) == pytest.approx(
                dict(zip(its.q_ids.tolist(), its.q_probs.tolist(), strict=True)), abs=1e-5
            )
