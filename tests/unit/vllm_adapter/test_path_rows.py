"""Path rows on vLLM's scheduler and runner: each row reads its text from its KV blocks, so a block that is wrong, not
copied or another request's changes the answer."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request
from vllm.v1.worker import utils

from outrider.actors.round import request as request_module
from outrider.actors.vllm_adapter.path_rows import reserve_blocks
from outrider.cluster.config import SpeculationConfig
from tests.unit.vllm_adapter.book import BLOCK_SIZE, MAX_MODEL_LEN, K, ahead_config, kv_cache, make_scheduler, serve
from tests.unit.vllm_adapter.device_rank import DeviceRank, Group, Linked, Ranks, context, grouped, make_ranks
from tests.unit.vllm_adapter.test_device_faults import DRAFT, TARGET, Troubled, ask, by, check_distribution

pytestmark = pytest.mark.timeout(300)

PATHS = 4
SPECULATION = SpeculationConfig(num_speculative_tokens=K, num_paths=PATHS)


class PathRank(DeviceRank):
    """Writes the tokens of a step to the blocks of its rows, then reads every row's text from them."""

    def allocate(self, blocks: int) -> None:
        self.kv_cache_config = kv_cache(blocks)
        self.kv_caches = [torch.full((blocks, BLOCK_SIZE), -1)]
        self.max_num_reqs, self.max_num_tokens = self.input_batch.max_num_reqs, 512
        self.reorder_batch_threshold = None
        self.enable_path_rows(SPECULATION)

    def _rows(self, scheduled: SchedulerOutput) -> Iterator[list[int]]:
        contexts = list(super()._rows(scheduled))
        batch, kv, slots = self.input_batch, self.kv_caches[0].view(-1).numpy(), []
        for index, request_id in enumerate(batch.req_ids):
            start = int(batch.num_computed_tokens_cpu[index])
            positions = np.arange(start + scheduled.num_scheduled_tokens[request_id])
            blocks = batch.block_table[0].block_table.np[index]
            slots.append(blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)
            kv[slots[-1][start:]] = batch.token_ids_cpu[index, positions[start:]]
        for of_row, each in zip(slots, contexts, strict=True):
            text = kv[of_row].tolist()
            yield [context(text[:length]) for length in range(len(text) + 1 - len(each), len(text) + 1)]


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    init_none_hash(sha256)
    engine_args = {"enable_prefix_caching": True}
    return ahead_config(tmp_path_factory.mktemp("models"), PATHS, engine_args=engine_args)


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "async_tensor_h2d", lambda data, device: torch.as_tensor(data))


def requests(chance: random.Random, count: int) -> list[Request]:
    """Greedy and coupled ones, some with rules that read their output, a third with the prompt of an earlier one."""
    asked: list[Request] = []
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    for number in range(count):
        changes: dict[str, Any] = {} if number % 2 else {"repetition_penalty": 1.2, "bad_words": [[20], [50, 51]]}
        prompt = [chance.randrange(10, 90) for _ in range(chance.choice([4, 7, 8, 20, 40, MAX_MODEL_LEN - 4]))]
        if number % 3 == 2:
            prompt = list(asked[-1].prompt_token_ids or ())
        seeded = {"seed": number, **by("coupled")} if number % 4 > 1 else {}
        request = ask(number, prompt, chance.choice([5, 20, 40]), 0.8 if seeded else 0.0, **changes, **seeded)
        request.sampling_params.stop_token_ids = None
        request._block_hasher = hasher
        request.update_block_hashes()
        asked.append(request)
    return asked


def with_paths(blocks: int, link: Any, world_size: int = 1, max_rows: int = 24) -> Ranks:
    ranks = make_ranks(world_size, TARGET, None, link, max_rows, num_paths=PATHS, rank=PathRank)
    for rank in ranks.ranks:
        rank.allocate(blocks)
    return ranks


