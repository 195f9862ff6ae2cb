"""`qk_rope_write` into a cache of INT8 codes: keys and values are rounded in the same launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from plugins.early_launch import early, let_next_start, wait_for_previous
from plugins.fusion.kernels.qk_rope_write import ELEMENTS, gains_of, rotated
from plugins.kv.kernels.write_int8 import codes_of, scale_of

if TYPE_CHECKING:
    from torch import Tensor

    from plugins.kv.int8_storage import Int8Sink


@triton.jit
def _codes_of_halves(a, b, LARGEST: tl.constexpr):
    """Codes of both halves of rows [n, D / 2], and their common scales [n]."""
    scale = scale_of(tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1)), LARGEST)
    return codes_of(a, scale), codes_of(b, scale), scale


@triton.jit
def _qk_rope_write_int8_kernel(
    qkv_ptr, q_gain_ptr, k_gain_ptr, cos_ptr, sin_ptr, positions_ptr, slot_map_ptr, q_ptr,
    shift_ptr, factor_ptr, k_codes_ptr, v_codes_ptr, k_scale_ptr, v_scale_ptr,
    fresh_k_ptr, fresh_v_ptr, eps,
    stride_qkv, stride_block, stride_kv_head, stride_scale_block,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr, LARGEST: tl.constexpr, NORM: tl.constexpr, HAS_FRESH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    half: tl.constexpr = D // 2
    q_parts: tl.constexpr = (NUM_Q + HEADS - 1) // HEADS
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    e = tl.arange(0, half)[None, :]
    turn = tl.load(positions_ptr + token).to(tl.int64) * half
    cos = tl.load(cos_ptr + turn + e).to(dtype).to(tl.float32)
    sin = tl.load(sin_ptr + turn + e).to(dtype).to(tl.float32)
    place = tl.load(slot_map_ptr + token)
    row = qkv_ptr + token * stride_qkv
    if part < q_parts:
        gain_a, gain_b = gains_of(q_gain_ptr, half, e, NORM)
        wait_for_previous(PDL)
        head = (part * HEADS + tl.arange(0, HEADS))[:, None]
        mask = head < NUM_Q
        a, b = rotated(row + head * D + e, half, mask, gain_a, gain_b, cos, sin, eps, D, NORM)
        q_at = q_ptr + token * (NUM_Q * D) + head * D + e
        tl.store(q_at, a, mask=mask)
        tl.store(q_at + half, b, mask=mask)
    else:
        heads = (part - q_parts) * HEADS + tl.arange(0, HEADS)
        head = heads[:, None]
        mask = head < NUM_KV
        gain_a, gain_b = gains_of(k_gain_ptr, half, e, NORM)
        channel = head * D + e
        shift_a = tl.load(shift_ptr + channel, mask=mask, other=0.0)
        shift_b = tl.load(shift_ptr + channel + half, mask=mask, other=0.0)
        factor_a = tl.load(factor_ptr + channel, mask=mask, other=1.0)
        factor_b = tl.load(factor_ptr + channel + half, mask=mask, other=1.0)
        wait_for_previous(PDL)
        k_at = row + NUM_Q * D + head * D + e
        v_at = k_at + NUM_KV * D
        v_a = tl.load(v_at, mask=mask, other=0.0).to(tl.float32)
        v_b = tl.load(v_at + half, mask=mask, other=0.0).to(tl.float32)
        k_a, k_b = rotated(k_at, half, mask, gain_a, gain_b, cos, sin, eps, D, NORM)
        k_a = tl.div_rn(k_a.to(tl.float32) - shift_a, factor_a)
        k_b = tl.div_rn(k_b.to(tl.float32) - shift_b, factor_b)
        k_a, k_b, k_scale = _codes_of_halves(k_a, k_b, LARGEST)
        v_a, v_b, v_scale = _codes_of_halves(v_a, v_b, LARGEST)

        block, offset = (place // BLOCK).to(tl.int64), place % BLOCK
        to = block * stride_block + head.to(tl.int64) * stride_kv_head
        k_to = k_codes_ptr + to + offset * D + e
        v_to = v_codes_ptr + to + offset + e * BLOCK
        tl.store(k_to, k_a.to(tl.int8), mask=mask)
        tl.store(k_to + half, k_b.to(tl.int8), mask=mask)
        tl.store(v_to, v_a.to(tl.int8), mask=mask)
        tl.store(v_to + half * BLOCK, v_b.to(tl.int8), mask=mask)
        scale_to = block * stride_scale_block + heads * BLOCK + offset
        tl.store(k_scale_ptr + scale_to, k_scale, mask=heads < NUM_KV)
        tl.store(v_scale_ptr + scale_to, v_scale, mask=heads < NUM_KV)
        if HAS_FRESH:
            fresh = token * (NUM_KV * D) + head * D + e
            k_scale, v_scale = k_scale[:, None], v_scale[:, None]
            tl.store(fresh_k_ptr + fresh, (k_a * k_scale * factor_a).to(dtype), mask=mask)
            tl.store(fresh_k_ptr + fresh + half, (k_b * k_scale * factor_b).to(dtype), mask=mask)
            tl.store(fresh_v_ptr + fresh, (v_a * v_scale).to(dtype), mask=mask)
            tl.store(fresh_v_ptr + fresh + half, (v_b * v_scale).to(dtype), mask=mask)


def qk_rope_write_int8(
    qkv_TP: Tensor,
    gains: tuple[Tensor, Tensor] | None,
    cos_PE: Tensor,
    sin_PE: Tensor,
    positions_T: Tensor,
    sink: Int8Sink,
    fresh: tuple[Tensor, Tensor] | None,
    *,
    num_heads: int,
    eps: float,
) -> Tensor:
    """Rotated queries, contiguous [T, H, D]; keys and values go into the sink and `fresh`.

    As plugins.fusion.kernels.qk_rope_write.qk_rope_write, then as
    plugins.kv.kernels.write_int8.write_int8: its codes, bit for bit, of the keys that the first
    would store.
    """
    num_tokens = qkv_TP.shape[0]
    num_kv_heads, head_dim = sink.k.shape[1], sink.k.shape[3]
    heads = max(1, min(ELEMENTS // head_dim, triton.next_power_of_2(max(num_heads, num_kv_heads))))
    parts = triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads)
    q = qkv_TP.new_empty(num_tokens, num_heads, head_dim)
    q_gain, k_gain = gains if gains is not None else (qkv_TP, qkv_TP)
    fresh_k, fresh_v = fresh if fresh is not None else (qkv_TP, qkv_TP)
    _qk_rope_write_int8_kernel[(num_tokens, parts)](
        qkv_TP, q_gain, k_gain, cos_PE, sin_PE, positions_T, sink.slot_map, q,
        sink.k_shift, sink.k_factor, sink.k, sink.v, sink.k_scale, sink.v_scale,
        fresh_k, fresh_v, eps,
        qkv_TP.stride(0), sink.k.stride(0), sink.k.stride(1), sink.k_scale.stride(0),
        NUM_Q=num_heads, NUM_KV=num_kv_heads, D=head_dim, BLOCK=sink.block_size, HEADS=heads,
        LARGEST=sink.max_code, NORM=gains is not None, HAS_FRESH=fresh is not None, num_warps=2,
        **early(q.device),
        # Contracted into fma.f16 or fma.bf16, a product would lose the rounding of the plain nodes.
        enable_fp_fusion=False,
    )  # fmt: skip
    return q
