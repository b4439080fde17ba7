"""KV blocks: which a side branch takes and copies, which text is fed again, and what is kept free for running texts."""

import pytest

from outrider.actors.drafter.model_sequence import CATCH_UP_TOKENS, DraftChain, SideBranch
from outrider.actors.drafter.planner import BranchBlocks
from outrider.cluster.link.messages import ProposalStatus
from tests.unit.drafter.draft_bench import KEY, OTHER, Bench, ids
from tests.unit.drafting_engine import MemoryEngine, drawn_token, lookahead

SIZE = 4
"""Tokens in a block."""


def allocated(start, end, num_blocks=20, num_own=5):
    """Return a branch from position `start` on, beside a sequence that has the blocks 0 to num_own - 1."""
    engine = MemoryEngine(num_blocks, block_size=SIZE)
    own = (engine.take_blocks(num_own),)
    branches, side = BranchBlocks(engine), SideBranch(DraftChain(start, [1], [None], start), 0.5)
    assert branches.allocate(own, side, end)
    return engine, branches, side, own


@pytest.mark.parametrize(
    ("start", "end", "taken", "copied"),
    [(8, 9, 1, []), (8, 12, 1, []), (8, 13, 2, []), (9, 12, 1, [2]), (11, 13, 2, [2]), (10, 17, 3, [2])],
)
def test_a_branch_takes_the_blocks_that_it_reaches_and_copies_the_one_that_it_starts_in(start, end, taken, copied):
    engine, branches, side, (own,) = allocated(start, end)
    assert branches.num_blocks == taken == engine.num_blocks - len(own) - engine.num_free_blocks
    (table,) = side.blocks
    assert table[: start // SIZE] == own[: start // SIZE]
    assert len(table) == -(-end // SIZE)
    assert not set(table[start // SIZE :]) & set(own)
    assert branches.take_copies() == ([], [(own[block], table[block]) for block in copied])


def test_no_copy_goes_into_blocks_that_were_freed_before_it_was_made():
    """Whoever gets them next would have another text's KV in them."""
    engine, branches, side, _ = allocated(9, 13)
    branches.free(side)
    assert branches.take_copies() == ([], [])
    assert branches.num_blocks == 0
    assert engine.num_free_blocks == 15


def test_a_branch_that_becomes_the_main_line_is_copied_back_as_far_as_it_is_computed():
    engine, branches, side, (own,) = allocated(9, 20)
    branches.take_copies()
    side.chain.num_computed = 13
    private = dict(side.private[0])
    branches.restore((own,), side)
    assert branches.take_copies() == ([(private[2], own[2]), (private[3], own[3])], [])
    assert engine.num_free_blocks == 15


def test_a_branch_without_room_takes_nothing():
    engine = MemoryEngine(3, block_size=SIZE)
    own, branches = (engine.take_blocks(2),), BranchBlocks(engine)
    side = SideBranch(DraftChain(4, [1], [None], 4), 0.5)
    assert not branches.allocate(own, side, 12)
    assert (engine.num_free_blocks, branches.num_blocks, side.blocks) == (1, 0, ())


def test_no_text_takes_the_block_that_a_running_one_goes_on_with():
    bench = Bench(lookahead(ahead=False), num_blocks=20, block_size=SIZE).opened(range(12))
    bench.commit(KEY, [1], k=1)
    bench.settle()
    free = bench.engine.num_free_blocks
    bench.open(OTHER, range(100, 100 + free * SIZE))
    bench.settle()
    assert bench.proposer.usage()["num_prefilling"] == 1, "it would take all that is free"
    for token in range(SIZE):
        bench.commit(KEY, [token], k=1)
        assert ids(bench.settle()[0]) == bench.drafts(KEY, 1)
    bench.proposer.close(KEY)
    assert [told.status for told in bench.settle()] == [ProposalStatus.READY]


@pytest.mark.parametrize("accepted", [0, 1, 2, 4])
def test_what_was_drafted_in_place_of_another_token_is_fed_again(accepted):
    """KV is kept up to the last token that the target and the drafts have in common."""
    bench = Bench(lookahead(max_side_branches=0)).opened()
    bench.commit(KEY, [999])
    drafts = ids(bench.settle()[0])
    base = len(bench.texts[KEY])
    text = bench.texts[KEY] + drafts[:accepted]
    bench.commit(KEY, [*drafts[:accepted], drawn_token(text, rank=7)])
    work, _ = bench.proposer.plan()
    (row,) = work.plan.rows
    assert (row.start, list(row.token_ids)) == (base + accepted, bench.texts[KEY][-1:])


@pytest.mark.parametrize(("behind", "is_step"), [(CATCH_UP_TOKENS, True), (CATCH_UP_TOKENS + 1, False)])
def test_a_text_is_fed_by_a_draft_step_up_to_a_limit_and_prefilled_beyond(behind, is_step):
    bench = Bench(chunk=64).opened()
    told = bench.commit(KEY, [900 + token for token in range(behind)])
    assert [each.status for each in told] == ([] if is_step else [ProposalStatus.NOT_READY])
    work, _ = bench.proposer.plan()
    (row,) = work.plan.rows
    assert (bool(row.draws), len(row.token_ids)) == (is_step, behind if is_step else behind - 1)
