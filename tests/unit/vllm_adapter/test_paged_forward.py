"""What the draft model's forward pass is given on a GPU, by the values that are set. The graphs themselves need one;
tests/support/models/draft_engine_graphs.py plays them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import _get_padding_mask
from vllm.utils import torch_utils
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.block_table import BlockTable, SlotMappingMode

from outrider.actors.drafter.engine import Draw, StepRow
from outrider.actors.verification.transfer import to_device
from outrider.actors.vllm_adapter import paged_forward
from outrider.actors.vllm_adapter.paged_forward import PagedForward
from outrider.cluster.link.messages import DraftSampling
from tests.support.devices.counting_device import DEVICE, CountingDevice

MOST_TOKENS, VOCAB = 16, 100


class Model:
    """Notes what a router finds in the forward context, and what one in a captured graph reads: the runner's buffer."""

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
    """As vLLM's V1 runner is that has captured nothing."""
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
    """Graphs for 1, 2, 4 and 8 tokens. Dummy runs are nothing but padding."""
    runner.cudagraph_dispatcher.initialize_cudagraph_keys(mode, 1)
    return runner


ONE = Draw(DraftSampling(), 0, 0)


def feed(forward, *rows):
    return forward([StepRow(tokens, start, ([0],), ONE) for tokens, start in rows])


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


def test_more_rows_than_the_largest_graph_run_without(runner):
    forward = PagedForward(capture(runner))
    feed(forward, *[([1], 3)] * 9)
    assert [(mode.name, len(tokens)) for mode, tokens, *_ in runner.model.fed] == [("NONE", 9)]


def test_without_graphs_nothing_is_padding(runner):
    seen = []
    runner.model = lambda input_ids, **_: (
        seen.append(get_forward_context().is_padding) or torch.zeros(len(input_ids), 4)
    )
    feed(PagedForward(runner), ([1, 2], 0))
    assert seen == [None]


def test_tokens_of_a_target_that_the_draft_model_has_no_row_for_are_fed_as_its_last(runner):
    fed = []
    runner.model = lambda input_ids, **_: fed.append(input_ids) or torch.zeros(len(input_ids), 4)
    forward = PagedForward(runner)
    feed(forward, ([VOCAB - 1, VOCAB, 3, VOCAB + 27], 0), ([2, VOCAB], 0))
    feed(forward, ([VOCAB + 1], 4), ([5], 4))
    assert [tokens.tolist() for tokens in fed] == [[99, 99, 3, 99, 2, 99], [99, 5]]
    assert {tokens.dtype for tokens in fed} == {torch.int32}


TOLD = ("query_start_loc", "seq_lens", "slot_mapping", "positions", "block_table_tensor")


class Attention:
    """A group of layers, which keeps what it is told: the tensors are the next step's, too."""

    layer_names = ("layer",)

    def __init__(self):
        self.told = []

    def build_metadata(self, common):
        self.told.append({name: getattr(common, name).clone() for name in TOLD})


def test_what_a_step_needs_goes_to_the_device_in_one_copy_that_nobody_waits_for(runner, monkeypatch):
    device, copies = CountingDevice(), []

    def counted(arrays, to):
        copies.append(len(arrays))
        return to_device(arrays, to)

    monkeypatch.setattr(paged_forward, "to_device", counted)
    runner.attn_groups = [[attention := Attention()]]
    runner.model = lambda input_ids, positions, **_: torch.stack([input_ids, positions], 1)
    rows = [
        StepRow([1, 2, 3], 4, ([2],)),
        StepRow([4, 5], 15, ([1, 3],), ONE),
        StepRow([6], 0, ([0],), ONE),
    ]
    step = [StepRow([7], 16, ([1, 3],), ONE), StepRow([8], 3, ([0],), ONE)]
    expected = [PagedForward(runner)(each).tolist() for each in (rows, step)]
    with device:
        runner.device = DEVICE
        runner.input_ids.gpu, runner.positions = runner.input_ids.gpu.to(DEVICE), runner.positions.to(DEVICE)
        runner.is_padding, runner.seq_lens = runner.is_padding.to(DEVICE), runner.seq_lens.to(DEVICE)
        runner.query_start_loc.gpu = runner.query_start_loc.gpu.to(DEVICE)
        runner.input_batch.block_table = [block_table(DEVICE)]
        forward = PagedForward(capture(runner))
        device.uploads.clear()
        copies.clear()
        hidden = [forward(each) for each in (rows, step, step)]
        assert (device.reads, device.uploads, copies) == ([], [], [7, 7, 6])
        assert [each.tolist() for each in hidden] == [*expected, expected[1]]
        for there, here in zip(attention.told[2:4], attention.told[:2], strict=True):
            assert all(each.is_cuda for each in there.values())
            wide = there["block_table_tensor"]
            there["block_table_tensor"] = wide[:, : here["block_table_tensor"].shape[1]]
            assert {name: each.tolist() for name, each in there.items()} == {n: e.tolist() for n, e in here.items()}


