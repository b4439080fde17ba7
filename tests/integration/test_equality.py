"""Greedy and coupled answers are the same tokens whatever drafts there are: none, few, many, good, poor.

Every answer is compared with another implementation's (transformers, with the noise's definition), so it is also the
right one, and a sampler that ignored its seed or its constraints would not pass.
"""

import random
import threading

import pytest

from tests.reference import GREEDY, Coupled
from tests.serving import HANG_GUARD_S, WIDE_VOCAB_SIZE, Deployment, drafted, num_accepted
from tests.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NUM_TOKENS = 64
CHOICES = {"greedy": GREEDY, "T=1": Coupled(seed=11), "T=0.7, top_p=0.95": Coupled(-12, temperature=0.7, top_p=0.95)}
TEXT = b"It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
PROMPTS = [b"Hello world, this is", b"a", TEXT]


def options(choice, **changes):
    return {**choice.options(), "max_tokens": NUM_TOKENS, "ignore_eos": True, **changes}


def check(deployment: Deployment, prompt, choice, label, must_accept=False, **changes):
    """Returns how many drafts were accepted. must_accept: ask until some are; every answer is checked."""

    def ask():
        answer = deployment.client.generate(list(prompt), **options(choice, **changes))
        assert len(answer.token_ids) == NUM_TOKENS
        deployment.reference.check(prompt, answer.token_ids, label=label, choice=choice)
        return answer

    return num_accepted(drafted(ask, num_accepted) if must_accept else ask())


# The batch below has every K from 1 to 8.
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("k", [*(pytest.param(k, marks=pytest.mark.exhaustive) for k in (0, 1, 4)), 8])
def test_with_a_draft_model(pair, name, k):
    speculation = {"num_speculative_tokens": k} if k else {"speculation": False}
    for prompt in PROMPTS:
        accepted = check(pair, prompt, CHOICES[name], f"{name}, K={k}", must_accept=k > 0, **speculation)
        assert (accepted > 0) == (k > 0)


ONE_OF_CHOICES = [
    name if "top_p" in name else pytest.param(name, marks=pytest.mark.exhaustive) for name in CHOICES
]  # fmt: skip
"""For drafters whose choices and drafts do not meet: the first test above has all of them."""


@pytest.mark.parametrize("name", ONE_OF_CHOICES)
def test_with_a_target_that_is_padded_further_than_its_drafter(wide_target, name):
    """Prompts and answers have ids that the drafter lacks; it drafts on, and never proposes one."""
    prompts = [*PROMPTS, [*TEXT, VOCAB_SIZE + 3, *b" wisdom", WIDE_VOCAB_SIZE - 1]]
    drafted(lambda: [check(wide_target, prompt, CHOICES[name], f"{name}, wide target") for prompt in prompts], sum)
    lacking = [VOCAB_SIZE + 1, VOCAB_SIZE + 2]
    for allowed in (lacking, [*lacking, *b"abcdef"]):
        answer = wide_target.client.generate(
            list(TEXT), **options(CHOICES[name], max_tokens=16), allowed_token_ids=allowed
        )
        assert set(answer.token_ids) <= set(allowed)
    assert wide_target.status().link.reconnects == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CHOICES)
def test_with_a_drafter_that_is_padded_further_than_its_target(wide_drafter, name):
    """What it likes best the target does not have: no proposal names it, or the link would end."""
    for prompt in PROMPTS:
        check(wide_drafter, prompt, CHOICES[name], f"{name}, wide drafter", must_accept=True)
    assert wide_drafter.status().link.reconnects == 0


@pytest.mark.parametrize("name", ONE_OF_CHOICES)
def test_with_an_ngram_drafter(ngram_pair, name):
    for prompt in PROMPTS:
        check(ngram_pair, prompt, CHOICES[name], f"{name}, ngram")


# A deployment of its own. K = 0 above takes the same way to the same tokens; one without a drafter actor is co_located.
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CHOICES)
def test_without_a_drafter(no_drafter, name):
    for prompt in PROMPTS:
        check(no_drafter, prompt, CHOICES[name], f"{name}, no drafter")
    assert no_drafter.status().num_speculative_tokens == 0


@pytest.mark.parametrize("name", ONE_OF_CHOICES)
def test_with_ranks_on_both_sides(both_tp2, name):
    check(both_tp2, PROMPTS[0], CHOICES[name], f"{name}, two ranks each", must_accept=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CHOICES)
def test_with_ranks(target_tp2, name):
    check(target_tp2, PROMPTS[0], CHOICES[name], f"{name}, two ranks")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CHOICES)
def test_with_a_drafter_of_ranks(drafter_tp2, name):
    check(drafter_tp2, PROMPTS[0], CHOICES[name], f"{name}, drafter of two ranks", must_accept=True)


def test_in_a_batch_of_sixteen_with_others_coming_and_going(pair):
    check_batch_of_sixteen(pair)


def check_batch_of_sixteen(pair):
    """Four of each choice and seed, beside unseeded requests of every kind that start and stop all the while."""
    chosen = [*CHOICES.values(), Coupled(seed=99, temperature=1.3)]
    prompts = [bytes([65 + i]) + TEXT[: 4 + 6 * i] for i in range(16)]
    answers = [None] * 16
    stopping = threading.Event()
    errors = []

    def ask(index):
        try:
            changes = {"num_speculative_tokens": 1 + index % 8} if index % 5 else {"speculation": False}
            answers[index] = pair.client.generate(list(prompts[index]), **options(chosen[index % 4], **changes))
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)

    def come_and_go(number):
        rng = random.Random(number)
        try:
            while not stopping.is_set():
                with pair.client.stream(
                    list(TEXT[: rng.randrange(1, 100)]),
                    temperature=rng.choice([0.0, 0.6, 1.0]),
                    top_k=rng.choice([0, 5]),
                    max_tokens=rng.randrange(1, 40),
                    verification=rng.choice(["rejection", "block", "coupled"]),
                ) as stream:
                    for taken, _ in enumerate(stream):
                        if taken == 6 and rng.random() < 0.3:
                            break
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)

    crowd = [threading.Thread(target=come_and_go, args=(number,)) for number in range(4)]
    asking = [threading.Thread(target=ask, args=(index,)) for index in range(16)]
    for thread in [*crowd, *asking]:
        thread.start()
    for thread in asking:
        thread.join(HANG_GUARD_S * 2)
    stopping.set()
    for thread in crowd:
        thread.join(HANG_GUARD_S)
    assert not errors, f"a request failed: {errors[0]!r}"
    for index, answer in enumerate(answers):
        assert answer is not None, f"request {index} never ended"
        pair.reference.check(prompts[index], answer.token_ids, label=f"{index} of 16", choice=chosen[index % 4])
    print(f"near-ties so far: {len(pair.reference.ties)}")


def test_two_requests_with_one_seed_and_one_prompt_are_twins_and_other_seeds_are_not(pair):
    same = [pair.client.generate(list(PROMPTS[0]), **options(Coupled(seed=5))).token_ids for _ in range(2)]
    other = pair.client.generate(list(PROMPTS[0]), **options(Coupled(seed=6))).token_ids
    unseeded = [pair.client.generate(list(PROMPTS[0]), temperature=1.0, max_tokens=NUM_TOKENS).token_ids for _ in "ab"]
    assert same[0] == same[1]
    assert same[0] != other
    assert unseeded[0] != unseeded[1]
