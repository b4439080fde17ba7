"""Draws of all kinds, and for comparison each one by hand."""

import math

import torch

from outrider.actors.drafter.engine import Draw
from outrider.actors.verification.constraints import Constraints
from outrider.actors.verification.draft_sampler import sample_drafts
from outrider.cluster.link.messages import DraftSampling, SparseQ
from outrider.cluster.modes import Mode

VOCAB = 500
INF = math.inf
ONLY = ((3, 0.0), (50, 2.0), (77, -1.0), (400, -INF))

SAMPLINGS = {
    "greedy": DraftSampling(seed=1),
    "rejection": DraftSampling(Mode.REJECTION, temperature=0.7, seed=2, top_n=8),
    "rejection-64": DraftSampling(Mode.REJECTION, temperature=1.3, top_k=20, top_p=0.9, seed=-3, top_n=64),
    "block": DraftSampling(Mode.BLOCK, temperature=1.0, min_p=0.05, seed=4, top_n=8),
    "coupled": DraftSampling(Mode.COUPLED, temperature=0.9, top_p=0.95, seed=5),
    "coupled-2": DraftSampling(Mode.COUPLED, temperature=1.2, seed=6, top_n=3),
    "one-hot": DraftSampling(Mode.REJECTION, temperature=0.7, seed=7, top_n=0),
    "wide": DraftSampling(Mode.BLOCK, temperature=2.0, seed=8, top_n=1024),
    "biased": DraftSampling(Mode.REJECTION, temperature=1.0, seed=9, top_n=8, biases=((11, 6.0), (12, -INF))),
    "only": DraftSampling(Mode.REJECTION, temperature=1.0, seed=10, top_n=8, biases=ONLY, only_biased=True),
    "greedy-only": DraftSampling(biases=ONLY, only_biased=True),
    "coupled-only": DraftSampling(Mode.COUPLED, temperature=1.0, seed=12, biases=ONLY, only_biased=True),
}


def random_logits(rows, seed=0, vocab=VOCAB):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def by_hand(sampling, logits, position, round_start):
    """sample_drafts for one row. logits: float32 [V]."""
    logits = logits.clone()
    if sampling.only_biased:
        kept = torch.full_like(logits, -INF)
        for token, _ in sampling.biases:
            kept[token] = logits[token]
        logits = kept
    for token, bias in sampling.biases:
        logits[token] += bias
    mode = Mode.GREEDY if sampling.mode.samples_q and not sampling.top_n else sampling.mode
    constraints = Constraints(
        temperature=torch.tensor([sampling.temperature or 1.0]),
        top_k=torch.tensor([sampling.top_k]),
        top_p=torch.tensor([sampling.top_p]),
        min_p=torch.tensor([sampling.min_p]),
        max_top_k=sampling.top_k,
        all_top_k=sampling.top_k > 0,
        any_top_p=sampling.top_p < 1,
        any_min_p=sampling.min_p > 0,
    )
    seed, position, start = (torch.tensor([value]) for value in (sampling.seed, position, round_start))
    return sample_drafts(logits.unsqueeze(0), mode, constraints, seed, position, start, sampling.top_n)


def draw_of(sampling, position=10, round_start=None, alternatives=0):
    """Return what to draw at a position, the first of its round unless told otherwise."""
    return Draw(sampling, position, position if round_start is None else round_start, alternatives)


def check_against_hand(drawn, sampling, logits, position, round_start=None):
    """logits: float32 [V], what drawn was drawn from."""
    expected = by_hand(sampling, logits, position, position if round_start is None else round_start)
    assert (drawn.usable, drawn.bad_logits) == (True, False)
    assert drawn.token == int(expected.ids)
    if expected.q_ids is None:
        assert (drawn.q_ids, drawn.q_probs) == (None, None)
        return
    assert (drawn.q_ids.dtype, drawn.q_probs.dtype) == ("int32", "float32")
    assert drawn.q_ids.tolist() == expected.q_ids[0].tolist()
    torch.testing.assert_close(torch.from_numpy(drawn.q_probs), expected.q_probs[0], atol=1e-6, rtol=1e-5)
    SparseQ(drawn.q_ids[None], drawn.q_probs[None])
