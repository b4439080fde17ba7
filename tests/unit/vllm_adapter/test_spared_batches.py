"""A batch without adapters runs none of their kernels."""

from types import SimpleNamespace

import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from outrider.actors.vllm_adapter.target_worker import spare_batches

SIZE, RANK, SLOTS = 6, 2, 3


def test_kernels_run_where_a_token_has_an_adapter_and_nowhere_else():
    wrapper = PunicaWrapperCPU(16, 4, "cpu")
    spare_batches(SimpleNamespace(_adapter_manager=SimpleNamespace(punica_wrapper_mapping={"model": wrapper})))
    a, b = torch.ones(SLOTS, 1, RANK, SIZE), torch.ones(SLOTS, 1, SIZE, RANK)

    def added(*adapters):
        """To the rows of a batch, by a layer and by the output head."""
        wrapper.update_metadata(LoRAMapping(adapters, adapters, is_prefill=True), [7, None, None], SLOTS, SIZE)
        found = []
        for apply in (
            lambda y, x: wrapper.add_lora_linear(y, x, (a,), (b,), 1.0, (SIZE,)),
            lambda y, x: wrapper.add_lora_logits(y, x, a, b, 1.0),
        ):
            y = torch.zeros(len(adapters), SIZE)
            apply(y, torch.ones(len(adapters), SIZE))
            found.append(y[:, 0].tolist())
        return found

    assert added(0, 0) == [[0, 0], [0, 0]], "the last slot's weights are not added"
    assert added(7, 7) == [[SIZE * RANK] * 2] * 2
    assert added(0, 0) == [[0, 0], [0, 0]], "and not those of the batch before"
