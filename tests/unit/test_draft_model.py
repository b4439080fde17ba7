"""The draft model's policy over an engine in memory that fails on every token fed twice, out of place or without KV."""

import random

import numpy as np
import pytest

from actors.drafting.draft_model import _CATCH_UP_TOKENS, DraftModelStrategy
from actors.drafting.draft_plan import Drafted
from actors.drafting.strategy import UnknownSequence
from actors.messages import DraftSampling, MessageError, ProposalStatus, SparseQ
from actors.verification.mode import Mode

VOCAB, BLOCK = 50, 4
KEY, OTHER = (1, 1), (2, 1)
GREEDY = DraftSampling()
SAMPLED = DraftSampling(Mode.REJECTION, temperature=0.8, seed=5, top_n=3, biases=((1, 1.0),))


def next_token(tokens):
    """The model: deterministic in the whole text before."""
    return (sum((i + 1) * token for i, token in enumerate(tokens)) + len(tokens)) % VOCAB


def continuation(tokens, count):
    text = list(tokens)
    for _ in range(count):
        text.append(next_token(text))
    return text[len(tokens) :]


class Rank:
    """What a rank holds of one sequence."""

    def __init__(self, tokens):
        self.tokens, self.num_prompt = list(tokens), len(tokens)
        self.kv = {}


