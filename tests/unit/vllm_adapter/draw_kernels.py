"""Replaces the GPU's kernels for draws, on the device that counts, by one launch each of the CPU's functions."""

from __future__ import annotations

import pytest

from outrider.actors.verification import draft_sampler, torch_draws
from outrider.actors.verification.coupled import coupled_ranking
from outrider.actors.verification.search import TokenSubset
from tests.support.devices.counting_device import CountingDevice


def draw_on(device: CountingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the kernels, or skips the test without Triton. triton_comparison.py compares them with the CPU's."""

    def ranking(logits, temperature, threshold, seed, position, subset, count):
        subset_ids = None if subset is None else subset.ids

        def on_host(logits, temperature, threshold, seed, position, ids):
            there = None if ids is None else TokenSubset(ids)
            return coupled_ranking(logits, temperature, threshold, logits.amax(-1), seed, position, count, subset=there)

        return device.kernel(on_host, logits, temperature, threshold, seed, position, subset_ids)

    triton_draws = pytest.importorskip("outrider.actors.verification.triton_draws", exc_type=ImportError)
    triton_top_p = pytest.importorskip("outrider.actors.verification.triton_top_p", exc_type=ImportError)
    from tests.unit.verification.triton_comparison import threshold_by_order as by_order

    in_torch = torch_draws.draft_choice
    monkeypatch.setattr(draft_sampler, "_triton_ranking", ranking)
    monkeypatch.setattr(triton_top_p, "nucleus", lambda *arguments: device.kernel(by_order, *arguments))
    monkeypatch.setattr(triton_draws, "draft_choice", lambda *arguments: device.kernel(in_torch, *arguments))
