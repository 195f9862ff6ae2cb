"""From the packed projection to rotated queries, and keys and values in the cache, at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from core.model import rms_norm, rotate
from plugins.early_launch import early, let_next_start, wait_for_previous

if TYPE_CHECKING:
    from torch import Tensor

ELEMENTS = 1024  # of a program's heads; 64 threads load 16 bytes of bf16 a half each


@triton.jit
def gains_of(gain_ptr, half, e, NORM: tl.constexpr):
    """Both halves of the gain of QK-norm, [1, D / 2], to be loaded before the wait."""
    if NORM:
        gain_a, gain_b = tl.load(gain_ptr + e), tl.load(gain_ptr + half + e)
    else:
        gain_a, gain_b = e, e
    return gain_a, gain_b


@triton.jit
def rotated(at, half, mask, gain_a, gain_b, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Both halves [HEADS, D / 2] of some heads, normed if asked, and rotated.

    Rounded wherever the plain nodes round.
    """
    a = tl.load(at, mask=mask, other=0.0)
    b = tl.load(at + half, mask=mask, other=0.0)
    dtype: tl.constexpr = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        gain_a, gain_b = gain_a.to(tl.float32), gain_b.to(tl.float32)
        a = (gain_a * (a * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        b = (gain_b * (b * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    a_cos, a_sin = (a * cos).to(dtype).to(tl.float32), (a * sin).to(dtype).to(tl.float32)
    b_cos, b_sin = (b * cos).to(dtype).to(tl.float32), (b * sin).to(dtype).to(tl.float32)
    return (a_cos - b_sin).to(dtype), (b_cos + a_sin).to(dtype)


@triton.jit
def _qk_rope_write_kernel(
    qkv_ptr, q_gain_ptr, k_gain_ptr, cos_ptr, sin_ptr, positions_ptr, slot_map_ptr, q_ptr,
    k_cache_ptr, v_cache_ptr, fresh_k_ptr, fresh_v_ptr, eps,
    stride_qkv, stride_block, stride_kv_head,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr, NORM: tl.constexpr, HAS_FRESH: tl.constexpr, PDL: tl.constexpr,
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
        gain_a, gain_b = gains_of(k_gain_ptr, half, e, NORM)
        wait_for_previous(PDL)
        head = ((part - q_parts) * HEADS + tl.arange(0, HEADS))[:, None]
        mask = head < NUM_KV
        k_at = row + NUM_Q * D + head * D + e
        v_at = k_at + NUM_KV * D
        v_a = tl.load(v_at, mask=mask)
        v_b = tl.load(v_at + half, mask=mask)
        k_a, k_b = rotated(k_at, half, mask, gain_a, gain_b, cos, sin, eps, D, NORM)
        to = (place // BLOCK).to(tl.int64) * stride_block + (place % BLOCK) * D
        to = to + head.to(tl.int64) * stride_kv_head + e
        tl.store(k_cache_ptr + to, k_a, mask=mask)
        tl.store(k_cache_ptr + to + half, k_b, mask=mask)
        tl.store(v_cache_ptr + to, v_a, mask=mask)
        tl.store(v_cache_ptr + to + half, v_b, mask=mask)
        if HAS_FRESH:
            fresh = token * (NUM_KV * D) + head * D + e
            tl.store(fresh_k_ptr + fresh, k_a, mask=mask)
            tl.store(fresh_k_ptr + fresh + half, k_b, mask=mask)
            tl.store(fresh_v_ptr + fresh, v_a, mask=mask)
            tl.store(fresh_v_ptr + fresh + half, v_b, mask=mask)


def qk_rope_write(
    qkv_TP: Tensor,
    gains: tuple[Tensor, Tensor] | None,
    cos_PE: Tensor,
    sin_PE: Tensor,
    positions_T: Tensor,
    caches: tuple[Tensor, Tensor],
    slot_map_T: Tensor,
    fresh: tuple[Tensor, Tensor] | None,
    *,
    num_heads: int,
    block_size: int,
    eps: float,
) -> Tensor:
    """Rotated queries, contiguous [T, H, D]; keys and values go into the caches and `fresh`.

    `qkv` is [T, (H + 2 K) D] with rows of unit stride. `gains` are those of QK-norm, [D] each. cos
    and sin are float32 [P, D / 2]. Caches are a pair of [N, K, B, D], `slot_map` int32 [>= T] names
    places in them, `fresh` is a pair of contiguous [>= T, K, D]. D is a power of two.
    """
    num_tokens = qkv_TP.shape[0]
    k_cache, v_cache = caches
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    heads = max(1, min(ELEMENTS // head_dim, triton.next_power_of_2(max(num_heads, num_kv_heads))))
    parts = triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads)
    q = qkv_TP.new_empty(num_tokens, num_heads, head_dim)
    q_gain, k_gain = gains if gains is not None else (qkv_TP, qkv_TP)
    fresh_k, fresh_v = fresh if fresh is not None else (k_cache, v_cache)
    _qk_rope_write_kernel[(num_tokens, parts)](
        qkv_TP, q_gain, k_gain, cos_PE, sin_PE, positions_T, slot_map_T, q,
        k_cache, v_cache, fresh_k, fresh_v, eps,
        qkv_TP.stride(0), k_cache.stride(0), k_cache.stride(1),
        NUM_Q=num_heads, NUM_KV=num_kv_heads, D=head_dim, BLOCK=block_size, HEADS=heads,
        NORM=gains is not None, HAS_FRESH=fresh is not None, num_warps=2, **early(q.device),
        # Contracted into fma.f16 or fma.bf16, a product would lose the rounding of the plain nodes.
        enable_fp_fusion=False,
    )  # fmt: skip
    return q


def qk_rope_reference(
    qkv_TP: Tensor,
    gains: tuple[Tensor, Tensor] | None,
    cos_PE: Tensor,
    sin_PE: Tensor,
    positions_T: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) that `qk_rope_write` returns and stores, as the plain nodes compute them."""
    heads = qkv_TP.unflatten(-1, (-1, head_dim))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if gains is not None:
        q, k = rms_norm(q, gains[0], eps), rms_norm(k, gains[1], eps)
    q, k = rotate(cos_PE[positions_T.long()], sin_PE[positions_T.long()], q, k)
    return q, k, v