@pytest.mark.parametrize(("count", "mode", "padded"), [(1, "FULL", 1), (3, "PIECEWISE", 4), (9, "NONE", 9)])
def test_kv_is_written_by_a_slot_for_each_token_of_the_graph_where_it_reads_them(runner, count, mode, padded):
    seen, buffer = [], runner.input_batch.block_table[0].slot_mapping.gpu
    buffer.fill_(77)
    runner.attn_groups = [[attention := Attention()]]
    runner.model = lambda input_ids, **_: seen.append(get_forward_context()) or torch.zeros(len(input_ids), 4)
    PagedForward(capture(runner))([StepRow(list(range(count)), 15, ([2, 3],), ONE)])
    (context,), expected = seen, [2 * 16 + 15, *range(3 * 16, 3 * 16 + count - 1)]
    assert context.cudagraph_runtime_mode.name == mode
    slots = context.slot_mapping["layer"]
    assert slots.tolist() == expected + [-1] * (padded - count)
    assert (slots.data_ptr() == buffer.data_ptr()) is (mode != "NONE")
    assert attention.told[0]["slot_mapping"].tolist() == expected, "attention has the step's own tokens"


def test_every_token_and_every_draw_is_of_its_row_s_adapter(runner):
    told = []
    runner._set_active_loras = lambda *mapping: told.append(mapping)
    runner.model = lambda input_ids, **_: torch.zeros(len(input_ids), 4)
    adapters = [LoRARequest(name, number, f"/{name}") for number, name in enumerate("ab", start=1)]
    forward = PagedForward(runner, adapters)
    rows = [
        StepRow([1, 2, 3], 0, ([0],), adapter=2),
        StepRow([4, 5], 3, ([0],), ONE),
        StepRow([6], 3, ([0],), ONE, adapter=1),
        StepRow([7], 3, ([0],), ONE, adapter=9),
    ]
    forward(rows)
    forward(rows[1:2])
    assert told[0][:2] == ((0, 1, 0), (2, 2, 2, 0, 0, 1, 0)), "what it has not is none"
    assert told[0][2] == set(adapters)
    assert told[1] == ((0,), (0, 0), set()), "none, and not those of the step before"


def test_without_adapters_vllm_s_layers_are_told_nothing(runner):
    runner.model = lambda input_ids, **_: torch.zeros(len(input_ids), 4)
    feed(PagedForward(runner), ([1, 2], 0))
    assert not hasattr(runner, "_set_active_loras")


def test_blocks_are_copied_in_all_layers_by_one_launch_unless_one_is_read_and_written(runner, monkeypatch):
    block_copies = pytest.importorskip("outrider.actors.drafter.block_copies", exc_type=ImportError)
    device, launches = CountingDevice(), []

    class Kernel:
        def __getitem__(self, grid):
            return lambda copies, regions, **_: launches.append((grid, copies, regions))

    monkeypatch.setattr(block_copies, "copy_chunk", Kernel())
    monkeypatch.setattr(torch_utils, "is_pin_memory_available", lambda: True)
    layers = torch.arange(3 * 4 * 16).view(3, 4, 16)
    with device:
        caches = runner.kv_caches = list(layers.clone().to(DEVICE))
        runner.device = DEVICE
        forward = PagedForward(runner)
        device.uploads.clear()
        forward.copy_blocks([(0, 1), (0, 3)])
        forward.copy_blocks([(2, 1)])
        assert (device.reads, device.uploads) == ([], [])
        assert [(grid, copies.tolist()) for grid, copies, _ in launches] == [
            ((2, 3, 1), [[0, 1], [0, 3]]),
            ((1, 3, 1), [[2, 1]]),
        ]
        assert launches[0][2] is launches[1][2], "the device is told once where the blocks are"
        assert launches[0][2].tolist() == [[cache.data_ptr(), 128, 128] for cache in caches]
        forward.copy_blocks([(0, 1), (1, 2)])
        assert len(launches) == 2
        assert [cache.tolist() for cache in caches] == layers[:, [0, 0, 1, 3]].tolist()
