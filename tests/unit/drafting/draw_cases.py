"""Rows to draw for, drawn by `Draws` and, for comparison, one at a time by hand."""

import math

import torch

from actors.drafting.draw import Draws
from actors.drafting.draw_group import DrawRow
from actors.messages import DraftSampling, SparseQ
from actors.verification.constraints import Constraints
from actors.verification.draft_sampler import sample_drafts
from actors.verification.mode import Mode

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


def first_row(name, sampling, committed_len=10):
    """A row whose first token is the first of its round."""
    return DrawRow(name, sampling, committed_len, committed_len)


def random_logits(rows, seed=0, vocab=VOCAB):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def run(rows, steps):
    """steps: (request ids, logits) of each. Returns DrawnRow by request."""
    draws = Draws(rows)
    ids = {row.row_id: [] for row in rows}
    for request_ids, logits in steps:
        before = logits.clone()
        drawn = draws.draw(logits, request_ids)
        assert (drawn.dtype, list(drawn.shape)) == (torch.int32, [len(request_ids), 1])
        assert torch.equal(logits.nan_to_num(), before.nan_to_num())
        for request_id, (token,) in zip(request_ids, drawn.tolist(), strict=True):
            if request_id in ids:
                ids[request_id].append(token)
            else:
                assert token == 0
    return draws.results(ids)


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


def check_against_hand(drafted, sampling, rows_of_logits, committed_len):
    """rows_of_logits: what each of the drafts was drawn from."""
    assert len(drafted.token_ids) == len(rows_of_logits)
    assert not drafted.bad_logits
    for index, logits in enumerate(rows_of_logits):
        expected = by_hand(sampling, logits, committed_len + index, committed_len)
        assert drafted.token_ids[index] == int(expected.ids)
        if expected.q_ids is None:
            assert drafted.q_ids is None
            continue
        assert (drafted.q_ids.dtype, drafted.q_probs.dtype) == ("int32", "float32")
        assert drafted.q_ids[index].tolist() == expected.q_ids[0].tolist()
        torch.testing.assert_close(torch.from_numpy(drafted.q_probs[index]), expected.q_probs[0], atol=1e-6, rtol=1e-5)
    if drafted.q_ids is not None:
        SparseQ(drafted.q_ids, drafted.q_probs)


def draw_row(name, sampling, position=10, round_start=10):
    return DrawRow(name, sampling, position, round_start)


def draw_steps(rows, steps, vocab_ids=None):
    """steps: (row ids, logits, alternatives) of each. Returns DrawnRow by row."""
    draws = Draws(rows, vocab_ids)
    ids = {}
    for row_ids, logits, alternatives in steps:
        drawn = draws.draw(logits, row_ids, alternatives=alternatives)
        for row_id, (token,) in zip(row_ids, drawn.tolist(), strict=True):
            ids.setdefault(row_id, []).append(token)
    return draws.results(ids)
