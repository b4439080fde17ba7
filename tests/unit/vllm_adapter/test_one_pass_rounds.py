"""One-pass drafting by the whole policy over a rank's steps, with real attention over paged KV: each proposal, ids and
q, is that of a fresh pass over the text and masks behind it, whatever was drafted and rejected before."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from outrider.actors.drafter.engine import Draw, Drawn, StepPlan, StepRow
from outrider.actors.vllm_adapter.draft_worker import DraftWorker
from outrider.cluster.link.messages import DraftOrigin, ProposalStatus
from outrider.cluster.modes import Mode
from tests.unit.drafter.draft_bench import KEY, Bench
from tests.unit.drafting_engine import MemoryEngine
from tests.unit.vllm_adapter import test_draft_step
from tests.unit.vllm_adapter.test_draft_step import BLOCK, SAMPLINGS, V, rank_on

MASK, K, PROMPT, LONGEST = V - 1, 4, 5, 50


def rank() -> Any:
    made = rank_on(torch.device("cpu"), cut=None)
    made._mask_id = MASK
    made.model_runner.model.lm_head.weight[MASK] *= 3.0  # often the likeliest
    return made


class RankEngine(MemoryEngine):
    """Keeps account of blocks as MemoryEngine does, and draws by a rank's steps."""

    def __init__(self) -> None:
        super().__init__(num_blocks=300, max_model_len=64, block_size=BLOCK)
        self.rank = rank()

    def run(self, plan: StepPlan) -> list[Drawn | None]:
        super().run(plan)
        return DraftWorker.draft(self.rank, plan)


def fresh(text: list[int], draws: list[Draw]) -> list[Drawn]:
    """What another rank draws, which has seen nothing but the text: masks are tokens of rows of their own."""
    table = [list(range(16 * number, 16 * (number + 1))) for number in range(len(draws))]
    rows = [StepRow([*text, *[MASK] * i], 0, (table[i],), [draw]) for i, draw in enumerate(draws)]
    return [one for (one,) in DraftWorker.draft(rank(), StepPlan(rows))]


def outcome(rng: random.Random, sequence: Any, drafts: list[int]) -> list[int]:
    """What the verifier commits: what the main line or a side branch assumes, or another token."""
    base, kind = sequence.committed_len, rng.randrange(3)
    if kind == 0 and sequence.num_drafted > len(drafts):
        return sequence.main.ids(base, base + len(drafts) + 1)
    if kind == 1 and sequence.sides:
        position, token = rng.choice(sorted(sequence.sides))
        return [*drafts[: position - base], token]
    return [*drafts[: rng.randint(0, len(drafts))], rng.randrange(V - 1)]


@pytest.mark.parametrize("sampling", [s for s in SAMPLINGS if not s.biases], ids=lambda sampling: sampling.mode.name)
def test_each_proposal_is_that_of_a_fresh_pass(monkeypatch: pytest.MonkeyPatch, sampling: Any) -> None:
    monkeypatch.setattr(test_draft_step, "BLOCKS", 301)
    monkeypatch.setattr(test_draft_step, "MOST_TOKENS", 512)
    origins = []
    for seed in range(2):
        rng, bench = random.Random(seed), Bench(kind_of_engine=RankEngine, one_pass=True)
        bench.open(KEY, [rng.randrange(V - 1) for _ in range(PROMPT)], sampling)
        bench.settle()
        sequence, drafts = bench.proposer.sequences[KEY], []
        while len(bench.texts[KEY]) < LONGEST:
            answers = bench.commit(KEY, outcome(rng, sequence, drafts))
            while not answers:
                answers = bench.step()
            (answer,) = answers
            text, start = bench.texts[KEY], len(bench.texts[KEY])
            assert (answer.status, len(answer.token_ids)) == (ProposalStatus.OK, K)
            wanted = fresh(text, [Draw(sampling, start + i, start) for i in range(K)])
            assert answer.token_ids == [one.token for one in wanted], f"{start}, {answer.origin}"
            if sampling.mode is Mode.REJECTION:
                for ids, probs, one in zip(answer.q.ids, answer.q.probs, wanted, strict=True):
                    mine, its = np.zeros(V, np.float32), np.zeros(V, np.float32)
                    mine[ids], its[one.q_ids] = probs, one.q_probs
                    np.testing.assert_allclose(mine, its, atol=1e-4)
                    assert mine[MASK] == 0
            assert MASK not in answer.token_ids
            origins.append(answer.origin)
            drafts = list(answer.token_ids)
            if rng.random() < 0.8:
                bench.settle()
    assert {*origins} == {DraftOrigin.MAIN_LINE, DraftOrigin.SIDE_BRANCH, DraftOrigin.MISS}