@pytest.mark.parametrize(("seed", "world_size", "blocks"), [(1, 1, 200), (2, 2, 60), (3, 1, 40), (4, 1, 40)])
def test_whatever_ends_a_path_the_tokens_are_those_of_plain_decoding_and_nothing_is_kept(
    vllm_config: Any, seed: int, world_size: int, blocks: int
) -> None:
    """A drafter fails, requests are preempted and aborted, reach the end of the context, and share their prefixes."""
    with grouped(Group(1)):
        asked = requests(random.Random(seed), 40)
        plain = serve(make_scheduler(vllm_config, 300), make_ranks(1, TARGET, None), asked, random.Random(seed))
    asked = requests(random.Random(seed), 40)
    scheduler, link = make_scheduler(vllm_config, blocks), Troubled(DRAFT, random.Random(seed), right=60)
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    with grouped(Group(world_size)):
        ranks = with_paths(blocks, link, world_size)
        found = serve(scheduler, ranks, asked, random.Random(seed), aborts=8, most=6)
        status = ranks.ranks[0].round.status()
        assert status["path_rounds"] > 40
        assert status["path_rows"] > status["path_rounds"]
        assert status["path_tokens"] > 10
        cut = 0
        for request in asked:
            tokens = found[request.request_id]
            assert tokens == plain[request.request_id][: len(tokens)], request.request_id
            cut += tokens != plain[request.request_id]
        assert 0 < cut <= 8
        assert any(request.num_preemptions for request in asked) == (blocks < 200)
        assert any(request.num_tokens == MAX_MODEL_LEN for request in asked)
        assert pool.get_num_free_blocks() == free
        last = serve(scheduler, ranks, requests(random.Random(9), 4), random.Random(9))
        assert all(set(rank.requests) <= set(last) for rank in ranks.ranks), "what has finished is told with a step"
        assert ranks.ranks[0].round.status()["path_rounds"] > status["path_rounds"], "blocks of paths are given back"


def test_tokens_without_a_seed_are_distributed_as_those_of_plain_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random seeds are drawn in the same order every time."""
    monkeypatch.setattr(request_module, "random_seed", partial(random.Random(5).getrandbits, 63))
    temperature, top_k, prompt = 2.0, 3, [33, 44, 55]
    asked = [
        ask(number, list(prompt), 5, temperature, top_k=top_k, ignore_eos=True, **by("coupled"))
        for number in range(400)
    ]
    for request in asked:
        request.sampling_params.stop_token_ids = None
    config = ahead_config(tmp_path, PATHS, max_num_seqs=64, max_num_batched_tokens=512)
    with grouped(Group(1)):
        ranks = with_paths(4000, Linked(DRAFT), max_rows=96)
        found = serve(make_scheduler(config, 4000), ranks, asked, random.Random(7), most=64)
        status = ranks.ranks[0].round.status()
    check_distribution(found.values(), prompt, temperature, top_k)
    assert status["path_tokens"] > 50


@pytest.mark.parametrize(
    ("blocks", "block_size", "drafts"), [(40, 4, 4), (20, 128, 8), (9999, 16, 8), (200_000, 16, 16)]
)
def test_path_rows_take_a_hundredth_of_the_blocks_or_those_of_two_paths(
    blocks: int, block_size: int, drafts: int
) -> None:
    """A path has the block of the last committed token, and those that its drafts reach."""
    speculation = SpeculationConfig(num_speculative_tokens=drafts, num_paths=PATHS)
    of_two = 2 * (1 + math.ceil(drafts / block_size))
    assert of_two <= reserve_blocks(kv_cache(blocks, block_size), speculation) <= max(blocks / 100, of_two)


def test_the_scheduler_starts_without_the_blocks_of_path_rows(vllm_config: Any) -> None:
    pool = make_scheduler(vllm_config, 60).kv_cache_manager.block_pool
    assert pool.num_gpu_blocks == 60 - reserve_blocks(kv_cache(60), SPECULATION)
