"""Greedy and coupled answers are the same tokens whatever drafts there are: none, few, many, good, poor.

Every answer is compared with another implementation's (transformers, with the noise's definition), so it is also the
right one, and a sampler that ignored its seed or its constraints would not pass. That the tokens stay the same when the
drafter dies is in tests/faults/test_drafter.py.
"""

import random
import threading

import pytest

from tests.support.cluster.serving import (
    HANG_GUARD_S,
    WIDE_VOCAB_SIZE,
    Deployment,
    drafted,
    num_accepted,
    num_draft_tokens,
    wait_until,
)
from tests.support.models.reference import GREEDY, Coupled
from tests.support.models.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NUM_TOKENS = 64
CHOICES = {"greedy": GREEDY, "T=1": Coupled(seed=11), "T=0.7, top_p=0.95": Coupled(-12, temperature=0.7, top_p=0.95)}
TEXT = b"It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
PROMPTS = [b"Hello world, this is", b"a", TEXT]
OFF = {"speculation": False}


def options(choice, **changes):
    return {**choice.options(), "max_tokens": NUM_TOKENS, "ignore_eos": True, **changes}


def check(deployment: Deployment, prompt, choice, label, must_accept=False, **changes):
    """Check one answer, and return how many of its drafts were accepted.

    must_accept: ask until some are; every answer is checked.
    """

    def ask():
        answer = deployment.client.generate(list(prompt), **options(choice, **changes))
        assert len(answer.token_ids) == NUM_TOKENS
        deployment.reference.check(prompt, answer.token_ids, label=label, choice=choice)
        return answer

    return num_accepted(drafted(ask, num_accepted) if must_accept else ask())


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("k", [*(pytest.param(k, marks=pytest.mark.exhaustive) for k in (0, 1, 4)), 8])
def test_with_a_draft_model(pair, name, k):
    """test_in_a_batch_of_sixteen_with_others_coming_and_going has every K from 1 to 8."""
    speculation = {"num_speculative_tokens": k} if k else OFF
    for prompt in PROMPTS:
        accepted = check(pair, prompt, CHOICES[name], f"{name}, K={k}", must_accept=k > 0, **speculation)
        assert (accepted > 0) == (k > 0)


SWEPT = [
    *[(method, name) for method in ("several", "stages", "one_pass", "paths") for name in CHOICES],
    *[(method, "T=0.7, top_p=0.95") for method in ("ngram_pair", "two_replicas", "both_tp2")],
    ("target_tp2", "greedy"),
    ("drafter_tp2", "T=1"),
    ("no_drafter", "T=0.7, top_p=0.95"),
    ("co_located", "greedy"),
]
"""Deployments beside the pair, and choices: which tokens a drafter proposes and how they are chosen do not meet."""

DRAFTS_LITTLE = {"ngram_pair", "no_drafter"}
"""Deployments that may accept nothing for these prompts."""


@pytest.mark.parametrize(("deployment", "name"), SWEPT, indirect=["deployment"])
def test_with_each_kind_of_drafter(deployment, name):
    """Suffix drafters find the answers to earlier requests, so they accept drafts from the second time on."""
    choice, accepted = CHOICES[name], 0
    assert (deployment.status().num_speculative_tokens == 0) == (deployment.name == "no_drafter")
    for prompt in PROMPTS:
        accepted += check(deployment, prompt, choice, f"{name}, {deployment.name}")
        if deployment.name != "co_located":  # which refuses to be turned off for one request
            assert check(deployment, prompt, choice, f"{name}, {deployment.name}, off", **OFF) == 0

    def some_accepted():
        return sum(check(deployment, prompt, choice, f"{name}, {deployment.name}, again") for prompt in PROMPTS) > 0

    if deployment.name not in DRAFTS_LITTLE and not accepted:
        wait_until(some_accepted, HANG_GUARD_S, "accepted drafts")


PLAIN_PROMPTS = [list(b"Two ranks, one answer"), list(b"z"), list(b"Sharded heads see halves of everything. " * 3)]
NUM_PLAIN_TOKENS = 24


@pytest.fixture(scope="module")
def plain(plain_vllm):
    """Greedy answers of one plain vLLM engine to PLAIN_PROMPTS."""
    return plain_vllm(PLAIN_PROMPTS, NUM_PLAIN_TOKENS)


def check_against(deployment, expected):
    """Compare greedy answers with those of another engine, by prompt, and require accepted drafts."""
    accepted = 0
    for prompt, tokens in zip(PLAIN_PROMPTS, expected, strict=True):
        answer = deployment.client.generate(prompt, temperature=0.0, max_tokens=NUM_PLAIN_TOKENS)
        deployment.reference.check(prompt, answer.token_ids, tokens, deployment.name)
        accepted += num_accepted(answer)
    assert accepted > 0, "nothing was speculated"


@pytest.mark.exhaustive
@pytest.mark.parametrize("deployment", ["pair", "both_tp2", "target_tp2", "drafter_tp2", "stages"], indirect=True)
def test_against_plain_vllm(deployment, plain):
    check_against(deployment, plain)


@pytest.mark.parametrize("deployment", ["both_tp2", "target_tp2", "drafter_tp2"], indirect=True)
def test_ranks_agree_on_every_drawn_token(deployment):
    """vllm#17498: ranks that draw for themselves disagree, and attend to different texts from then on. Tokens outside
    the two likeliest, by another implementation's count, would show it."""
    prompt, how = list(PROMPTS[0]), {"temperature": 1.5, "top_k": 2, "verification": "rejection"}
    answer = deployment.client.generate(prompt, max_tokens=24, ignore_eos=True, **how)
    assert num_draft_tokens(answer) > 0
    assert not deployment.reference.outside_top(prompt, answer.token_ids, 2)
    assert deployment.reference.outside_top(prompt, answer.token_ids, 1), "nothing was drawn"


@pytest.mark.parametrize("name", ["T=0.7, top_p=0.95"])
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


@pytest.mark.parametrize("name", CHOICES)
def test_with_a_drafter_that_is_padded_further_than_its_target(wide_drafter, name):
    """What it likes best the target does not have: no proposal names it, or the link would end."""
    for prompt in PROMPTS:
        check(wide_drafter, prompt, CHOICES[name], f"{name}, wide drafter", must_accept=True)
    assert wide_drafter.status().link.reconnects == 0


def test_in_a_batch_of_sixteen_with_others_coming_and_going(pair):
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
