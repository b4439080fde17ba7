"""Links that share a drafter take turns: none is held back by what another has to do, one alone notices nothing."""

import random

import pytest

from outrider.cluster.link.messages import ProposalStatus
from tests.unit.drafter.draft_bench import Bench, ids
from tests.unit.drafter.played_targets import K, PlayedTargets
from tests.unit.drafting_engine import lookahead

STEP_S = 0.006
"""What a step of a draft model of 8B parameters takes."""


def test_a_short_prompt_is_not_held_back_by_another_links_long_ones():
    bench = Bench(chunk=128, num_blocks=4000, max_model_len=2000, block_size=16)
    for request in range(32):
        bench.open((1, request), range(request, request + 1000))
    bench.open((2, 0), range(40))
    answers, now_s = [], 0.0
    while len(answers) < 2 and now_s < 0.05:
        answers += [told for told in bench.step() if told.key == (2, 0)]
        now_s += STEP_S
        if [told.status for told in answers] == [ProposalStatus.READY] and len(bench.texts[2, 0]) == 40:
            assert bench.commit((2, 0), [7]) == []
    ready, drafted = answers
    assert ready.status is ProposalStatus.READY
    assert ids(drafted) == bench.drafts((2, 0))


def test_a_link_with_more_rows_than_a_step_holds_does_not_hold_back_another():
    targets = PlayedTargets(lookahead(max_rows=16))
    for request in range(120):
        targets.open((1, request), [request] * 5, acceptance=0.2)
    for request in range(2):
        targets.open((2, request), [request] * 5)
    targets.run(150)
    alone = PlayedTargets(lookahead(max_rows=16))
    for request in range(2):
        alone.open((2, request), [request] * 5)
    alone.run(150)
    assert max(targets.waits[2]) <= 2 * K
    assert len(targets.waits[2]) >= 0.8 * len(alone.waits[2])
    assert len(targets.waits[1]) > 150


@pytest.mark.parametrize("others", [1, 4])
def test_drafts_are_not_starved_by_another_links_prompts(others):
    def play(num_prompts):
        targets = PlayedTargets()
        for link_id in range(2, 2 + others):
            targets.open((link_id, 0), [link_id, 5, 6])
        targets.run(20)
        for request in range(num_prompts):
            targets.open((1, request), range(request, request + 400))
        before = sum(map(len, targets.waits.values()))
        targets.run(100)
        assert len(targets.ready) <= others + num_prompts / 2, "there is more to prefill"
        return sum(map(len, targets.waits.values())) - before, len(targets.ready) - others

    (alone, _), (shared, ready) = play(0), play(32)
    assert shared >= 0.75 * alone
    assert ready >= 2, "nor are the prompts"


@pytest.mark.parametrize("seed", range(6))
def test_no_step_has_room_for_what_is_left_waiting(seed):
    rng = random.Random(seed)
    limits = lookahead(max_side_branches=rng.choice([0, 4]), max_rows=rng.choice([5, 32]))
    targets = PlayedTargets(limits, rng.choice([20, 64]), seed)
    bench = targets.bench
    for request in range(150):
        if request < 100 and rng.random() < 0.3:
            size = rng.choice([5, 40, 200])
            targets.open((rng.randint(1, 4), request), range(request, request + size), rng.random())
        work = targets.step()
        sequences = bench.proposer.sequences.values()
        if work is None:
            assert not any(s.due and s.can_draft for s in sequences)
            continue
        served = {sequence for sequence, _ in work.targets}
        if all(chain is None for _, chain in work.targets):
            fed = sum(len(row.token_ids) for row in work.plan.rows)
            full = fed == bench.chunk or len(work.plan.rows) == limits.max_rows
            assert full or not any(not s.retired and not s.can_draft for s in sequences)
        else:
            left = [s for s in sequences if s.due and s.can_draft and s not in served and not s.num_drafted]
            assert len(work.plan.rows) == limits.max_rows or not left
    targets.run(400)
    assert set(targets.ready) == set(bench.texts), "nobody waits for ever"
    assert all(max(waits) < 100 for waits in targets.waits.values())


def test_every_step_begins_with_another_link_and_takes_one_row_of_each_in_turn():
    bench = Bench(lookahead(ahead=False, max_rows=3))
    keys = [(link_id, request) for link_id in (1, 2, 3) for request in range(2)]
    for key in keys:
        bench.open(key, [*key, 5])
    bench.settle()
    for key in keys:
        bench.commit(key, [999], k=1)
    served = []
    while (work := bench.proposer.plan()[0]) is not None:
        served.append([sequence.key for sequence, _ in work.targets])
        work.execute()
        bench.proposer.complete(work)
    assert [sorted(link_id for link_id, _ in step) for step in served] == [[1, 2, 3]] * 2
    assert served[0][0][0] != served[1][0][0]


def test_a_link_that_is_alone_is_served_in_the_order_of_its_commits():
    bench = Bench(lookahead(ahead=False, max_rows=2))
    keys = [(1, request) for request in range(5)]
    for key in keys:
        bench.open(key, [*key, 5])
    bench.settle()
    order = [3, 0, 4, 1, 2]
    for request in order:
        bench.commit((1, request), [999], k=1)
    assert [told.key[1] for told in bench.settle()] == order
