"""A real pair: target and draft model in actors of their own, proposals over the link, answers over gRPC."""

import os

import psutil
import pytest

from outrider.v1 import generation_pb2 as pb
from tests.support.cluster.serving import K, drafted, num_accepted, num_draft_tokens

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPTS = [b"Hello world, this is", b"a", b"The quick brown fox jumps over the lazy dog. " * 5]
NUM_TOKENS = 96
BLOCK = 128
"""Tokens in a KV block on CPU: what is cached is a multiple of it."""


@pytest.fixture(scope="module")
def answers():
    """Return greedy answers by prompt, made once."""
    return {}


@pytest.fixture
def greedy(pair, answers):
    def ask(prompt):
        if prompt not in answers:
            answers[prompt] = drafted(
                lambda: pair.client.generate(list(prompt), temperature=0.0, max_tokens=NUM_TOKENS), num_accepted
            )
        return answers[prompt]

    return ask


@pytest.mark.parametrize("prompt", PROMPTS)
def test_acceptance_is_counted_consistently(greedy, prompt):
    answer = greedy(prompt)
    assert answer.text == bytes(answer.token_ids).decode()
    assert answer.finish_reason == pb.FINISH_REASON_LENGTH
    speculative, usage = answer.metrics.speculative_decoding, answer.usage
    histogram = list(speculative.acceptance_histogram)
    assert len(histogram) == K + 1
    assert sum(histogram) == speculative.num_spec_steps
    assert sum(j * count for j, count in enumerate(histogram)) == speculative.num_accepted_draft_tokens
    assert 0 < speculative.num_accepted_draft_tokens < speculative.num_draft_tokens, "the pair agrees often, not always"
    assert speculative.num_draft_tokens <= K * speculative.num_spec_steps
    accepted, drafted, steps = (
        speculative.num_accepted_draft_tokens,
        speculative.num_draft_tokens,
        speculative.num_spec_steps,
    )
    assert speculative.draft_acceptance_rate == pytest.approx(accepted / drafted)
    assert speculative.mean_acceptance_length == pytest.approx(1 + accepted / steps)
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), NUM_TOKENS)
    assert usage.total_tokens == len(prompt) + NUM_TOKENS


def test_a_prompt_that_the_target_has_cached_is_read_by_the_drafter_all_the_same(pair):
    """Known to go wrong elsewhere: the drafter gets what the target computes, and acceptance falls to what a text
    without its beginning is worth, a tenth of it here."""
    prompt = [(position * 3) % 250 for position in range(2 * BLOCK + 44)]
    first, again = (
        drafted(lambda: pair.client.generate(prompt, temperature=0.0, max_tokens=2 * NUM_TOKENS, ignore_eos=True))
        for _ in range(2)
    )
    assert again.usage.cached_tokens == 2 * BLOCK
    before, after = (each.metrics.speculative_decoding.draft_acceptance_rate for each in (first, again))
    print(f"accepted {before:.3f} of what was drafted, {after:.3f} after a hit of the prefix cache")
    assert before > 0.2
    assert after > 0.75 * before, "the drafter has not read what was cached"


def test_every_actor_is_a_process_of_its_own_on_the_bundle_planned_for_it(pair):
    actors = pair.actors()
    assert {"Ingress", "Target", "Verifier", "Drafter"} <= actors.keys()
    pids = [actors[name].pid for name in ("Ingress", "Target", "Verifier", "Drafter")]
    assert len(set(pids)) == 4
    placement = pair.plan.placement
    assert actors["Target"].bundles == {0}
    assert actors["Verifier"].bundles == set(placement.target_bundle_indices)
    assert actors["Drafter"].bundles == set(placement.drafter_bundle_indices)


def test_the_threads_that_compute_are_bound_to_their_cores(pair):
    actors, cores = pair.actors(), pair.plan.cores
    for name, expected in (("Verifier", cores.target[0]), ("Drafter", cores.drafter[0])):
        threads = psutil.Process(actors[name].pid).threads()
        busiest = max(threads, key=lambda thread: thread.user_time)
        assert os.sched_getaffinity(busiest.id) == set(expected), name


@pytest.mark.parametrize(
    ("verification", "limit"), [("rejection", 3072), ("block", 3072), ("coupled", 256), ("greedy", 256)]
)
def test_a_proposal_takes_little_room_on_the_link(pair, verification, limit):
    """Bytes each at K=5, frame header included: top-64 q, or ids alone."""
    how = {"temperature": 0.0} if verification == "greedy" else {"temperature": 1.0, "verification": verification}
    pair.linked()
    before = pair.status().rounds
    answers = []

    def ask():
        answers.append(pair.client.generate(list(PROMPTS[2]), max_tokens=NUM_TOKENS, num_speculative_tokens=5, **how))
        return answers[-1]

    drafted(ask)
    after = pair.status().rounds
    count = after.proposals - before.proposals
    num_bytes = after.proposal_bytes - before.proposal_bytes
    size = num_bytes / count
    print(f"{verification}: {size:.0f} bytes each of {count} proposals")
    assert count >= sum(answer.metrics.speculative_decoding.num_spec_steps for answer in answers) > 0
    assert size <= limit
    a_draft = num_bytes / sum(map(num_draft_tokens, answers))
    assert (a_draft > 512) == (verification in ("rejection", "block")), "64 ids and probabilities each"
