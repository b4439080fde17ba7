"""Runs whole draft steps of a rank on the device that counts: copies, a cut head, rows, draws, and one wait."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker import utils
from vllm.v1.worker.block_table import BlockTable, SlotMappingMode

from outrider.actors.drafter.engine import Draw, Drawn, StepPlan, StepRow
from outrider.actors.vllm_adapter.draft_worker import CutHead, DraftWorker
from outrider.cluster.link.messages import DraftSampling
from outrider.cluster.modes import Mode
from tests.support.devices.counting_device import DEVICE, CountingDevice
from tests.unit.vllm_adapter.device_rank import async_tensor_h2d
from tests.unit.vllm_adapter.draw_kernels import draw_on

V, WIDTH, BLOCK, LAYERS = 96, 16, 4, 2
BLOCKS = 13
"""The last is nobody's: in its last slot, -1, is what padding writes."""

MOST_TOKENS = 16
SAMPLINGS = [
    DraftSampling(),
    DraftSampling(biases=((7, 2.0), (11, 1.0)), only_biased=True),
    DraftSampling(Mode.COUPLED, temperature=0.9, top_p=0.9, seed=5),
    DraftSampling(Mode.REJECTION, temperature=0.8, top_n=16, seed=11),
]


class Attention:
    """A group of layers. Its metadata is what its backend is told; it is built as FlashInfer's `plan` does, in one
    pinned buffer that is written to in each step and sent without a wait."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.layer_names = (name,)
        self._ends = torch.zeros(MOST_TOKENS, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._ends_there = torch.zeros(MOST_TOKENS, dtype=torch.int32, device=device)

    def build_metadata(self, common: Any) -> Any:
        num_blocks = -(-common.seq_lens_cpu_upper_bound.numpy() // BLOCK)
        self._ends.numpy()[: len(num_blocks)] = np.cumsum(num_blocks)
        self._ends_there.copy_(self._ends, non_blocking=True)
        return common


class Model:
    """Attention over paged KV, and a head. Weights and KV lie on a device."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self.embedding, self.places = weight(V, WIDTH), weight(64, WIDTH)
        self.projections = [[weight(WIDTH, WIDTH) * 0.4 for _ in range(4)] for _ in range(LAYERS)]
        self.kv_caches = [torch.zeros(BLOCKS, BLOCK, 2, WIDTH).to(device) for _ in range(LAYERS)]
        self.lm_head = SimpleNamespace(weight=weight(V, WIDTH))
        self.logits_processor = SimpleNamespace(soft_cap=None, scale=1.0)

    def __call__(self, input_ids: Tensor, positions: Tensor, **_: Any) -> Tensor:
        told = get_forward_context()
        count = len(told.slot_mapping["0"])  # what comes after is padding
        hidden, positions = self.embedding[input_ids[:count]] + self.places[positions[:count]], positions[:count]
        for layer, (of_query, of_key, of_value, out) in enumerate(self.projections):
            metadata, slots = told.attn_metadata[str(layer)], told.slot_mapping[str(layer)]
            memory = self.kv_caches[layer].view(-1, 2, WIDTH)
            memory[slots] = torch.stack([hidden @ of_key, hidden @ of_value], dim=1)
            row = torch.searchsorted(metadata.query_start_loc, torch.arange(count, device=slots.device), right=True) - 1
            row = row.clamp(max=len(metadata.block_table_tensor) - 1)  # of padding, of which nothing is taken
            places = metadata.block_table_tensor[row].unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=slots.device)
            places = places.flatten(1)
            keys, values = memory[places].unbind(2)
            scores = (keys @ (hidden @ of_query).unsqueeze(2)).squeeze(2)
            seen = torch.arange(places.shape[1], device=slots.device) <= positions.unsqueeze(1)
            shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            hidden = hidden + ((shares.unsqueeze(1) @ values).squeeze(1) @ out).tanh()
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.lm_head.weight.T


def rank_on(device: torch.device, *, cut: list[int] | None, rank: int = 0) -> Any:
    """Return what a draft step needs of a worker that has loaded its model. cut: the tokens of its head, if not all."""
    config = VllmConfig()
    compilation = config.compilation_config
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [1, 2, 4, 8], 8
    dispatcher = CudagraphDispatcher(config)
    if device.type != "cpu":
        dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE, 1)
    config.model_config = SimpleNamespace(get_vocab_size=lambda: V)
    model = Model(device)
    tables = BlockTable(BLOCK, MOST_TOKENS, BLOCKS, MOST_TOKENS, False, device, 1, SlotMappingMode.NONE)
    runner = SimpleNamespace(
        vllm_config=config,
        device=device,
        model=model,
        kv_caches=model.kv_caches,
        kv_cache_config=SimpleNamespace(num_blocks=BLOCKS),
        attn_groups=[[Attention(str(layer), device) for layer in range(LAYERS)]],
        input_batch=SimpleNamespace(block_table=[tables]),
        cudagraph_dispatcher=dispatcher,
        input_ids=SimpleNamespace(gpu=torch.zeros(MOST_TOKENS, dtype=torch.int32, device=device)),
        positions=torch.zeros(MOST_TOKENS, dtype=torch.int64, device=device),
        is_padding=torch.ones(MOST_TOKENS, dtype=torch.bool, device=device),
        query_start_loc=SimpleNamespace(gpu=torch.zeros(MOST_TOKENS + 1, dtype=torch.int32, device=device)),
        seq_lens=torch.zeros(MOST_TOKENS, dtype=torch.int32, device=device),
    )
    head = None if cut is None else CutHead(model, cut)
    return SimpleNamespace(rank=rank, _paged=None, _head=head, _adapters=(), _mask_id=None, model_runner=runner)


