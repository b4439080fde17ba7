"""Distances of distributions, and a vocabulary of which only a part is computed."""

import math

import pytest
import torch

from outrider.actors.learning.loss import KL_FALL, DraftIds, distances, head, mixed

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


def test_a_sample_of_all_others_but_one_is_nearly_the_whole_vocabulary(logits):
    named = torch.tensor([1, 5, 7, 30])
    ids = DraftIds.sampled(named, V, V - 5, 0)
    assert len(set(ids.ids.tolist())) == V - 1
    top_ids = torch.tensor([[5, 2, 30]] * P)
    log_q, known = ids.log_q(logits[1][:, ids.ids], top_ids)
    assert known.tolist() == [[True, False, True]] * P
    wanted = logits[1].log_softmax(-1).gather(1, top_ids)[known]
    torch.testing.assert_close(log_q[known], wanted, atol=0.3, rtol=0.0)
    assert DraftIds.sampled(named, V, V - 4, 0).ids is None, "all of it"


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


def test_tokens_beyond_the_drafters_vocabulary_are_lumped(logits):
    log_q, known = DraftIds.every(V).log_q(logits[1], torch.tensor([[1, V + 3]] * P))
    assert known.tolist() == [[True, False]] * P
    kl, overlap = distances(log_q, known, torch.tensor([[0.5, 0.5]] * P).log())
    assert torch.isfinite(kl).all()
    assert torch.isfinite(overlap).all()


def test_the_mix_goes_from_kl_to_total_variation():
    kl, overlap = torch.tensor([2.0, 4.0]), torch.tensor([0.1, 0.3])
    loss, accepted = mixed(kl, overlap, torch.ones(2))
    share = math.exp(-KL_FALL * 0.2)
    assert float(accepted) == pytest.approx(0.2)
    assert float(loss) == pytest.approx(share * 3.0 + (1 - share) * 0.8)
    assert float(mixed(kl, torch.ones(2), torch.ones(2))[0]) == pytest.approx(math.exp(-KL_FALL) * 3.0)
    # A context that no round reaches counts nothing.
    assert float(mixed(kl, overlap, torch.tensor([1.0, 0.0]))[1]) == pytest.approx(0.1)


def test_following_the_gradient_raises_acceptance(logits):
    top_log_p, top_ids = logits[0].log_softmax(-1).topk(8)
    drafter = logits[1].clone().requires_grad_()
    before = exact(logits[0], drafter)[1].mean()
    for _ in range(50):
        loss, _ = mixed(*distances(*DraftIds.every(V).log_q(drafter, top_ids), top_log_p), torch.ones(P))
        (gradient,) = torch.autograd.grad(loss, drafter)
        drafter = (drafter - 10 * gradient).detach().requires_grad_()
    assert exact(logits[0], drafter)[1].mean() > before + 0.3


def test_the_head_computes_only_the_rows_asked_for():
    hidden, weight = torch.randn(3, 4), torch.randn(V, 4)
    some = torch.tensor([7, 3])
    torch.testing.assert_close(head(hidden, weight, some), head(hidden, weight, None)[:, some])
