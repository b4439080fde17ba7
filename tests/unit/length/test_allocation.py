"""Lengths for known numbers: what pays, what does not, and that nothing better was overlooked."""

import itertools

import numpy as np
import pytest

from actors.length.allocation import Batch, allocate
from actors.length.draft_wait import DraftWait

K = 4


def batch(acceptance, step_s, draft_step_s, hit=0.9, num_plain=0, **more):
    """acceptance: of each request, at every position."""
    survival = np.array([np.cumprod([a] * K) for a in acceptance])
    return Batch(
        survival=survival,
        hit_rate=np.full(len(survival), hit),
        delivery=np.ones(len(survival)),
        main_share=0.7,
        num_plain=num_plain,
        step_s=step_s,
        uniform_saving_s=more.pop("uniform_saving_s", 0.0),
        waits=DraftWait(K).curves(draft_step_s),
        **more,
    )


def gpu(tokens):
    return 0.025 + 0.0001 * tokens


def exact_rate(batch, k, k_miss):
    """Over all outcomes of up to a few requests."""
    tokens = scheduled = float(batch.num_plain)
    h, mu = batch.hit_rate, batch.hit_rate * batch.main_share
    for i in range(len(k)):
        sums = np.concatenate(([0.0], np.cumsum(batch.survival[i])))
        tokens += 1 + h[i] * sums[k[i]] + (1 - h[i]) * sums[k_miss[i]]
        scheduled += 1 + h[i] * k[i] + (1 - h[i]) * k_miss[i]
    step_s = float(batch.step_s(np.array([scheduled]))[0])
    wait_s = 0.0
    for outcome in itertools.product(range(3), repeat=len(k)):
        share, longest = 1.0, 0.0
        for i, kind in enumerate(outcome):
            share *= (mu[i], h[i] - mu[i], 1 - h[i])[kind]
            if k[i] and kind < 2:
                longest = max(longest, float(batch.waits.hit_s(k[i], float(kind == 0), step_s)))
            elif k[i]:
                longest = max(longest, float(batch.waits.miss_s[k_miss[i]]))
        wait_s += share * longest
    return tokens / (step_s + wait_s)


@pytest.mark.parametrize("draft_step_s", [0.0, 0.004, 0.008, 0.02])
@pytest.mark.parametrize("per_token_s", [0.0001, 0.004])
@pytest.mark.parametrize("acceptance", [(0.9,), (0.5,), (0.9, 0.4), (0.8, 0.8, 0.3)])
@pytest.mark.parametrize("hit", [0.9, 0.4])
def test_no_other_lengths_are_much_better(acceptance, per_token_s, draft_step_s, hit):
    known = batch(acceptance, lambda tokens: 0.025 + per_token_s * tokens, draft_step_s, hit)
    chosen = allocate(known)
    pairs = [(k, m) for k in range(K + 1) for m in range(k + 1)]
    best = max(
        exact_rate(known, [p[0] for p in choice], [p[1] for p in choice])
        for choice in itertools.product(pairs if len(acceptance) < 3 else pairs[::2], repeat=len(acceptance))
    )
    assert exact_rate(known, chosen.k, chosen.k_miss) > 0.96 * best


def test_nothing_is_drafted_where_nothing_is_accepted_or_everything_costs():
    assert allocate(batch([0.0] * 3, gpu, 0.004)).k.tolist() == [0, 0, 0]
    assert allocate(batch([0.9] * 3, lambda tokens: 0.01 * tokens, 0.004)).k.tolist() == [0, 0, 0]
    assert allocate(batch([0.9] * 3, gpu, 0.5)).k.tolist() == [0, 0, 0]


def test_who_is_accepted_more_gets_more():
    k = allocate(batch([0.95, 0.5], lambda tokens: 0.025 + 0.002 * tokens, 0.001)).k
    assert k[0] > k[1] > 0


def test_a_lone_request_waits_on_a_miss_and_a_batch_does_not():
    assert allocate(batch([0.9], gpu, 0.006)).k_miss[0] > 0
    chosen = allocate(batch([0.9] * 8, gpu, 0.006))
    assert chosen.k_miss.tolist() == [0] * 8
    assert (chosen.k >= 3).all()
    assert allocate(batch([0.9], gpu, 0.006, num_plain=7)).k_miss.tolist() == [0], "who does not draft waits too"


def test_without_hits_the_wait_is_weighed_like_any_other():
    chosen = allocate(batch([0.9] * 2, gpu, 0.002, hit=1e-6))
    assert (chosen.k_miss == K).all()
    assert (chosen.k >= chosen.k_miss).all()


def test_positions_a_request_may_not_have_are_not_given():
    known = batch([0.9, 0.9], gpu, 0.001)
    known.survival[0, 1:] = 0.0
    chosen = allocate(known)
    assert chosen.k[0] == 1
    assert chosen.k[1] > 1


def test_uniform_steps_are_used_where_they_save_enough():
    def steep(tokens):
        return 0.025 + 0.002 * tokens

    assert not (allocate(batch([0.7] * 4, steep, 0.001)).k == K).all()
    chosen = allocate(batch([0.7] * 4, steep, 0.001, uniform_saving_s=0.02))
    assert (chosen.k == K).all()
    assert (chosen.k_miss == K).all()


def test_the_least_gain_decides_at_the_margin():
    known = {"acceptance": [0.5], "step_s": lambda tokens: 0.025 + 0.0118 * tokens, "draft_step_s": 0.001}
    assert allocate(batch(**known, least_gain=1.0)).k.any()
    assert not allocate(batch(**known, least_gain=1.5)).k.any()


def test_a_round_without_drafting_requests():
    known = batch([], gpu, 0.001, num_plain=3)
    known = Batch(np.zeros((0, K)), np.zeros(0), np.zeros(0), 0.7, 3, gpu, 0.0, known.waits)
    assert allocate(known).rate == pytest.approx(3 / gpu(3))
