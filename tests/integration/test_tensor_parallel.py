"""Target and drafter each with their own tensor-parallel degree: the tokens are those of transformers, and of one plain
vLLM engine."""

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPTS = [list(b"Two ranks, one answer"), list(b"z"), list(b"Sharded heads see halves of everything. " * 3)]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def plain(plain_vllm):
    """The plain engine's answers."""
    return plain_vllm(PROMPTS, NUM_TOKENS)


def check(deployment, answers=None):
    """answers: what is expected, by prompt; the reference's own by default."""
    accepted = 0
    for prompt, expected in zip(PROMPTS, answers or [None] * len(PROMPTS), strict=True):
        answer = deployment.client.generate(prompt, temperature=0.0, max_tokens=NUM_TOKENS)
        label = f"{deployment.name}, prompt of {len(prompt)}"
        deployment.reference.check(prompt, answer.token_ids, expected, label)
        accepted += answer.metrics.speculative_decoding.num_accepted_draft_tokens
    assert accepted > 0, "nothing was speculated"


def test_two_ranks_each(both_tp2):
    check(both_tp2)
    actors = both_tp2.actors()
    names = ["Verifier", "TargetRank-1", "DrafterRank-0", "DrafterRank-1", "Drafter", "Target", "Ingress"]
    assert set(names) <= actors.keys()
    assert len({actors[name].pid for name in names}) == len(names)
    assert [actors[name].bundles for name in names[:4]] == [{0}, {0}, {1}, {1}], "one bundle for all ranks of a model"


# Each alone takes a deployment of its own. What ranks of a side do does not depend on the other's, and where they sit
# is in tests/unit/test_placement.py and test_cores.py.
@pytest.mark.exhaustive
def test_a_target_of_two_ranks(target_tp2):
    check(target_tp2)
    actors = target_tp2.actors()
    names = ["Verifier", "TargetRank-1", "Drafter", "Target", "Ingress"]
    assert set(names) <= actors.keys()
    assert len({actors[name].pid for name in names}) == len(names)
    assert [actors[name].bundles for name in names[:3]] == [{0}, {0}, {1}], "ranks share a bundle, so a node"


@pytest.mark.exhaustive
def test_a_drafter_of_two_ranks(drafter_tp2):
    check(drafter_tp2)
    actors = drafter_tp2.actors()
    names = ["Verifier", "DrafterRank-0", "DrafterRank-1", "Drafter", "Target", "Ingress"]
    assert set(names) <= actors.keys()
    assert "TargetRank-1" not in actors
    assert len({actors[name].pid for name in names}) == len(names)
    assert [actors[name].bundles for name in names[:3]] == [{0}, {1}, {1}], "ranks share a bundle, so a node"


@pytest.mark.exhaustive
def test_a_target_of_two_ranks_against_plain_vllm(target_tp2, plain):
    check(target_tp2, plain)


@pytest.mark.exhaustive
def test_a_drafter_of_two_ranks_against_plain_vllm(drafter_tp2, plain):
    check(drafter_tp2, plain)


def check_drawn(deployment):
    """vllm#17498: ranks that draw for themselves disagree, and attend to different texts from then on. Tokens outside
    the two likeliest, by another implementation's count, would show it."""
    prompt = PROMPTS[0]
    answer = deployment.client.generate(
        prompt, temperature=1.5, top_k=2, max_tokens=NUM_TOKENS, ignore_eos=True, verification="rejection"
    )
    assert answer.metrics.speculative_decoding.num_draft_tokens > 0
    assert not deployment.reference.outside_top(prompt, answer.token_ids, 2)
    assert deployment.reference.outside_top(prompt, answer.token_ids, 1), "nothing was drawn"


def test_ranks_of_both_sides_agree_on_every_drawn_token(both_tp2):
    check_drawn(both_tp2)


@pytest.mark.exhaustive
def test_two_ranks_of_the_target_agree_on_every_drawn_token(target_tp2):
    check_drawn(target_tp2)


@pytest.mark.exhaustive
def test_two_ranks_of_the_drafter_agree_on_every_drawn_token(drafter_tp2):
    check_drawn(drafter_tp2)
