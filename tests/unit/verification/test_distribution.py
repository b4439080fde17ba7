"""Whatever is drafted, committed tokens are jointly distributed as plain sampling gives them.

200,000 samples of all K + 1 positions, against the exact joint distribution, by chi-square. A right kernel fails such a
test with probability FALSE_ALARM; seeds are fixed, so a run that passed passes again. `make mutants` makes the mistakes
that it has to flag.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.actors.verification.torch_kernel import verify
from outrider.cluster.modes import Mode
from tests.unit.verification.toy_target import FULL_LENGTH, START, Rounds, Toy, V, any_length, p_value, ragged

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(300)]

SAMPLES = 200_000
FALSE_ALARM = 1e-6
FLAGGED = 1e-9

TARGET = Toy.random(1)
DRAFTERS = {
    "good": Toy(TARGET.logits + 0.5 * torch.randn(TARGET.logits.shape, generator=torch.Generator().manual_seed(2))),
    "bad": Toy.random(3),
    "adversarial": Toy(-3 * TARGET.logits),
    "itself": TARGET,
    "one-hot": None,
}
# Seeds as users choose them: small, consecutive numbers.
SEEDS = torch.arange(SAMPLES)


@pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.BLOCK])
@pytest.mark.parametrize(
    ("drafter", "length", "n"),
    [
        ("good", FULL_LENGTH, V),
        ("good", ragged, 2),
        ("bad", ragged, 3),
        ("adversarial", FULL_LENGTH, V),
        ("itself", FULL_LENGTH, V),
        ("one-hot", ragged, 1),
    ],
    ids=["good", "good-top2-ragged", "bad-top3-ragged", "adversarial", "itself", "one-hot-ragged"],
)
def test_rejection_gives_the_targets_distribution(mode, drafter, length, n):
    rounds = Rounds(TARGET, DRAFTERS[drafter], mode, verify, length, n)
    tokens = rounds.run(SEEDS)
    p = p_value(tokens, TARGET.joint())
    print(f"{mode.name} {drafter}: p-value {p:.3g}, accepted {rounds.accepted / rounds.drafted:.3f}")
    assert p > FALSE_ALARM


@pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.BLOCK, Mode.COUPLED])
def test_real_drafter_and_verifier_with_the_requests_own_seeds(mode):
    rounds = Rounds(TARGET, DRAFTERS["good"], mode, verify, ragged, 3, real_sampler=True)
    assert p_value(rounds.run(SEEDS), TARGET.joint()) > FALSE_ALARM


@pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.BLOCK, Mode.COUPLED])
def test_under_temperature_top_k_and_top_p(mode):
    how = {"temperature": 0.7, "top_k": 4, "top_p": 0.8}
    rounds = Rounds(TARGET, DRAFTERS["good"], mode, verify, FULL_LENGTH, V, real_sampler=True, **how)
    assert p_value(rounds.run(SEEDS), TARGET.joint(**how)) > FALSE_ALARM


@pytest.mark.parametrize("mode", [Mode.GREEDY, Mode.COUPLED])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_and_coupled_tokens_do_not_depend_on_the_drafter(mode, drafter):
    seeds = SEEDS[:20_000]
    plain = Rounds(TARGET, DRAFTERS["bad"], mode, verify, any_length(0)).run(seeds)
    rounds = Rounds(TARGET, DRAFTERS[drafter], mode, verify, ragged)
    assert torch.equal(rounds.run(seeds), plain)


def test_block_verification_accepts_more():
    accepted = {}
    for mode in (Mode.REJECTION, Mode.BLOCK):
        rounds = Rounds(TARGET, DRAFTERS["good"], mode, verify)
        rounds.run(SEEDS[:50_000])
        accepted[mode] = rounds.accepted / rounds.drafted
    assert accepted[Mode.BLOCK] > accepted[Mode.REJECTION]


def forbids_two(ids: Tensor) -> Tensor:
    return ids == 2


@pytest.mark.parametrize(
    ("mode", "exact"), [(Mode.REJECTION, False), (Mode.BLOCK, False), (Mode.COUPLED, True)], ids=lambda v: str(v)
)
def test_a_cut_that_depends_on_the_token_itself_biases_rejection_but_not_coupled(mode, exact):
    """The scheduler cuts drafts so, at the first token that a grammar forbids; the target's mask forbids it too."""
    logits = TARGET.logits.clone()
    logits[..., 2] = -torch.inf
    target = Toy(logits)
    rounds = Rounds(target, DRAFTERS["good"], mode, verify, real_sampler=True, cut=forbids_two)
    p = p_value(rounds.run(SEEDS), target.joint())
    assert p > FALSE_ALARM if exact else p < FLAGGED


def test_the_statistic_itself():
    """Plain sampling passes; a target one of whose logits, of a first token, is 0.1 larger does not."""
    generator = torch.Generator().manual_seed(5)
    joint = TARGET.joint()
    cells = torch.multinomial(joint, SAMPLES, replacement=True, generator=generator)
    tokens = torch.stack([cells // V**2, cells // V % V, cells % V], dim=1)
    assert p_value(tokens, joint) > FALSE_ALARM
    shifted = Toy(TARGET.logits.clone())
    shifted.logits[0, START, START, 0] += 0.1
    assert p_value(tokens, shifted.joint()) < FLAGGED
