"""A target of two pipeline stages with two ranks each: the tokens of transformers and of one plain vLLM engine, with
drafts and without, out of KV cache, under a grammar, and with the drafter killed; and an end for all when a rank of the
first stage dies.

The first stage embeds drafts and accepted tokens that only the last one chose: a text of its own that is a token short
shows as other tokens, at the latest when a preempted request is computed anew.
"""

import os
import signal
import threading

import pytest

from outrider.deploy.client.sync_client import OutriderError
from tests.reference import GREEDY, Coupled
from tests.serving import HANG_GUARD_S, drafted, num_accepted, num_draft_tokens, wait_until, wait_until_idle
from tests.traffic import Traffic

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NUM_TOKENS = 48
TEXT = b"It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
PROMPTS = [b"Two stages, one answer", b"a", TEXT]
CHOICES = {"greedy": GREEDY, "T=1": Coupled(seed=11), "T=0.7, top_p=0.95": Coupled(-12, temperature=0.7, top_p=0.95)}
STREAMS = 6


def options(choice, **changes):
    return {**choice.options(), "max_tokens": NUM_TOKENS, "ignore_eos": True, **changes}


def test_each_rank_is_an_actor_and_the_verifier_is_the_first_of_the_last_stage(stages):
    actors = stages.actors()
    names = ["TargetRank-0", "TargetRank-1", "Verifier", "TargetRank-3", "Drafter", "Target", "Ingress"]
    assert set(names) <= actors.keys()
    assert "TargetRank-2" not in actors
    assert len({actors[name].pid for name in names}) == len(names)
    assert [actors[name].bundles for name in names[:5]] == [{0}, {0}, {0}, {0}, {1}], "all ranks are on one node"


@pytest.mark.parametrize("name", CHOICES)
def test_answers_are_the_reference_s_with_drafts_and_without(stages, name):
    choice = CHOICES[name]
    for prompt in PROMPTS:
        for speculation in (True, False):

            def ask(prompt=prompt, speculation=speculation):
                answer = stages.client.generate(list(prompt), **options(choice, speculation=speculation))
                stages.reference.check(prompt, answer.token_ids, label=f"{name}, {speculation=}", choice=choice)
                return answer

            answer = drafted(ask, num_accepted) if speculation else ask()
            assert (num_draft_tokens(answer) > 0) == speculation


def test_greedy_answers_are_plain_vllm_s(stages, plain_vllm):
    for prompt, expected in zip(PROMPTS, plain_vllm(PROMPTS, NUM_TOKENS), strict=True):
        answer = stages.client.generate(list(prompt), **options(GREEDY))
        stages.reference.check(prompt, answer.token_ids, expected[: len(answer.token_ids)], label="plain vLLM")


def test_preempted_requests_get_the_tokens_they_would_have_got_alone(stages):
    """Prompts come in pieces too, and a request that gets no room in a step is left out of it."""
    prompts = [bytes([65 + index]) + TEXT * 2 for index in range(STREAMS)]
    choices = [list(CHOICES.values())[index % len(CHOICES)] for index in range(STREAMS)]
    answers, errors = [None] * STREAMS, []

    def ask(index):
        try:
            asked = options(choices[index], max_tokens=300)
            answers[index] = stages.client.generate(list(prompts[index]), **asked)
        except OutriderError as error:
            errors.append(error)

    before = stages.status()
    threads = [threading.Thread(target=ask, args=(index,)) for index in range(STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * HANG_GUARD_S)
    assert not errors, f"a request failed: {errors[0]!r}"
    after = stages.status()
    assert after.target.preemptions > before.target.preemptions, "the target never ran out of KV"
    assert after.rounds.accepted > before.rounds.accepted
    for index, answer in enumerate(answers):
        assert len(answer.token_ids) == 300
        stages.reference.check(prompts[index], answer.token_ids, label=f"stream {index}", choice=choices[index])
    wait_until_idle(stages, HANG_GUARD_S)


def test_a_grammar_holds_and_its_drafts_do_too(stages):
    answers = {
        speculation: stages.client.generate(
            list(TEXT), temperature=1.0, seed=5, max_tokens=24, regex=r"[a-c]{6}-[0-9]{4}", speculation=speculation
        ).text
        for speculation in (True, False)
    }
    assert answers[True] == answers[False]
    assert len(answers[True]) == 11


def test_the_drafter_is_killed(stages):
    epoch = stages.linked().epoch
    with Traffic(stages, list(PROMPTS[0]), 150) as traffic:
        stages.signal_drafter(signal.SIGKILL)
        stages.linked(epoch_after=epoch)
    assert traffic.answers
    assert not traffic.errors
    drafted(lambda: stages.client.generate(list(PROMPTS[0]), **options(GREEDY)), num_accepted)


def test_a_rank_of_the_first_stage_that_dies_ends_the_replica_and_another_comes(stages):
    """The last: the deployment is not the same afterwards."""
    before = stages.actors()
    errors = []

    def ask():
        try:
            stages.client.generate(list(TEXT), **options(GREEDY, max_tokens=800))
        except OutriderError as error:
            errors.append(error)

    running = threading.Thread(target=ask)
    running.start()
    wait_until(lambda: stages.status().target.running, HANG_GUARD_S, "a running request")
    os.kill(before["TargetRank-1"].pid, signal.SIGKILL)
    running.join(HANG_GUARD_S)
    assert not running.is_alive(), "the request hangs"
    assert errors, "its stage was gone"

    def anew():
        now = stages.actors()
        return now.get("Verifier", before["Verifier"]).pid != before["Verifier"].pid

    wait_until(anew, 2 * HANG_GUARD_S, "another replica", every_s=0.5)

    def answers():
        try:
            return stages.client.generate(list(PROMPTS[0]), **options(GREEDY))
        except OutriderError:
            return None

    answer = wait_until(answers, 2 * HANG_GUARD_S, "an answer", every_s=1.0)
    stages.reference.check(PROMPTS[0], answer.token_ids, label="another replica")
