"""The draft model's policy at its limits: long prompts, a full KV cache, long texts, bad logits, many requests."""

import json
from collections import Counter
from importlib import import_module

import pytest
import zmq

from outrider.actors.drafter import load
from outrider.actors.drafter.actor import Drafter
from outrider.actors.drafter.draft_model import DraftModelProposer
from outrider.actors.drafter.load import load_proposer
from outrider.actors.drafter.loop import DraftLoop
from outrider.actors.drafter.vocabulary import VOCABULARY_FILE, DraftVocabulary
from outrider.cluster.config import ConfigError, DraftModelConfig, SpeculationConfig
from outrider.cluster.link import LinkAddress, LinkError, LinkInvitation
from outrider.cluster.link.messages import Commit, ProposalStatus
from tests.unit.drafter.draft_bench import KEY, OTHER, Bench, ids
from tests.unit.drafting_engine import VOCAB, MemoryEngine, lookahead


def test_long_prompts_are_prefilled_in_chunks_and_announced():
    bench = Bench(chunk=16)
    assert bench.open(KEY, range(100)) is None
    ready = [a for a in bench.settle() if a.status is ProposalStatus.READY]
    assert [a.key for a in ready] == [KEY]
    assert max(len(row.token_ids) for plan in bench.engine.plans for row in plan.rows) <= 32
    assert bench.open(OTHER, range(5)).status is ProposalStatus.READY


def test_a_prompt_in_the_prefix_cache_needs_no_prefill():
    bench = Bench(chunk=16)
    bench.engine.cached = 96
    assert bench.open(KEY, range(100)).status is ProposalStatus.READY
    bench.commit(KEY, [5])
    assert ids(bench.settle()[0]) == bench.drafts(KEY)


def test_out_of_kv_is_answered_and_room_brings_drafts_back():
    bench = Bench(num_blocks=8).opened(range(20))  # 32 tokens
    bench.open(OTHER, range(100, 106))
    bench.settle()
    bench.commit(OTHER, [7], k=8)
    answers = bench.settle()
    assert answers
    bench.proposer.close(KEY)
    bench.commit(OTHER, [8], k=8)
    assert ids(bench.settle()[0]) == bench.drafts(OTHER, 8)


@pytest.mark.parametrize("long", [190, 400], ids=["too long beside them", "too long"])
def test_a_prompt_without_room_takes_none_from_the_others(long):
    """There is room for 240 tokens, of which the others have 60 to 180."""
    bench = Bench(num_blocks=60)
    short, big = [(1, number) for number in (1, 2, 3)], (2, 1)
    for key in short:
        bench.open(key, range(50 * key[1], 50 * key[1] + 20))
    bench.settle()
    bench.open(big, range(400, 400 + long))
    for number in range(40):
        told = [answer for key in short for answer in bench.commit(key, [number])] + bench.settle()
        assert {answer.key: ids(answer) for answer in told} == {key: bench.drafts(key) for key in short}
        assert bench.answer(big, [number]).status is ProposalStatus.OUT_OF_KV
    for key in short:
        bench.proposer.close(key)
    assert [told.status for told in bench.settle()] == [ProposalStatus.READY] * (long == 190)
    told = bench.commit(big, [7]) or bench.settle()
    assert told[0].status is (ProposalStatus.OK if long == 190 else ProposalStatus.OUT_OF_KV)


def test_no_two_prompts_are_begun_where_there_is_room_for_one():
    """They are of two links, whose pieces take turns: each would hold what the other lacks."""
    bench = Bench(num_blocks=60)
    for key in (KEY, OTHER):
        bench.open(key, range(200))
    (told,) = bench.settle()
    assert told.status is ProposalStatus.READY
    first, second = (KEY, OTHER) if told.key == KEY else (OTHER, KEY)
    bench.commit(first, [7])
    assert ids(bench.settle()[0]) == bench.drafts(first)
    bench.proposer.close(first)
    (told,) = bench.settle()
    assert (told.key, told.status) == (second, ProposalStatus.READY)


