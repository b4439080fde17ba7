"""Rejection and block verification as served, q over the link and all: the tokens are distributed as the target's own.

Hundreds of answers, every one with a random seed of its own as in production. At each token another implementation says
what the target's probabilities were there; how often the token was the target's first, second, ... choice and the
drafter's first, second, ... choice must add up to that.
"""

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support.cluster.serving import PATH_TOKENS
from tests.support.models.distribution import LIMIT, cut_to_top, z_score
from tests.support.models.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.exhaustive, pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = list(range(33, 127, 2))
CALLS, N, NUM_TOKENS = 16, 12, 32
DRAFTS = 4
TEMPERATURE, TOP_K = 0.9, 5
PENALTY = 1.5
"""repetition_penalty. The drafter is not told of it, so that q is far from p and many drafts are rejected."""


def probabilities(reference, answers, penalty, columns=None):
    """float64 [A, NUM_TOKENS, V] at every token of the answers, int64 [A, NUM_TOKENS]. columns: V of a target whose
    vocabulary is padded to another size than the reference's: a drafter feeds what it lacks as its own last token, and
    draws nothing that the target lacks."""
    texts = torch.cat([torch.tensor(PROMPT).expand(len(answers), -1), answers], dim=1)
    texts = texts.clamp_max(reference.vocab_size - 1)
    logits = torch.cat([reference.logits_along(part)[:, len(PROMPT) - 1 : -1] for part in texts.split(64)]).double()
    if columns is not None:
        lacking = max(columns - reference.vocab_size, 0)
        logits = torch.nn.functional.pad(logits[..., :columns], (0, lacking), value=-torch.inf)
    seen = torch.zeros_like(logits, dtype=torch.bool)
    for place in range(NUM_TOKENS):
        seen[:, place].scatter_(1, texts[:, : len(PROMPT) + place], value=True)
    logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits) / TEMPERATURE
    return cut_to_top(logits, TOP_K)


@pytest.fixture(scope="module")
def served(deployments):
    """(answers, p, q, drafts, accepted drafts, drafted rounds) by verification, made once."""
    made = {}

    def call(pair, verification):
        return pair.client.generate(
            PROMPT,
            n=N,
            temperature=TEMPERATURE,
            top_k=TOP_K,
            repetition_penalty=PENALTY,
            ignore_eos=True,
            max_tokens=NUM_TOKENS,
            verification=verification,
            num_speculative_tokens=DRAFTS,
        ).completions

    def ask(pair, verification):
        if (pair.name, verification) not in made:
            with ThreadPoolExecutor(2) as pool:
                calls = pool.map(functools.partial(call, pair), [verification] * CALLS)
                completions = list(itertools.chain.from_iterable(calls))
            answers = torch.tensor([list(completion.token_ids) for completion in completions])
            counted = [completion.metrics.speculative_decoding for completion in completions]
            made[pair.name, verification] = (
                answers,
                probabilities(pair.reference, answers, PENALTY),
                probabilities(pair.drafter_reference, answers, 1.0, pair.reference.vocab_size),
                sum(one.num_draft_tokens for one in counted),
                sum(one.num_accepted_draft_tokens for one in counted),
                sum(one.num_spec_steps for one in counted),
            )
        return made[pair.name, verification]

    return ask


def check(pair, served, verification):
    """Returns the answers."""
    answers, p, q, drafted, accepted, rounds = served(pair, verification)
    assert p.gather(-1, answers.unsqueeze(-1)).min() > 0, "a token outside top_k"
    of_drafted_rounds = min((rounds + accepted) / answers.numel(), 1.0)  # what max_tokens cut off was accepted too
    assert of_drafted_rounds > 0.5, "too few tokens came from rounds with drafts"
    assert 0.1 < accepted / drafted < 0.7, "drafts must be accepted, and rejected, often"
    z = z_score(answers, p, q, TOP_K)
    print(
        f"{verification}: {answers.numel()} tokens, {of_drafted_rounds:.0%} of them from drafted rounds, "
        f"{accepted} of {drafted} drafts accepted; z {z:.2f}"
    )
    assert z < LIMIT
    return answers


# Block verification's own distribution is in tests/unit/verification/test_distribution.py. What it shares with
# rejection, and what this is about, is the way that q, drafts and their verdict take through a server.
@pytest.mark.parametrize("verification", ["rejection", pytest.param("block", marks=pytest.mark.exhaustive)])
def test_answers_are_distributed_as_the_target_s_own(pair, served, verification):
    check(pair, served, verification)


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_with_a_drafter_that_drafts_in_one_pass(one_pass, served, verification):
    """q of a token is the drafter's after the text that its row fed and masks; here it is only used to sort tokens."""
    check(one_pass, served, verification)


def test_with_several_paths(paths, served):
    """Coupled with a random seed; which path is the longest depends on the tokens, and must not show in them."""
    check(paths, served, "coupled")
    assert paths.metric(PATH_TOKENS) > 100, "paths beside the main line were accepted"


def test_with_a_target_that_is_padded_further_than_its_drafter(wide_target, served):
    answers = check(wide_target, served, "rejection")
    assert answers.max() >= VOCAB_SIZE, "no answer has what the drafter lacks"


@pytest.mark.exhaustive
def test_with_a_drafter_that_is_padded_further_than_its_target(wide_drafter, served):
    check(wide_drafter, served, "rejection")


def test_the_test_tells_a_biased_sampler(pair, served):
    """Tokens drawn at the same places from the law of a verifier with one mistake: what comes after a rejection is
    drawn from p itself, not from what p has over q. In half of the places, as if the others had had no drafts."""
    _, p, q, *_ = served(pair, "rejection")
    generator = torch.Generator().manual_seed(0)
    kept = torch.minimum(p, q)
    wrong = kept + (1 - kept.sum(-1, keepdim=True)) * p
    mixed = torch.where(torch.rand(p.shape[:2], generator=generator).unsqueeze(-1) < 0.5, wrong, p)
    for law, is_flagged in ((p, False), (mixed, True)):
        draws = torch.multinomial(law.flatten(0, 1), 1, generator=generator).view(p.shape[:2])
        z = z_score(draws, p, q, TOP_K)
        print(f"{'biased' if is_flagged else 'fair'}: z {z:.2f}")
        assert (z > LIMIT) == is_flagged
