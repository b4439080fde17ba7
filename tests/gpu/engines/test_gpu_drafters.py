"""Draft models of every kind, and how many of their drafts are accepted: as many as where vLLM drafts with the same
model in the target's process.

Tiny random weights by default. OUTRIDER_GPU_PAIRS, JSON, names real ones: `{"dense": ["target", "drafter"]}`.
"""

import json
import os

import pytest

pytest.importorskip("ray")
pytest.importorskip("grpc")

from tests.gpu.engines.deployments import SIDES, pair_of_kind
from tests.support.models.plain_engine import drafted_and_accepted
from tests.support.models.tiny_kinds import build_tiny_mla, build_tiny_moe

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800), pytest.mark.gpus(2)]

PROMPTS = [
    b"Hello world, this is",
    b"one two one two one two one two",
    b"Sharded heads see halves. " * 3,
    b"The end of it",
]
NUM_TOKENS, K = 128, 3
TOLERANCE = 0.1
"""How far a share of accepted drafts may be off: late rounds are drafted for again, by either side, elsewhere."""


@pytest.fixture(scope="module")
def pairs(models, tmp_path_factory):
    """Target and drafter by kind."""
    root = tmp_path_factory.mktemp("kinds")
    named = {kind: tuple(pair) for kind, pair in json.loads(os.environ.get("OUTRIDER_GPU_PAIRS", "{}")).items()}

    def pair(kind):
        if kind in named:
            return named[kind]
        if kind in ("moe", "mla"):
            build = {"moe": build_tiny_moe, "mla": build_tiny_mla}[kind]
            target = build(root / kind)
            return target, build(root / f"{kind}-drafter", noise_of=target, noise=0.03)
        return models.target, models.drafter

    return pair


@pytest.mark.parametrize("kind", [*list(SIDES)[:-1], pytest.param("tp2", marks=pytest.mark.gpus(3))])
def test_acceptance_is_that_of_vllm_s_own_drafting(pairs, added, kind):
    target, drafter = pairs(kind)
    sections = pair_of_kind(kind, target, drafter, K)
    served = added(kind, **sections)
    drafted = accepted = 0
    for prompt in PROMPTS:
        answer = served.client.generate(list(prompt), temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        counted = answer.metrics.speculative_decoding
        drafted, accepted = drafted + counted.num_draft_tokens, accepted + counted.num_accepted_draft_tokens
    assert drafted > 0
    arguments = {**sections["target"], **sections["target"]["engine_args"]}
    for name in ("model", "engine_args"):
        del arguments[name]
    own = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": K}
    own |= SIDES[kind].get("engine_args", {})
    of_vllm, accepted_by_vllm = drafted_and_accepted(target, PROMPTS, NUM_TOKENS, **arguments, speculative_config=own)
    ours, theirs = accepted / drafted, accepted_by_vllm / of_vllm
    print(f"{kind}: {ours:.3f} of {drafted} drafts accepted, in process {theirs:.3f} of {of_vllm}")
    assert ours == pytest.approx(theirs, abs=TOLERANCE)
