"""Computes vLLM's CUDA kernels on the CPU, by the names of their operations. Shapes are checked as the kernels do."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.cuda_build.virtual_gpu import GPU

FP8 = torch.float8_e4m3fn


def _normed(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return wide if weight is None else wide * weight.float()


def rms_norm(result: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
    assert result.shape == input.shape
    assert result.dtype == input.dtype
    result.copy_(_normed(input, weight, epsilon))


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    assert input.shape == residual.shape
    assert input.dtype == residual.dtype
    residual.add_(input)
    input.copy_(_normed(residual, weight, epsilon))


def silu_and_mul(result: Tensor, input: Tensor) -> None:
    gate, up = input.chunk(2, dim=-1)
    assert result.shape == gate.shape
    result.copy_(torch.nn.functional.silu(gate.float()) * up.float())


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool,
    rope_dim_offset: int = 0, inverse: bool = False,
) -> None:  # fmt: skip
    assert positions.dtype is torch.int64
    assert is_neox
    assert not rope_dim_offset
    assert not inverse
    cos, sin = cos_sin_cache[positions].float().unsqueeze(1).chunk(2, dim=-1)
    for each in (query, key):
        if each is None:
            continue
        assert len(each) == len(positions), f"{len(each)} rows, {len(positions)} positions"
        heads = each.view(len(positions), -1, head_size)
        first, second = heads[..., : 2 * cos.shape[-1]].float().chunk(2, dim=-1)
        heads[..., : 2 * cos.shape[-1]] = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(
            each.dtype
        )


def reshape_and_cache_flash(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str,
    k_scale: Tensor, v_scale: Tensor,
) -> None:  # fmt: skip
    """Caches: [blocks, tokens of a block, heads, head size]. Padding has slot -1."""
    assert slot_mapping.dtype is torch.int64
    assert len(slot_mapping) <= len(key)
    size, real = key_cache.shape[1], slot_mapping >= 0
    blocks, places = slot_mapping[real] // size, slot_mapping[real] % size
    assert not len(blocks) or int(blocks.max()) < len(key_cache), "a slot lies behind the KV cache"
    for cache, new, scale in ((key_cache, key, k_scale), (value_cache, value, v_scale)):
        rows = new[: len(slot_mapping)][real]
        if kv_cache_dtype == "auto":
            assert cache.dtype == new.dtype
            cache[blocks, places] = rows
        else:
            assert kv_cache_dtype in ("fp8", "fp8_e4m3")
            scaled = (rows.float() / float(scale)).clamp(-448, 448).to(FP8)
            cache.view(torch.uint8)[blocks, places] = scaled.view(torch.uint8)


def attended(
    q: Tensor, keys: Tensor, values: Tensor, length: int, scale: float, causal: bool, window: tuple[int, int],
    softcap: float,
) -> Tensor:  # fmt: skip
    """q: [tokens, heads, head size] of a text's last tokens; keys, values: [length, KV heads, head size]."""
    count, groups = len(q), q.shape[1] // keys.shape[1]
    keys, values = (each.float().repeat_interleave(groups, dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    here, there = length - count + torch.arange(count).unsqueeze(1), torch.arange(length)
    seen = there <= here if causal else torch.ones(count, length, dtype=torch.bool)
    if window[0] >= 0:
        seen = seen & (there >= here - window[0])
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values)


def flash_attention_3(
    q: Tensor, k: Tensor, v: Tensor, k_new: None, v_new: None, q_v: None, out: Tensor | None,
    cu_seqlens_q: Tensor, cu_seqlens_k: None, cu_seqlens_k_new: None, seqused_q: None, seqused_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, page_table: Tensor, kv_batch_idx: None, leftpad_k: None, rotary_cos: None,
    rotary_sin: None, seqlens_rotary: None, q_descale: Tensor | None, k_descale: Tensor | None,
    v_descale: Tensor | None, softmax_scale: float, is_causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, is_rotary_interleaved: bool, scheduler_metadata: Tensor | None, num_splits: int, *_: object,
) -> list[Tensor]:  # fmt: skip
    """Attention over paged KV, [blocks, tokens of a block, KV heads, head size]."""
    rows = len(seqused_k)
    assert cu_seqlens_q.shape == (rows + 1,)
    assert page_table.shape[0] == rows
    for each in (cu_seqlens_q, seqused_k, page_table):
        assert each.dtype is torch.int32
    assert page_table.stride(-1) == 1
    assert q.dtype in (torch.bfloat16, torch.float16, FP8), f"FlashAttention has no {q.dtype}"
    assert k.dtype == v.dtype == q.dtype, f"queries are {q.dtype}, keys {k.dtype}, values {v.dtype}"
    assert int(cu_seqlens_q[-1]) <= len(q)
    size = k.shape[1]
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.bfloat16) if out is None else out
    starts = cu_seqlens_q.tolist()
    for row, length in enumerate(seqused_k.tolist()):
        first, end = starts[row : row + 2]
        if first == end:
            continue
        assert end - first <= max_seqlen_q
        assert length <= max_seqlen_k
        if not length:
            out[first:end] = 0
            continue
        pages = page_table[row, : -(-length // size)].long()
        assert int(pages.max()) < len(k), "a block lies behind the KV cache"
        query, keys, values = q[first:end].float(), *(each[pages].flatten(0, 1)[:length].float() for each in (k, v))
        if q.dtype is FP8:
            groups = q.shape[1] // k.shape[2]
            query = query * q_descale[row].repeat_interleave(groups).view(1, -1, 1)
            keys, values = keys * k_descale[row].view(1, -1, 1), values * v_descale[row].view(1, -1, 1)
        out[first:end] = attended(
            query, keys, values, length, softmax_scale, is_causal, (window_size_left, window_size_right), softcap
        ).to(out.dtype)
    return [out, torch.zeros(q.shape[1], len(q)), torch.zeros(0), torch.zeros(0)]


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads: int, num_heads_k: int, headdim: int,
    headdim_v: int, qkv_dtype: torch.dtype, seqused_k: Tensor, cu_seqlens_q: Tensor | None, *_: object,
) -> Tensor:  # fmt: skip
    assert seqused_k.shape == (batch_size,)
    assert cu_seqlens_q is None or cu_seqlens_q.shape == (batch_size + 1,)
    return torch.zeros(1 + 4 * (-(-batch_size // 4) * 4), dtype=torch.int32)


def static_scaled_fp8_quant(result: Tensor, input: Tensor, scale: Tensor, group_shape: list[int] | None = None) -> None:
    assert result.shape == input.shape
    result.copy_((input.float() / scale.float().view(-1)[0]).clamp(-448, 448).to(FP8))


GPU.kernels.update({
    "_C::rms_norm": rms_norm,
    "_C::weak_ref_tensor": lambda input: input.view(input.shape),
    "_C::fused_add_rms_norm": fused_add_rms_norm,
    "_C::silu_and_mul": silu_and_mul,
    "_C::rotary_embedding": rotary_embedding,
    "_C::static_scaled_fp8_quant": static_scaled_fp8_quant,
    "_C_cache_ops::reshape_and_cache_flash": reshape_and_cache_flash,
    "_vllm_fa3_C::fwd": flash_attention_3,
    "_vllm_fa3_C::get_scheduler_metadata": get_scheduler_metadata,
})  # fmt: skip


def install() -> None:
    """Replaces what Triton's interpreter cannot run: vLLM's own top-k and top-p, which its profiling run alone uses."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch
