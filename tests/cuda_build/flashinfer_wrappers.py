"""Computes FlashInfer's paged attention on the CPU, from what vLLM's metadata builder plans.

FlashInfer's own kernels are compiled by nvcc when a device first uses them, which is not done here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.cuda_build.kernels import attended
from tests.cuda_build.virtual_gpu import GPU, VirtualTensor


class PagedWrapper:
    """Stands for BatchDecodeWithPagedKVCacheWrapper and BatchPrefillWithPagedKVCacheWrapper."""

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False, **_: Any
    ) -> None:
        self._heads_first, self.is_cuda_graph_enabled = kv_layout == "HND", use_cuda_graph

    def _keep(
        self, starts: Any, indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int, causal: bool,
        sm_scale: float, window_left: int, logits_soft_cap: float | None,
    ) -> None:  # fmt: skip
        """starts: of each row's queries, and the end of the last one."""
        for each in (indptr, last_page_len):
            assert each.device.type == "cpu"
            assert not each.is_cuda
        assert isinstance(indices, VirtualTensor)
        assert len(indptr) == len(last_page_len) + 1 == len(starts)
        self._starts, self._indptr, self._indices = starts, indptr.tolist(), indices
        self._lengths = [
            (end - start - 1) * page_size + last if end > start else 0
            for start, end, last in zip(self._indptr, self._indptr[1:], last_page_len.tolist(), strict=False)
        ]
        # Names that vLLM reads.
        self._causal, self._sm_scale, self._window_left = causal, sm_scale, window_left
        self._logits_soft_cap = logits_soft_cap or 0.0

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, q_scale: float = 1.0, k_scale: float = 1.0,
        v_scale: float = 1.0, out: Tensor, **_: Any,
    ) -> Tensor:  # fmt: skip
        GPU.launches[f"flashinfer {type(self).__name__}"] += 1
        keys, values = (each.host.transpose(1, 2) if self._heads_first else each.host for each in paged_kv_cache)
        queries, answers, indices = q.host, out.host, self._indices.host
        assert self._starts[-1] == len(queries) == len(answers)
        for row, length in enumerate(self._lengths):
            first, end = self._starts[row], self._starts[row + 1]
            if not length:
                answers[first:end] = 0
                continue
            pages = indices[self._indptr[row] : self._indptr[row + 1]].long()
            key, value = (each[pages].flatten(0, 1)[:length].float() for each in (keys, values))
            answers[first:end] = attended(
                queries[first:end].float() * q_scale, key * k_scale, value * v_scale, length, self._sm_scale,
                self._causal, (self._window_left, -1), self._logits_soft_cap,
            ).to(answers.dtype)  # fmt: skip
        return out


class Decode(PagedWrapper):
    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *, page_size: int, sm_scale: float,
        window_left: int, logits_soft_cap: float | None, **_: Any,
    ) -> None:  # fmt: skip
        starts = list(range(len(indptr)))
        self._keep(starts, indptr, indices, last_page_len, page_size, False, sm_scale, window_left, logits_soft_cap)


class Prefill(PagedWrapper):
    def plan(
        self, *, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        page_size: int, causal: bool, sm_scale: float, window_left: int, logits_soft_cap: float | None, **_: Any,
    ) -> None:  # fmt: skip
        self._keep(
            qo_indptr.tolist(), paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, causal, sm_scale,
            window_left, logits_soft_cap,
        )  # fmt: skip


def install() -> None:
    from vllm.v1.attention.backends import flashinfer

    flashinfer.BatchDecodeWithPagedKVCacheWrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper = Decode, Prefill
