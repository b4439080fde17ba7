"""Checks the inputs of the draft model's forward pass where vLLM has captured graphs.

test_draft_step.py computes whole steps with them, and tests/cuda_build/draft_steps.py replays graphs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import _get_padding_mask
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.block_table import BlockTable, SlotMappingMode

from outrider.actors.drafter.engine import Draw, StepRow
from outrider.actors.vllm_adapter.paged_forward import PagedForward
from outrider.cluster.link.messages import DraftSampling

MOST_TOKENS, VOCAB = 16, 100


class Model:
    """Records what a router reads in the forward context and, in a captured graph, in the runner's buffer."""

    def __init__(self, runner):
        self.runner, self.fed = runner, []

    def __call__(self, input_ids, positions, **_):
        count = len(input_ids)
        mode = get_forward_context().cudagraph_runtime_mode
        masks = _get_padding_mask(count), self.runner.is_padding[:count]
        self.fed.append((mode, input_ids.tolist(), positions.tolist(), *(mask.tolist() for mask in masks)))
        return torch.zeros(count, 4)


def block_table(device="cpu"):
    return BlockTable(16, MOST_TOKENS, 8, MOST_TOKENS, False, torch.device(device), 1, SlotMappingMode.NONE)


@pytest.fixture
def runner():
    """Stands for vLLM's V1 runner that has captured nothing."""
    config = VllmConfig()
    compilation = config.compilation_config
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [1, 2, 4, 8], 8
    config.model_config = SimpleNamespace(get_vocab_size=lambda: VOCAB)
    runner = SimpleNamespace(
        vllm_config=config,
        device=torch.device("cpu"),
        kv_caches=[],
        kv_cache_config=SimpleNamespace(num_blocks=4),
        attn_groups=[[]],
        input_batch=SimpleNamespace(block_table=[block_table()]),
        cudagraph_dispatcher=CudagraphDispatcher(config),
        input_ids=SimpleNamespace(gpu=torch.full((MOST_TOKENS,), 7, dtype=torch.int32)),
        positions=torch.full((MOST_TOKENS,), 5),
        is_padding=torch.ones(MOST_TOKENS, dtype=torch.bool),
        query_start_loc=SimpleNamespace(gpu=torch.full((MOST_TOKENS + 1,), 9, dtype=torch.int32)),
        seq_lens=torch.full((MOST_TOKENS,), 9, dtype=torch.int32),
    )
    runner.model = Model(runner)
    return runner


def capture(runner, mode=CUDAGraphMode.FULL_AND_PIECEWISE):
    """Captures graphs for 1, 2, 4 and 8 tokens."""
    runner.cudagraph_dispatcher.initialize_cudagraph_keys(mode, 1)
    return runner


ONE = Draw(DraftSampling(), 0, 0)


def feed(forward, *rows):
    return forward([StepRow(tokens, start, ([0],), [ONE]) for tokens, start in rows])


@pytest.mark.parametrize(("count", "padded"), [(1, 1), (3, 4), (8, 8), (9, 9)])
def test_a_router_takes_no_token_for_padding(runner, count, padded):
    forward = PagedForward(capture(runner))
    for _ in range(2):
        feed(forward, (list(range(count)), 0))
        runner.is_padding.logical_not_()  # whatever the last step left there
    for mode, tokens, positions, eager, captured in runner.model.fed:
        assert mode is (
            CUDAGraphMode.NONE if padded > 8 else CUDAGraphMode.FULL if count == 1 else CUDAGraphMode.PIECEWISE
        )
        assert tokens[:count] == positions[:count] == list(range(count))
        assert positions[count:] == [0] * (padded - count)
        assert eager == captured == [False] * count + [True] * (padded - count)


@pytest.mark.parametrize(
    ("captured", "one_a_row", "longer"),
    [
        ("FULL_AND_PIECEWISE", "FULL", "PIECEWISE"),
        ("PIECEWISE", "PIECEWISE", "PIECEWISE"),
        ("FULL_DECODE_ONLY", "FULL", "NONE"),
        ("FULL", "FULL", "NONE"),
    ],
)
def test_a_step_of_one_token_a_row_is_a_full_graph_s_where_vllm_captured_any(runner, captured, one_a_row, longer):
    forward = PagedForward(capture(runner, CUDAGraphMode[captured]))
    feed(forward, *[([1], 3)] * 3)
    feed(forward, ([1], 3), ([1, 2], 3))
    assert [mode.name for mode, *_ in runner.model.fed] == [one_a_row, longer]


def test_tokens_of_a_target_that_the_draft_model_has_no_row_for_are_fed_as_its_last(runner):
    fed = []
    runner.model = lambda input_ids, **_: fed.append(input_ids) or torch.zeros(len(input_ids), 4)
    forward = PagedForward(runner)
    feed(forward, ([VOCAB - 1, VOCAB, 3, VOCAB + 27], 0), ([2, VOCAB], 0))
    feed(forward, ([VOCAB + 1], 4), ([5], 4))
    assert [tokens.tolist() for tokens in fed] == [[99, 99, 3, 99, 2, 99], [99, 5]]
    assert {tokens.dtype for tokens in fed} == {torch.int32}


def test_every_token_and_every_draw_is_of_its_row_s_adapter(runner):
    told = []
    runner._set_active_loras = lambda *mapping: told.append(mapping)
    runner.model = lambda input_ids, **_: torch.zeros(len(input_ids), 4)
    adapters = [LoRARequest(name, number, f"/{name}") for number, name in enumerate("ab", start=1)]
    forward = PagedForward(runner, adapters)
    rows = [
        StepRow([1, 2, 3], 0, ([0],), adapter=2),
        StepRow([4, 5], 3, ([0],), [ONE]),
        StepRow([6], 3, ([0],), [ONE], adapter=1),
        StepRow([7], 3, ([0],), [ONE], adapter=9),
    ]
    forward(rows)
    forward(rows[1:2])
    assert told[0][:2] == ((0, 1, 0), (2, 2, 2, 0, 0, 1, 0)), "what it has not is none"
    assert told[0][2] == set(adapters)
    assert told[1] == ((0,), (0, 0), set()), "none, and not those of the step before"