def test_where_texts_grow_beyond_the_room_all_but_one_are_drafted_for():
    bench = Bench(num_blocks=60)
    keys = [(1, number) for number in range(4)]
    for key in keys:
        bench.open(key, range(50 * key[1], 50 * key[1] + 40))
    bench.settle()
    drafted = Counter()
    for number in range(30):  # 280 tokens in the end
        told = [answer for key in keys for answer in bench.commit(key, [number])] + bench.settle()
        for answer in told:
            if answer.status is ProposalStatus.OK:
                assert ids(answer) == bench.drafts(answer.key)
                drafted[answer.key] += 1
    assert sorted(drafted.values())[1:] == [30, 30, 30]
    bench.proposer.close(keys.pop(keys.index(max(keys, key=drafted.get))))
    bench.settle()
    for key in keys:
        bench.commit(key, [7])
    assert [answer.status for answer in bench.settle()] == [ProposalStatus.OK] * 3


def test_one_prompt_may_take_all_the_room_there_is():
    bench = Bench(num_blocks=50)
    bench.open(KEY, range(199))
    assert [told.status for told in bench.settle()] == [ProposalStatus.READY]


def test_side_branches_yield_to_texts():
    bench = Bench(lookahead(max_side_branches=20), num_blocks=14).opened()
    bench.commit(KEY, [999])
    bench.settle()
    assert bench.proposer.usage()["num_side_branches"] > 0
    bench.open(OTHER, range(100, 120))
    bench.settle()
    bench.commit(OTHER, [3])
    assert ids(bench.settle()[0]) == bench.drafts(OTHER)


def test_drafts_end_at_the_longest_text_the_model_takes():
    bench = Bench(max_model_len=16).opened()
    bench.commit(KEY, [1, 2, 3])
    assert ids(bench.settle()[0]) == bench.drafts(KEY, 3)
    bench.commit(KEY, [1, 2])
    assert ids(bench.settle()[0]) == bench.drafts(KEY, 1)
    assert bench.answer(KEY, [1]).status is ProposalStatus.LENGTH
    assert bench.answer(KEY, [1]).status is ProposalStatus.LENGTH
    assert bench.open(OTHER, range(16)) is None
    assert bench.proposer.commit(OTHER, Commit(1, 16, [1], 4, 4))[0].status is ProposalStatus.LENGTH


def test_a_text_that_outgrows_the_model_while_nobody_wants_drafts_is_not_fed_to_it():
    bench = Bench(max_model_len=64).opened()
    for token in range(100):
        assert bench.commit(KEY, [token], k=0) == []
        bench.settle()
    assert bench.answer(KEY, [1]).status is ProposalStatus.LENGTH
    assert not bench.engine.committed


def test_bad_logits_end_the_drafts_and_nothing_else():
    bench = Bench().opened()
    bench.engine.bad_after = 13
    bench.commit(KEY, [1])
    assert ids(bench.settle()[0]) == bench.drafts(KEY, 2)
    bench.engine.bad_after = None
    bench.commit(KEY, [1])
    assert ids(bench.settle()[0]) == bench.drafts(KEY)


def test_the_memory_of_lookahead_is_bounded_and_comes_back():
    bench = Bench(lookahead(max_side_branches=5))
    for index in range(20):
        bench.open((1, index), range(index, index + 30))
    bench.settle()
    for index in range(20):
        bench.commit((1, index), [index])
        bench.settle()
    usage = bench.proposer.usage()
    assert 20 < usage["num_side_branches"] <= 20 * 5
    assert usage["branch_blocks"] <= 20 * 5 * 3
    for index in range(20):
        bench.proposer.close((1, index))
    bench.settle()
    assert bench.proposer.usage() == {
        "num_sequences": 0,
        "num_prefilling": 0,
        "num_side_branches": 0,
        "branch_blocks": 0,
        "kv_cache_usage": 0.0,
    }


def test_no_step_draws_what_the_smallest_linked_target_lacks():
    bench = Bench().opened()
    assert {plan.num_drawable for plan in bench.engine.plans} == {None}
    for size, expected in ((VOCAB + 5, VOCAB + 5), (VOCAB - 3, VOCAB - 3), (VOCAB, VOCAB - 3)):
        bench.engine.plans.clear()
        bench.proposer.limit_vocabulary(size)
        bench.commit(KEY, [999])
        bench.settle()
        assert {plan.num_drawable for plan in bench.engine.plans} == {expected}


class WithHead(MemoryEngine):
    vocab_size, end_token_ids = VOCAB, ()

    def cut_head(self, token_ids): ...


@pytest.fixture(scope="module")
def engine_modules():
    """Imports vLLM, which takes longer than a test may."""
    return import_module("outrider.actors.vllm_adapter.draft_engine")


