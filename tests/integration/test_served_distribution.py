"""Rejection and block verification as served, q over the link and all: the tokens are distributed as the target's own.

vllm#40149: draft probabilities that never arrived. Thousands of answers of a few tokens, every one with a random seed
of its own as in production, against the probabilities that another implementation gives.
"""

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.serving import K

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PROMPT = list(b"It was the")
CALLS, N = 64, 48
BIAS = {84: 2.0, 65: -3.0, 46: 1.5}
TEMPERATURE, TOP_K = 0.9, 12
MIN_EXPECTED = 8.0


@pytest.fixture(scope="module")
def probabilities(deployments):
    """p(text) for texts of tokens after the prompt, from the reference."""
    reference = deployments.use("pair").reference
    known = {}

    def p_next(tokens):
        key = tuple(tokens)
        if key not in known:
            logits = reference.logits([*PROMPT, *tokens]).double()
            for token, bias in BIAS.items():
                logits[token] += bias
            scaled = logits / TEMPERATURE
            scaled[scaled < scaled.topk(TOP_K).values[-1]] = -torch.inf
            known[key] = scaled.softmax(-1)
        return known[key]

    return p_next


def three_tokens(p_next):
    """Every text of three tokens and its probability."""
    table = {}
    for first in p_next(()).nonzero().flatten().tolist():
        for second in p_next((first,)).nonzero().flatten().tolist():
            rest = p_next((first, second))
            start = float(p_next(())[first] * p_next((first,))[second])
            for third in rest.nonzero().flatten().tolist():
                table[first, second, third] = start * float(rest[third])
    return table


def chi_square(counts, table, total):
    """z-score of the statistic against its degrees of freedom; what is rare is pooled."""
    statistic, cells, rare_seen, rare_expected = 0.0, 0, total, float(total)
    for text, probability in table.items():
        expected = probability * total
        if expected >= MIN_EXPECTED:
            statistic += (counts[text] - expected) ** 2 / expected
            cells += 1
            rare_seen -= counts[text]
            rare_expected -= expected
    if rare_expected > MIN_EXPECTED:
        statistic += (rare_seen - rare_expected) ** 2 / rare_expected
        cells += 1
    freedom = cells - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5, freedom


def sample(pair, verification):
    """Counts of the answers' first three tokens, and how many drafts were made and accepted for them."""

    def call(_):
        return pair.client.generate(
            PROMPT,
            n=N,
            temperature=TEMPERATURE,
            top_k=TOP_K,
            logit_bias=BIAS,
            ignore_eos=True,
            max_tokens=4,
            verification=verification,
            num_speculative_tokens=K,
        ).completions

    with ThreadPoolExecutor(2) as pool:
        completions = list(itertools.chain.from_iterable(pool.map(call, range(CALLS))))
    counts = Counter(tuple(completion.token_ids[:3]) for completion in completions)
    drafted = sum(completion.metrics.speculative_decoding.num_draft_tokens for completion in completions)
    accepted = sum(completion.metrics.speculative_decoding.num_accepted_draft_tokens for completion in completions)
    return counts, len(completions), drafted, accepted


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_answers_are_distributed_as_the_target_s_own(pair, probabilities, verification):
    table = three_tokens(probabilities)
    assert sum(table.values()) == pytest.approx(1.0)
    counts, total, drafted, accepted = sample(pair, verification)
    assert drafted > total, "nothing was drafted, so nothing was tested"
    assert 0.2 < accepted / drafted < 0.98, "drafts must be accepted, and rejected, often"
    outside = sum(count for text, count in counts.items() if text not in table)
    assert outside == 0, "tokens outside top_k"
    z, freedom = chi_square(counts, table, total)
    print(
        f"{verification}: {total} answers, {accepted} of {drafted} drafts accepted, chi-square z {z:.2f}, {freedom} df"
    )
    assert z < 4.5


def test_the_test_tells_a_biased_sampler(probabilities):
    """Tokens accepted against a one-hot q although they were drawn from a distribution: what an unwired q gives."""
    table = three_tokens(probabilities)
    generator = torch.Generator().manual_seed(0)
    texts, p = list(table), torch.tensor(list(table.values()))
    draws = torch.multinomial(p, CALLS * N, replacement=True, generator=generator).tolist()
    fair = Counter(texts[i] for i in draws)
    assert chi_square(fair, table, CALLS * N)[0] < 4.5
    biased = p * p.sqrt()
    draws = torch.multinomial(biased / biased.sum(), CALLS * N, replacement=True, generator=generator).tolist()
    assert chi_square(Counter(texts[i] for i in draws), table, CALLS * N)[0] > 20
