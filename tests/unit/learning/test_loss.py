"""Distances of distributions, and a vocabulary of which only a part is computed."""

import math

import pytest
import torch

from outrider.actors.learning.loss import KL_FALL, DraftIds, distances, mixed

V, P = 40, 6


@pytest.fixture
def logits():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, P, V, generator=generator) * 2


def exact(target, drafter):
    log_p, log_q = target.log_softmax(-1), drafter.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1), torch.minimum(log_p.exp(), log_q.exp()).sum(-1)


def test_with_every_token_kept_the_distances_are_exact(logits):
    top_log_p, top_ids = logits[0].log_softmax(-1).topk(V)
    kl, overlap = distances(*DraftIds.every(V).log_q(logits[1], top_ids), top_log_p)
    wanted = exact(*logits)
    torch.testing.assert_close(kl, wanted[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(overlap, wanted[1], atol=1e-5, rtol=1e-4)


def test_what_is_lumped_makes_kl_less_and_overlap_more(logits):
    top_log_p, top_ids = logits[0].log_softmax(-1).topk(5)
    kl, overlap = distances(*DraftIds.every(V).log_q(logits[1], top_ids), top_log_p)
    wanted = exact(*logits)
    assert (kl <= wanted[0] + 1e-6).all()
    assert (kl >= 0).all()
    assert (overlap >= wanted[1] - 1e-6).all()


def test_a_sample_stands_for_all_others_on_average(logits):
    named, top_ids = torch.arange(4), torch.tensor([[2]] * P)
    wanted = logits[1].log_softmax(-1).gather(1, top_ids)
    found = []
    for seed in range(400):
        ids = DraftIds.sampled(named, V, 12, seed)
        assert len(ids.ids) == 16
        found.append(ids.log_q(logits[1][:, ids.ids], top_ids)[0])
    # 1 / q is a sum over the vocabulary, which a weighted sample estimates without bias.
    torch.testing.assert_close(torch.stack(found).neg().exp().mean(0), wanted.neg().exp(), rtol=0.1, atol=0.0)


def test_the_mix_goes_from_kl_to_total_variation():
    kl, overlap = torch.tensor([2.0, 4.0]), torch.tensor([0.1, 0.3])
    loss, accepted = mixed(kl, overlap, torch.ones(2))
    share = math.exp(-KL_FALL * 0.2)
    assert float(accepted) == pytest.approx(0.2)
    assert float(loss) == pytest.approx(share * 3.0 + (1 - share) * 0.8)
    assert float(mixed(kl, torch.ones(2), torch.ones(2))[0]) == pytest.approx(math.exp(-KL_FALL) * 3.0)
    # A context that no round reaches counts nothing.
    assert float(mixed(kl, overlap, torch.tensor([1.0, 0.0]))[1]) == pytest.approx(0.1)