def steps(cut: bool) -> list[StepPlan]:
    """Prompts, one of them in pieces; then a token each, in every mode; then branches, whose blocks are copies, one of
    a block that is written as well; then what a branch feeds, with a changed head."""

    def drawn(sampling: DraftSampling, position: int) -> list[Draw]:
        return [Draw(sampling, position, position - 1, alternatives=2)]

    prompts = [StepRow([10 + i, 20 + i, 30 + i], 0, ([i],), drawn(s, 3)) for i, s in enumerate(SAMPLINGS)]
    piece = StepRow([3, 4, 5, 6], 0, ([4, 5],))
    grown = [StepRow([40 + i, 50 + i], 3, ([i, 6 + i],), drawn(s, 5)) for i, s in enumerate(SAMPLINGS)]
    branch = StepRow([60], 5, ([0, 10],), drawn(SAMPLINGS[3], 6))
    again = [replace(row, token_ids=[9], start=5, draws=drawn(s, 6)) for row, s in zip(grown, SAMPLINGS, strict=True)]
    changes = [(0, 90), (5, 91)] if cut else []
    limit = None if cut else 90
    return [
        StepPlan([piece]),
        StepPlan([*prompts, StepRow([7, 8], 4, ([4, 5],), drawn(SAMPLINGS[0], 6))], num_drawable=limit),
        StepPlan(grown, num_drawable=limit),
        StepPlan([branch, *again], [(6, 10), (10, 11)], [(7, 8), (8, 9)], changes, num_drawable=limit),
        StepPlan([replace(branch, token_ids=[61], start=6, draws=drawn(SAMPLINGS[2], 7))], num_drawable=limit),
    ]


def same(mine: Drawn, its: Drawn) -> bool:
    near = pytest.approx(its.confidence, abs=1e-5) == mine.confidence
    named = [[token for token, _ in each.alternatives] for each in (mine, its)]
    q = [None if each.q_ids is None else sorted(each.q_ids.tolist()) for each in (mine, its)]
    return (mine.token, mine.usable) == (its.token, its.usable) and near and named[0] == named[1] and q[0] == q[1]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("cut", [False, True], ids=["whole head", "cut head"])
def test_every_rank_waits_once_for_a_draft_step_and_at_its_end(monkeypatch, cut, rank):
    head = list(range(0, 80, 2)) + [7, 11] if cut else None
    here = rank_on(torch.device("cpu"), cut=head)
    expected = [DraftWorker.draft(here, plan) for plan in steps(cut)]
    device = CountingDevice()
    draw_on(device, monkeypatch)
    monkeypatch.setattr(utils, "async_tensor_h2d", async_tensor_h2d)
    with device:
        worker = rank_on(DEVICE, cut=head, rank=rank)
        for number, (plan, its) in enumerate(zip(steps(cut), expected, strict=True)):
            with device.synchronises(1, f"step {number}"):
                mine = DraftWorker.draft(worker, plan)
            assert not device.busy, f"step {number}"
            assert [len(row) for row in mine] == ([] if rank else [len(row) for row in its])
            pairs = [pair for rows in zip(mine, its, strict=False) for pair in zip(*rows, strict=True)]
            assert all(same(*pair) for pair in pairs), f"step {number}"
    assert sum(each.usable for step in expected for row in step for each in row) > 12


MASK = 7


@pytest.mark.parametrize("cut", [None, [*range(0, 80, 2), MASK, 11]], ids=["whole head", "cut head"])
def test_a_row_with_masks_draws_what_rows_draw_that_end_in_them_and_never_a_mask(cut: list[int] | None) -> None:
    """Rows with and without masks in one step, in every mode; the mask is by far the likeliest token."""
    here = rank_on(torch.device("cpu"), cut=cut)
    here._mask_id = MASK
    wanted = [replace(sampling, biases=((MASK, 40.0), (11, 1.0)), only_biased=False) for sampling in SAMPLINGS]
    for sampling in wanted:
        draws = [Draw(sampling, 3 + index, 3, alternatives=2) for index in range(3)]
        with_masks = StepRow([1, 2, 3], 0, ([0, 1],), draws)
        rows = [StepRow([1, 2, 3, *[MASK] * i], 0, ([2 + 2 * i, 3 + 2 * i],), [one]) for i, one in enumerate(draws)]
        drawn = DraftWorker.draft(here, StepPlan([StepRow([5, 6], 0, ([8],)), with_masks, *rows]))
        assert drawn[0] == []
        together = drawn[1]
        assert all(same(mine, its) for mine, (its,) in zip(together, drawn[2:], strict=True))
        named = [token for one in together for token in (one.token, *(token for token, _ in one.alternatives))]
        assert len(together) == 3
        assert MASK not in named
