"""Copies of KV blocks by one kernel, in Triton's interpreter, against vLLM's layer by layer."""

import pytest
import torch

from tests.support.devices import interpreted

block_copies = pytest.importorskip("outrider.actors.drafter.block_copies", exc_type=ImportError)


def test_every_layout_is_copied_as_vllm_does():
    interpreted.run("tests.unit.vllm_adapter.copies_comparison")


@pytest.mark.parametrize(
    "caches",
    [
        [],
        [torch.zeros(4, 16), [torch.zeros(4, 16)]],
        [torch.zeros(10, 4)],
        [torch.zeros(6, 8, 8)[1:5, :, ::2]],
        [torch.zeros(4, 3, dtype=torch.uint8)],
    ],
    ids=[
        "no layers",
        "states of a layer without attention",
        "no whole number of blocks",
        "gaps in a block",
        "no whole number of words",
    ],
)
def test_what_one_kernel_cannot_copy_is_left_to_vllm(caches):
    assert block_copies.block_copies(caches, 4, torch.device("cpu")) is None
