"""Counts the KV blocks that a drafter's sequence lacks, as vLLM's KV cache manager counts them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

from outrider.actors.vllm_adapter.draft_engine import DraftEngine
from outrider.cluster.link.messages import DraftSampling
from tests.unit.vllm_adapter.book import BLOCK_SIZE, ahead_config, make_scheduler

BLOCKS = 30


@pytest.fixture
def engine(tmp_path):
    """Without a model."""
    init_none_hash(sha256)
    config = ahead_config(tmp_path, engine_args={"enable_prefix_caching": True})
    engine = DraftEngine.__new__(DraftEngine)
    engine._kv = make_scheduler(config, BLOCKS).kv_cache_manager
    engine._core = SimpleNamespace(request_block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256))
    engine._requests, engine._taken, engine._weights_changes = {}, {}, 0
    return engine


def start(engine, name, token_ids):
    return engine.start(name, token_ids, DraftSampling())


def test_it_lacks_what_its_text_needs_and_has_not(engine):
    free = engine.num_free_blocks
    assert start(engine, "a", list(range(30))) == 0
    assert engine.missing("a") == 8
    assert engine.allocate("a", 0, 12, 0)
    assert (engine.missing("a"), engine.num_free_blocks) == (5, free - 3)
    assert engine.allocate("a", 12, 18, 0)
    assert (engine.missing("a"), engine.num_free_blocks) == (0, free - 8)
    engine.append("a", [5] * 6)
    assert engine.missing("a") == 1
    engine.finish("a")
    assert engine.num_free_blocks == free


def test_one_that_gives_back_what_it_has_is_read_again_or_ends(engine):
    free = engine.num_free_blocks
    start(engine, "a", list(range(30)))
    assert engine.allocate("a", 0, 12, 0)
    assert engine.allocate("a", 12, 18, 6)
    engine.give_back("a")
    assert (engine.missing("a"), engine.num_free_blocks) == (8, free)
    assert engine._requests["a"].num_computed_tokens == 0, "by which vLLM counts what a sliding window lacks"
    assert engine.allocate("a", 0, 30, 0)
    assert (engine.missing("a"), len(engine.block_ids("a")[0])) == (0, 8)
    engine.give_back("a")
    engine.finish("a")
    assert engine.num_free_blocks == free


def test_it_does_not_lack_what_the_prefix_cache_has(engine):
    start(engine, "a", list(range(30)))
    assert engine.allocate("a", 0, 30, 0)
    free = engine.num_free_blocks
    assert start(engine, "b", [*range(22), 99, 98]) == 20
    assert engine.missing("b") == 1
    assert engine.num_free_blocks == free, "they are shared"
