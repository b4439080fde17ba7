"""While vLLM profiles a GPU's memory, the Verifier chooses as many tokens as it ever may in one step."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.sample.sampler import Sampler

from outrider.actors.round.length import FixedLengths
from outrider.actors.round.request import Deployment
from outrider.actors.round.round import Round
from outrider.actors.vllm_adapter.target_sampler import TargetSampler
from outrider.cluster.config import LinkConfig
from tests.support.devices.counting_device import DEVICE
from tests.unit.vllm_adapter.book import MAX_MODEL_LEN, K
from tests.unit.vllm_adapter.device_rank import DeviceRank, Group, V, counting, grouped, model


@pytest.mark.parametrize(
    ("k", "max_num_tokens", "rows"), [(0, 64, 6), (K, 64, 6 * (1 + K)), (K, 4 * (1 + K) + 1, 4 * (1 + K))]
)
def test_the_largest_step_is_profiled_with_top_p_drawn_drafts_and_logprobs(k, max_num_tokens, rows, monkeypatch):
    batches, logprobs = [], []
    with counting(), grouped(Group(1)):
        sampler = TargetSampler(VllmConfig(), stock := Sampler(), DEVICE)
        verify, gather = sampler._verify, stock.gather_logprobs
        monkeypatch.setattr(sampler, "_verify", lambda batch: batches.append(batch) or verify(batch))
        monkeypatch.setattr(stock, "gather_logprobs", lambda *args: logprobs.append(args[0].shape) or gather(*args))
        rank = DeviceRank(model(1), DEVICE, 6, MAX_MODEL_LEN, k)
        rank.max_num_reqs, rank.max_num_tokens = 6, max_num_tokens
        rank.model = SimpleNamespace(compute_logits=lambda hidden: torch.zeros(len(hidden), V, device=DEVICE))
        round_ = Round(sampler, Deployment("rejection", k, 8, V, MAX_MODEL_LEN), LinkConfig(), FixedLengths(k))
        rank.install(round_, sampler=sampler)
        rank._dummy_sampler_run(torch.zeros(6, 4, device=DEVICE))
    *variants, largest = batches
    assert (len(largest.logits), largest.max_drafts) == (rows, k)
    assert largest.constraints.any_top_p
    assert (largest.q_ids is not None) == bool(k)
    assert logprobs == [(rows, V)]
    assert variants, "other kernels are compiled before vLLM watches for late ones"
