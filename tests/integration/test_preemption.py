"""Both sides out of KV cache: requests are preempted in the target and refused by the drafter, and nobody's tokens
change.

vllm#30916: drafts of before a preemption that were verified after it.
"""

import threading

import pytest
import torch

from tests.support.cluster.serving import HANG_GUARD_S, PATH_ROUNDS, wait_until_idle
from tests.support.models.reference import GREEDY, Coupled

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TEXT = b"It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
STREAMS, NUM_TOKENS = 8, 300
CHOICES = [GREEDY, Coupled(seed=3), Coupled(seed=4, temperature=0.7, top_p=0.9)]


TEMPERATURE = 1.5
DRAWN = [{"temperature": TEMPERATURE, "top_k": 2, "verification": mode} for mode in ("rejection", "block", "coupled")]
"""Each token is one of two, by chance."""

ONLY_ONE = [{"temperature": TEMPERATURE, "top_k": 1, "verification": mode} for mode in ("rejection", "block")]
"""Through the same code, with one right token each time: a token or a KV block that is not the request's own shows."""

LIMIT = 4.5
"""Standard deviations that the share of likelier tokens may be off."""


def z_of_likelier(reference, answers):
    """How far from expected the number of likelier tokens is among (prompt, answer) drawn from the two likeliest. Of a
    token the chance is known once those before it are, so that the differences add up like independent ones."""
    difference = variance = 0.0
    for prompt, answer in answers:
        logits = reference.logits_along(torch.tensor([[*prompt, *answer]]))[0, len(prompt) - 1 : -1].double()
        two = logits.topk(2)
        chance = (two.values / TEMPERATURE).softmax(-1)[:, 0]
        difference += float(((torch.tensor(answer) == two.indices[:, 0]).double() - chance).sum())
        variance += float((chance * (1 - chance)).sum())
    return difference / variance**0.5


@pytest.mark.parametrize("deployment", ["small_kv", "paths", "no_drafter", "stages"], indirect=True)
def test_preempted_requests_get_the_tokens_they_would_have_got_alone(deployment):
    """Prompts are prefilled in pieces, too: a step has room for 96 tokens. Without a drafter steps overlap: a request
    that is preempted loses the token that is on its way, and gets the same once more. With two stages the first embeds
    tokens that only the last one chose, so that a text of its own that is a token short shows."""
    paths = deployment.metric(PATH_ROUNDS)
    before, after = crowd(deployment, [*CHOICES, *DRAWN, *ONLY_ONE])
    assert (deployment.metric(PATH_ROUNDS) > paths) == (deployment.config.speculation.num_paths > 1)
    assert (after.rounds.accepted > before.rounds.accepted) == (deployment.name != "no_drafter")
    if deployment.name == "small_kv":
        assert after.rounds.refused_proposals > before.rounds.refused_proposals, "the drafter never ran out of KV"


def crowd(deployment, asked):
    """Everybody at once, each as asked, until the target has preempted some. Returns its status before and after."""
    assert len(asked) <= STREAMS
    prompts = [bytes([65 + i]) + TEXT[: 40 + 9 * i] for i in range(STREAMS)]
    answers, errors = [None] * STREAMS, []

    def ask(index):
        how = asked[index % len(asked)]
        options = how if isinstance(how, dict) else how.options()
        try:
            answers[index] = deployment.client.generate(
                list(prompts[index]), max_tokens=NUM_TOKENS, ignore_eos=True, **options
            )
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)

    before = deployment.status()
    threads = [threading.Thread(target=ask, args=(index,)) for index in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_GUARD_S * 2)
    assert not errors, f"a request failed: {errors[0]!r}"
    drawn = []
    for index, answer in enumerate(answers):
        how, label = asked[index % len(asked)], f"stream {index} of {STREAMS}"
        if how in ONLY_ONE:
            deployment.reference.check(prompts[index], answer.token_ids, label=label)
        elif isinstance(how, dict):
            drawn.append((prompts[index], list(answer.token_ids)))
            outside = deployment.reference.outside_top(prompts[index], answer.token_ids, how["top_k"])
            assert not outside, f"{label}: tokens {outside} are none of the two likeliest"
        else:
            deployment.reference.check(prompts[index], answer.token_ids, label=label, choice=how)
    z = z_of_likelier(deployment.reference, drawn)
    print(f"{len(drawn) * NUM_TOKENS} drawn tokens, z {z:.2f}")
    assert abs(z) < LIMIT
    after = deployment.status()
    assert after.target.preemptions > before.target.preemptions, "the target never ran out of KV"
    wait_until_idle(deployment, HANG_GUARD_S)
    return before, after
