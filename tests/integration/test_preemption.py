"""Both sides out of KV cache: requests are preempted in the target and refused by the drafter, and nobody's tokens
change.

vllm#30916: drafts of before a preemption that were verified after it.
"""

import threading

import pytest

from tests.reference import GREEDY, Coupled
from tests.serving import HANG_GUARD_S, wait_until_idle

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TEXT = b"It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
STREAMS, NUM_TOKENS = 8, 300
CHOICES = [GREEDY, Coupled(seed=3), Coupled(seed=4, temperature=0.7, top_p=0.9)]


REJECTION = {"temperature": 1.5, "top_k": 2, "verification": "rejection"}
BLOCK = {"temperature": 1.5, "top_k": 2, "verification": "block"}


def test_preempted_requests_get_the_tokens_they_would_have_got_alone(small_kv):
    """Prompts are prefilled in pieces, too: a step has room for 96 tokens."""
    asked = [*CHOICES, REJECTION, BLOCK]
    prompts = [bytes([65 + i]) + TEXT[: 40 + 9 * i] for i in range(STREAMS)]
    answers, errors = [None] * STREAMS, []

    def ask(index):
        how = asked[index % len(asked)]
        options = how if isinstance(how, dict) else how.options()
        try:
            answers[index] = small_kv.client.generate(
                list(prompts[index]), max_tokens=NUM_TOKENS, ignore_eos=True, **options
            )
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)

    before = small_kv.status()
    threads = [threading.Thread(target=ask, args=(index,)) for index in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_GUARD_S * 2)
    assert not errors, f"a request failed: {errors[0]!r}"
    for index, answer in enumerate(answers):
        how, label = asked[index % len(asked)], f"stream {index} of {STREAMS}"
        if isinstance(how, dict):
            outside = small_kv.reference.outside_top(prompts[index], answer.token_ids, how["top_k"])
            assert not outside, f"{label}: tokens {outside} are none of the two likeliest"
        else:
            small_kv.reference.check(prompts[index], answer.token_ids, label=label, choice=how)
    after = small_kv.status()
    assert after.rounds.refused_proposals > before.rounds.refused_proposals, "the drafter never ran out of KV"
    assert after.rounds.accepted > before.rounds.accepted
    assert after.target.preemptions > before.target.preemptions, "the target never ran out of KV"
    wait_until_idle(small_kv, within_s=5.0)