class FakeEngine:
    """DraftEngine's contract, with the checks a GPU would not make."""

    def __init__(self, num_blocks=1000, max_model_len=500, max_num_seqs=8, max_num_batched_tokens=2048):
        self.max_model_len, self.max_num_seqs = max_model_len, max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_blocks, self.free_blocks = num_blocks, num_blocks
        self.committed, self.blocks, self.ranks, self.allocated = {}, {}, {}, set()
        self.cached = 0
        self.plans = []
        self.answer = Drafted
        """Makes a row's answer of its drafts."""

    def start(self, request_id, token_ids):
        assert request_id not in self.committed
        assert len(token_ids) < self.max_model_len
        self.committed[request_id] = list(token_ids)
        # A prefix cache that holds whole blocks, never the last token.
        hit = min(self.cached, (len(token_ids) - 1) // BLOCK * BLOCK)
        self.blocks[request_id] = hit // BLOCK
        self.free_blocks -= hit // BLOCK
        return hit

    def append(self, request_id, token_ids):
        self.committed[request_id] += token_ids
        assert len(self.committed[request_id]) < self.max_model_len

    def allocate(self, request_id, num_computed, num_new, num_lookahead):
        held = self.blocks[request_id]
        needed = max(-(-(num_computed + num_new + num_lookahead) // BLOCK), held)
        if needed - held > self.free_blocks:
            return None
        self.free_blocks -= needed - held
        self.blocks[request_id] = needed
        first = request_id not in self.allocated
        self.allocated.add(request_id)
        return (list(range(0 if first else held, needed)),)

    def finish(self, request_id):
        self.free_blocks += self.blocks.pop(request_id)
        self.allocated.discard(request_id)
        del self.committed[request_id]

    def run(self, plan):
        self.plans.append(plan)
        for request_id in plan.finished:
            del self.ranks[request_id]
        assert len(plan.rows) <= self.max_num_seqs
        assert sum(row.num_scheduled for row in plan.rows) <= self.max_num_batched_tokens
        assert sum(row.num_scheduled for row in plan.rows) <= self.max_num_batched_tokens
        assert len({row.request_id for row in plan.rows}) == len(plan.rows)
        return {row.request_id: self._row(row) for row in plan.rows if self._feed(row).num_drafts}

    def _feed(self, row):
        """The first step of a row: feeds exactly committed tokens whose KV is missing."""
        truth = self.committed[row.request_id]
        if row.start_token_ids is not None:
            assert row.request_id not in self.ranks
            assert row.new_block_ids[0] == list(range(self.blocks[row.request_id])), "a start names all its blocks"
            rank = self.ranks[row.request_id] = Rank(row.start_token_ids)
            rank.kv = dict(enumerate(truth[: row.num_computed]))  # from the prefix cache
        rank = self.ranks[row.request_id]
        if row.rewrite_from is not None:
            assert row.rewrite_from >= rank.num_prompt, "the prompt is never rewritten"
            rank.tokens[row.rewrite_from :] = row.rewrite_token_ids
        assert rank.tokens == truth, "ranks hold exactly the committed tokens when a step starts"
        kept = {position: token for position, token in rank.kv.items() if position < row.num_computed}
        assert kept == dict(enumerate(truth[: row.num_computed])), "KV below num_computed is that of committed tokens"
        rank.kv = kept
        end = row.num_computed + row.num_scheduled
        assert row.num_scheduled >= 1
        if row.num_drafts:
            assert end == len(truth), "a draft starts from all committed tokens"
        else:
            assert end < len(truth), "a prefill chunk leaves the last token, which makes the first draft"
        rank.kv.update(enumerate(truth[row.num_computed : end], row.num_computed))
        self._fits(row, end)
        return row

    def _row(self, row):
        rank = self.ranks[row.request_id]
        drafts = []
        for index in range(row.num_drafts):
            if index:
                rank.kv[len(rank.tokens) - 1] = rank.tokens[-1]
            drafts.append(next_token(rank.tokens))
            rank.tokens.append(drafts[-1])
        self._fits(row, max(rank.kv) + 1)
        assert len(rank.tokens) <= self.max_model_len
        return self.answer(drafts)

    def _fits(self, row, length):
        assert length <= self.blocks[row.request_id] * BLOCK, "KV written beyond the blocks allocated"

    @property
    def kv_cache_usage(self):
        return 1 - self.free_blocks / self.num_blocks


def make(chunk=16, **engine):
    engine = FakeEngine(**engine)
    return DraftModelStrategy(engine, chunk), engine


def prompt(length, seed=0):
    chance = random.Random(seed)
    return [chance.randrange(VOCAB) for _ in range(length)]


def prefill_all(strategy):
    ready = []
    while (done := strategy.prefill()) is not None:
        ready += done
    return ready


def test_a_short_prompt_is_ready_at_once_and_drafted_from_its_last_token():
    strategy, _ = make()
    tokens = prompt(5)
    assert strategy.open(KEY, tokens, 4, GREEDY) is True
    (draft,) = strategy.draft([KEY])
    assert (draft.base_committed_len, draft.token_ids) == (5, continuation(tokens, 4))


def test_a_long_prompt_is_not_ready_until_its_chunks_are_done():
    strategy, engine = make(chunk=16)
    tokens = prompt(100)
    assert strategy.open(KEY, tokens, 4, GREEDY) is False
    assert strategy.usage()["num_prefilling"] == 1
    (draft,) = strategy.draft([KEY])
    assert (draft.status, draft.token_ids) == (ProposalStatus.NOT_READY, [])
    ready = prefill_all(strategy)
    assert [(answer.key, answer.status) for answer in ready] == [(KEY, ProposalStatus.READY)]
    assert max(row.num_scheduled for plan in engine.plans for row in plan.rows) <= 16
    assert strategy.usage()["num_prefilling"] == 0
    assert strategy.draft([KEY])[0].token_ids == continuation(tokens, 4)


def test_commits_during_prefill_are_prefilled_too():
    strategy, _ = make(chunk=16)
    tokens = prompt(60)
    strategy.open(KEY, tokens, 3, GREEDY)
    strategy.prefill()
    strategy.commit(KEY, 60, [1, 2])
    strategy.commit(KEY, 62, [3])
    prefill_all(strategy)
    assert strategy.draft([KEY])[0].token_ids == continuation([*tokens, 1, 2, 3], 3)


def test_a_chunk_is_shared_by_the_oldest_sequences():
    strategy, engine = make(chunk=40)
    strategy.open(KEY, prompt(60), 4, GREEDY)
    strategy.open(OTHER, prompt(60, seed=1), 4, GREEDY)
    strategy.prefill()
    assert [row.num_scheduled for row in engine.plans[-1].rows] == [40]
    strategy.prefill()
    assert [row.num_scheduled for row in engine.plans[-1].rows] == [40]
    assert all(sum(row.num_scheduled for row in plan.rows) <= 40 for plan in engine.plans)


def test_the_prefix_cache_saves_prefill():
    strategy, engine = make()
    engine.cached = 80
    tokens = prompt(100)
    assert strategy.open(KEY, tokens, 4, GREEDY) is True
    assert strategy.draft([KEY])[0].token_ids == continuation(tokens, 4)
    assert engine.plans[0].rows[0].num_scheduled == 20


@pytest.mark.parametrize("seed", range(25))
def test_many_rounds_with_any_outcome_draft_what_the_model_would(seed):
    """Random acceptance, skipped rounds and late answers, several sequences: drafts always continue the real text."""
    chance = random.Random(seed)
    strategy, engine = make(chunk=16)
    texts, drafted = {}, {}
    for index in range(4):
        key = (1 + index % 2, index)
        texts[key], drafted[key] = prompt(chance.randint(1, 70), seed * 10 + index), []
        strategy.open(key, list(texts[key]), chance.randint(1, 5), GREEDY)
    for _ in range(40):
        for key, text in texts.items():
            if chance.random() < 0.3:
                continue  # nothing committed: the next draft may be a repetition
            accepted = drafted[key][: chance.randint(0, len(drafted[key]))] if chance.random() < 0.8 else []
            committed = [*accepted, chance.randrange(VOCAB)]
            strategy.commit(key, len(text), committed)
            text += committed
            drafted[key] = []
        if chance.random() < 0.3:
            strategy.prefill()
        if chance.random() < 0.3:
            continue
        for draft in strategy.draft(list(texts)):
            assert draft.base_committed_len == len(texts[draft.key])
            if draft.status is ProposalStatus.OK:
                expected = continuation(texts[draft.key], len(draft.token_ids))
                assert draft.token_ids == expected
                drafted[draft.key] = draft.token_ids
            else:
                assert draft.status is ProposalStatus.NOT_READY
    prefill_all(strategy)
    assert all(draft.status is ProposalStatus.OK for draft in strategy.draft(list(texts)))
    for key in texts:
        strategy.close(key)
    assert strategy.prefill() is None
    assert (engine.kv_cache_usage, engine.ranks) == (0, {})
    assert strategy.usage()["num_sequences"] == 0


def test_far_behind_is_prefill_again_and_then_ready():
    strategy, _ = make(chunk=16)
    tokens = prompt(10)
    strategy.open(KEY, tokens, 4, GREEDY)
    strategy.draft([KEY])
    late = prompt(_CATCH_UP_TOKENS + 20, seed=3)
    strategy.commit(KEY, 10, late)
    assert strategy.draft([KEY])[0].status is ProposalStatus.NOT_READY
    assert [answer.status for answer in prefill_all(strategy)] == [ProposalStatus.READY]
    assert strategy.draft([KEY])[0].token_ids == continuation([*tokens, *late], 4)


def test_a_few_tokens_behind_are_caught_up_in_the_draft_step():
    strategy, engine = make()
    tokens = prompt(10)
    strategy.open(KEY, tokens, 4, GREEDY)
    strategy.draft([KEY])
    for token in (1, 2, 3):
        strategy.commit(KEY, len(tokens), [token])
        tokens.append(token)
    assert strategy.draft([KEY])[0].token_ids == continuation(tokens, 4)
    assert len(engine.plans) == 2


def test_out_of_kv_is_answered_and_ends_when_another_sequence_goes():
    strategy, _ = make(num_blocks=8)
    first, second = prompt(16), prompt(16, seed=1)
    strategy.open(KEY, list(first), 4, GREEDY)
    strategy.open(OTHER, list(second), 4, GREEDY)
    answers = {draft.key: draft for draft in strategy.draft([KEY, OTHER])}
    assert answers[KEY].status is ProposalStatus.OK
    assert (answers[OTHER].status, answers[OTHER].token_ids) == (ProposalStatus.OUT_OF_KV, [])
    strategy.commit(OTHER, 16, [1])
    strategy.close(KEY)
    assert strategy.draft([OTHER])[0].token_ids == continuation([*second, 1], 4)


def test_prefill_without_kv_waits_and_does_not_spin():
    strategy, engine = make(num_blocks=16, chunk=16)
    strategy.open(KEY, prompt(70), 4, GREEDY)
    strategy.open(OTHER, prompt(70, seed=1), 4, GREEDY)
    ready = prefill_all(strategy)
    assert [answer.key for answer in ready] == [KEY]
    strategy.close(KEY)
    assert [answer.key for answer in prefill_all(strategy)] == [OTHER]
    strategy.close(OTHER)
    assert strategy.prefill() is None
    assert engine.free_blocks == 16


def test_drafts_stop_at_the_drafter_s_own_length():
    strategy, _ = make(max_model_len=12)
    tokens = prompt(10)
    strategy.open(KEY, list(tokens), 4, GREEDY)
    assert strategy.draft([KEY])[0].token_ids == continuation(tokens, 2)
    strategy.commit(KEY, 10, [1, 2])
    (draft,) = strategy.draft([KEY])
    assert (draft.status, draft.token_ids, draft.base_committed_len) == (ProposalStatus.LENGTH, [], 12)


@pytest.mark.parametrize("length", [50, 51, 80])
def test_a_prompt_beyond_the_drafter_s_length_never_reaches_the_engine(length):
    strategy, engine = make(max_model_len=50)
    assert strategy.open(KEY, prompt(length), 4, GREEDY) is False
    assert prefill_all(strategy) == []
    strategy.commit(KEY, length, [1])
    assert strategy.draft([KEY])[0].status is ProposalStatus.LENGTH
    assert (engine.plans, engine.committed) == ([], {})
    assert strategy.usage() == {"num_sequences": 1, "num_prefilling": 0, "kv_cache_usage": 0}
    strategy.close(KEY)
    assert strategy.usage()["num_sequences"] == 0


def test_a_sequence_that_outgrows_the_drafter_frees_its_kv():
    strategy, engine = make(max_model_len=12)
    strategy.open(KEY, prompt(10), 4, GREEDY)
    strategy.draft([KEY])
    assert engine.kv_cache_usage > 0
    strategy.commit(KEY, 10, [1, 2])
    assert engine.kv_cache_usage == 0
    strategy.prefill()
    assert engine.ranks == {}
    strategy.commit(KEY, 12, [3])
    assert strategy.draft([KEY])[0].status is ProposalStatus.LENGTH


def test_a_step_feeds_no_more_tokens_than_the_engine_takes():
    strategy, _ = make(max_num_batched_tokens=20)
    for key in (KEY, OTHER):
        strategy.open(key, prompt(15), 4, GREEDY)
    assert [draft.key for draft in strategy.draft([KEY, OTHER])] == [KEY]
    assert [draft.key for draft in strategy.draft([OTHER])] == [OTHER]


def test_a_batch_holds_no_more_than_the_engine_takes():
    strategy, _ = make(max_num_seqs=2)
    keys = [(1, index) for index in range(5)]
    for key in keys:
        strategy.open(key, prompt(5, seed=key[1]), 4, GREEDY)
    assert [draft.key for draft in strategy.draft(keys)] == keys[:2]
    assert [draft.key for draft in strategy.draft(keys[2:])] == keys[2:4]


def test_opening_again_starts_afresh():
    strategy, _ = make()
    strategy.open(KEY, prompt(5), 4, GREEDY)
    strategy.draft([KEY])
    strategy.open(KEY, [1, 2, 3], 2, GREEDY)
    assert strategy.draft([KEY])[0].token_ids == continuation([1, 2, 3], 2)


def test_unknown_sequences():
    strategy, _ = make()
    with pytest.raises(UnknownSequence):
        strategy.commit(KEY, 5, [1])
    strategy.close(KEY)
    assert strategy.draft([KEY]) == []
    strategy.open(KEY, prompt(5), 4, GREEDY)
    with pytest.raises(UnknownSequence):
        strategy.commit(KEY, 4, [1])


def test_a_sequence_that_outgrows_the_drafter_is_followed_without_its_engine():
    strategy, engine = make(max_model_len=20)
    tokens = prompt(15)
    strategy.open(KEY, list(tokens), 4, GREEDY)
    strategy.draft([KEY])
    for _ in range(10):
        strategy.commit(KEY, len(tokens), [1] * 5)
        tokens += [1] * 5
        (draft,) = strategy.draft([KEY])
        assert (draft.status, draft.base_committed_len) == (ProposalStatus.LENGTH, len(tokens))
        assert strategy.prefill() is None
    assert (engine.kv_cache_usage, engine.ranks) == (0, {})
    strategy.close(KEY)
    assert strategy.usage()["num_sequences"] == 0


def test_no_step_has_more_tokens_than_the_engine_takes():
    strategy, engine = make(max_num_batched_tokens=40, chunk=128)
    keys = [(1, index) for index in range(4)]
    for key in keys:
        strategy.open(key, prompt(25, seed=key[1]), 4, GREEDY)
    assert [draft.key for draft in strategy.draft(keys)] == keys[:1], "25 tokens each: the rest is asked for again"
    strategy.open(OTHER, prompt(200), 4, GREEDY)
    prefill_all(strategy)
    assert max(row.num_scheduled for plan in engine.plans for row in plan.rows) == 40


def test_a_long_prompt_without_kv_does_not_hold_up_a_short_one():
    strategy, _ = make(num_blocks=15, chunk=200)
    strategy.open(KEY, prompt(100), 4, GREEDY)
    strategy.open(OTHER, prompt(40, seed=1), 4, GREEDY)
    assert [answer.key for answer in prefill_all(strategy)] == [OTHER]


def q_of(token_ids):
    """Three ids around each draft, the draft the second."""
    ids = np.array([[token + VOCAB, token, token + 2 * VOCAB] for token in token_ids], np.int32)
    return Drafted(token_ids, ids, np.tile(np.array([[0.5, 0.25, 0.25]], np.float32), (len(token_ids), 1)))


def test_rows_say_how_to_draw_and_answers_carry_q():
    strategy, engine = make()
    engine.answer = q_of
    tokens = prompt(40)
    strategy.open(KEY, list(tokens), 4, SAMPLED)
    prefill_all(strategy)
    for _ in range(2):
        (draft,) = strategy.draft([KEY])
        expected = q_of(continuation(tokens, 4))
        assert draft.token_ids == expected.token_ids
        assert draft.q == SparseQ(expected.q_ids, expected.q_probs)
        strategy.commit(KEY, len(tokens), draft.token_ids[:2])
        tokens += draft.token_ids[:2]
    assert {row.sampling for plan in engine.plans for row in plan.rows} == {SAMPLED}


def test_each_sequence_is_drawn_its_own_way():
    strategy, engine = make()
    strategy.open(KEY, prompt(5), 4, SAMPLED)
    strategy.open(OTHER, prompt(6), 4, GREEDY)
    assert [draft.q for draft in strategy.draft([KEY, OTHER])] == [None, None]
    assert [row.sampling for row in engine.plans[0].rows] == [SAMPLED, GREEDY]


@pytest.mark.parametrize("count", [3, 0])
def test_drafts_that_go_missing_are_an_error(count):
    """A draft that is dropped for what it is would bias rejection."""
    strategy, engine = make()
    engine.answer = lambda ids: Drafted(ids[:count])
    strategy.open(KEY, prompt(5), 4, SAMPLED)
    with pytest.raises(RuntimeError, match="where 4 were to be drawn"):
        strategy.draft([KEY])


def test_a_q_that_is_none_is_an_error():
    strategy, engine = make()
    engine.answer = lambda ids: Drafted(ids, np.zeros((4, 2), np.int32), np.ones((4, 2), np.float32))
    strategy.open(KEY, prompt(5), 4, SAMPLED)
    with pytest.raises(MessageError):
        strategy.draft([KEY])


@pytest.mark.parametrize("count", [3, 1, 0])
def test_bad_logits_end_a_row_and_the_next_round_goes_on(count, caplog):
    strategy, engine = make()
    engine.answer = lambda ids: Drafted(ids[:count], bad_logits=True)
    tokens = prompt(10)
    strategy.open(KEY, list(tokens), 4, GREEDY)
    for _ in range(2):
        (draft,) = strategy.draft([KEY])
        assert (draft.status, draft.token_ids) == (ProposalStatus.OK, continuation(tokens, count))
        committed = [*draft.token_ids, 7]
        strategy.commit(KEY, len(tokens), committed)
        tokens += committed
    assert len(caplog.records) == 1
    engine.answer = Drafted
    assert strategy.draft([KEY])[0].token_ids == continuation(tokens, 4)


def test_a_request_without_drafts_gets_none():
    strategy, engine = make()
    strategy.open(KEY, prompt(10), 0, GREEDY)
    for length in range(10, 60):
        assert strategy.draft([KEY])[0].token_ids == []
        strategy.commit(KEY, length, [1])
        prefill_all(strategy)
    assert all(row.num_drafts == 0 for plan in engine.plans for row in plan.rows)