@pytest.fixture
def loaded(engine_modules, monkeypatch):
    """Loads a proposer over an engine in memory. Returns its cut vocabulary."""
    monkeypatch.setattr(engine_modules, "DraftEngine", lambda *_, **__: WithHead())
    monkeypatch.setattr("outrider.actors.vllm_adapter.engine_args.drafter_vllm_config", lambda *_: None)

    def load_with(num_common=None, model="m", **cut):
        config = DraftModelConfig(method="draft_model", model=str(model), **cut)
        return load_proposer(config, SpeculationConfig(), None, None, num_common)._vocabulary

    return load_with


def test_a_head_is_cut_to_no_more_than_what_both_tokenizers_have(loaded, monkeypatch):
    monkeypatch.setattr(load, "_CUT_VOCAB_SIZE", VOCAB // 2)
    assert loaded().num_slots == VOCAB // 2
    few = loaded(VOCAB // 4)
    assert few.num_slots == few.vocab_size == VOCAB // 4
    with pytest.raises(ConfigError, match=rf"drafter\.draft_vocab_size: {VOCAB // 2}, {VOCAB // 4} are the target's"):
        loaded(VOCAB // 4, draft_vocab_size=VOCAB // 2)
    with pytest.raises(ConfigError, match=rf"{VOCAB + 1}, the model has {VOCAB} tokens"):
        loaded(draft_vocab_size=VOCAB + 1)


def test_a_head_is_cut_to_what_the_drafter_was_trained_on(loaded, monkeypatch, tmp_path):
    monkeypatch.setattr(load, "_MIN_CUT_VOCAB_SIZE", 4)
    (tmp_path / VOCABULARY_FILE).write_text(json.dumps([5, 90, 70, 60, 50]))
    assert loaded(model=tmp_path).token_ids == [5, 50, 60, 70, 90]
    assert loaded(model=tmp_path, draft_vocab_size=6).token_ids == [0, 5, 50, 60, 70, 90]
    assert loaded(60, tmp_path).token_ids == [0, 1, 5, 50], "as few as are served at least"
    assert loaded(model=tmp_path, draft_vocab_size=0) is None
    (tmp_path / VOCABULARY_FILE).write_text("torn")
    with pytest.raises(ConfigError, match=r"drafter\.model: .*draft_vocabulary\.json is not readable"):
        loaded(model=tmp_path)


def invitation(vocab_size, vocabulary=()):
    return LinkInvitation(
        address=LinkAddress("auto", ("tcp://127.0.0.1:1",) * 2, zmq.curve_keypair()[0]),  # nobody listens there
        epoch=1,
        link_deadline_ms=100.0,
        vocab_size=vocab_size,
        num_speculative_tokens=4,
        verifier_id="v",
        vocabulary=vocabulary,
    )


def test_a_link_to_a_target_of_another_size_is_taken_and_its_tokens_alone_are_drawn():
    proposer = DraftModelProposer(MemoryEngine(), 16, lookahead(), vocabulary=DraftVocabulary(VOCAB, 20))
    drafter = Drafter.__new__(Drafter)
    drafter._loop, drafter._app_name, drafter._vocabulary = DraftLoop(proposer), "outrider", ()
    for size in (VOCAB + 128, VOCAB - 128):
        with pytest.raises(LinkError, match="no verifier"):
            drafter.accept_link(invitation(size), 0.1)
    assert (proposer._num_drawable, proposer._vocabulary.vocab_size) == (VOCAB - 128, VOCAB - 128)
    with pytest.raises(ValueError, match=r"drafter\.draft_vocab_size: the target has 19 tokens: 20 slots.*set fewer"):
        drafter.accept_link(invitation(19), 0.1)
    assert proposer._num_drawable == VOCAB - 128


def test_a_target_of_another_tokenizer_is_refused_and_told_why():
    """Where nobody compared the checkpoints before; one that has nothing to compare is linked to."""
    drafter = Drafter.__new__(Drafter)
    drafter._loop, drafter._app_name = DraftLoop(DraftModelProposer(MemoryEngine(), 16, lookahead())), "outrider"
    drafter._vocabulary = ("a", "b", "c")
    with pytest.raises(ValueError, match=r"drafter\.model: its tokenizer is not the target's: 2 of 3 blocks"):
        drafter.accept_link(invitation(VOCAB, ("a", "x", "y")), 0.1)
    for vocabulary in (("a", "b", "c"), ("a", "b", "y"), ()):
        with pytest.raises(LinkError, match="no verifier"):
            drafter.accept_link(invitation(VOCAB, vocabulary), 0.1)
