"""Causal attention of a short lone prompt over its own keys and values.

FlashAttention-2 (Dao, 2023) over contiguous keys. cuDNN, which is the fastest for long prompts,
clears a counter first, and starts only when the kernel in front of it has ended: between the
kernels of a prompt of 128 tokens that is half of its time. On an H200, 16 query heads of 128 over
8, a layer's attention takes, in µs behind a norm, this and cuDNN: 128 tokens 3.5 and 7.7, 512 8.5
and 13.3, 768 11.8 and 17.0, 1,024 17.6 and 20.3, 1,152 22.4 and 25.5. It needs no plan for a new
length either.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from plugins.device_limits import shared_bytes
from plugins.early_launch import after_previous, early
from plugins.kv.kernels.paging import softmax_step
from plugins.kv.kernels.prefill import Launch

if TYPE_CHECKING:
    from torch import Tensor

_MOST_TOKENS, _MOST_ROWS = 1152, 1152 * 16  # rows: tokens of all query heads
_NARROW_TOKENS = 160  # up to here fewer keys a step are faster


@triton.jit
def _fresh_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, num_tokens, scale_log2, stride_q_token, stride_q_head,
    GROUP: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    head = tl.program_id(0)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * TILE_M  # the longest start first
    query = first + tl.arange(0, TILE_M)
    dim = tl.arange(0, D_PADDED)
    is_query = (query < num_tokens)[:, None] & (dim < D)[None, :]
    q_at = query[:, None] * stride_q_token + head * stride_q_head + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=is_query, other=0.0)
    kv_stride = tl.num_programs(0) // GROUP * D
    kv_head = head // GROUP * D
    top = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    acc = tl.zeros((TILE_M, D_PADDED), tl.float32)
    for start in range(0, tl.minimum(first + TILE_M, num_tokens), TILE_N):
        key = start + tl.arange(0, TILE_N)
        at = key[:, None] * kv_stride + kv_head + dim[None, :]
        mask = (key < num_tokens)[:, None] & (dim < D)[None, :]
        k = tl.load(k_ptr + at, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(key[None, :] <= query[:, None], scores, float("-inf"))
        v = tl.load(v_ptr + at, mask=mask, other=0.0)
        acc, top, total = softmax_step(acc, top, total, scores, v)
    out_at = (query[:, None] * tl.num_programs(0) + head) * D + dim[None, :]
    tl.store(out_ptr + out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_query)


def _launch(num_tokens: int, head_dim_padded: int, element_size: int, room: int) -> Launch:
    """As many tiles of keys and values on their way as `room` bytes of shared memory hold."""
    if element_size == 4:  # without tensor cores; for checking, not for speed
        return Launch(32, 32, 4, 2) if head_dim_padded <= 64 else Launch(16, 16, 4, 2)
    tile_n = 32 if head_dim_padded > 128 else 64 if num_tokens <= _NARROW_TOKENS else 128
    launch = Launch(64, tile_n, 4, 3)
    num_rows = launch.tile_m + 2 * launch.num_stages * launch.tile_n
    fits = num_rows * head_dim_padded * element_size <= room
    return launch if fits else launch._replace(num_stages=2)


def suits_fresh(q_THD: Tensor) -> bool:
    """Whether this kernel is the faster one, by what was measured and is less than that. Float32
    is left to torch: tensor cores have nothing to give there."""
    num_tokens, num_heads, head_dim = q_THD.shape
    few = num_tokens <= _MOST_TOKENS and num_tokens * num_heads <= _MOST_ROWS
    return few and head_dim <= 128 and q_THD.element_size() == 2


def fresh_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, scale: float) -> Tensor:
    """Attention in which query t sees keys 0..t, [T, H, D], contiguous.

    k and v are contiguous and finite, those of padding, too; heads of q may lie anywhere, their
    elements side by side. `scale` multiplies q·k. Accumulates in float32.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    padded = triton.next_power_of_2(head_dim)
    launch = _launch(num_tokens, padded, q_THD.element_size(), shared_bytes(q_THD.device))
    out = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    _fresh_kernel[(num_heads, triton.cdiv(num_tokens, launch.tile_m))](
        q_THD, k_TKD, v_TKD, out, num_tokens, scale * math.log2(math.e),
        q_THD.stride(0), q_THD.stride(1),
        GROUP=num_heads // k_TKD.shape[1], D=head_dim, D_PADDED=padded, TILE_M=launch.tile_m,
        TILE_N=launch.tile_n, num_warps=launch.num_warps, num_stages=launch.num_stages,
        **early(out.device),
    )  # fmt: skip
    return out


def fresh_attention_reference(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, scale: float
) -> Tensor:
    """What `fresh_attention` returns, in float32."""
    from plugins.kv.kernels.decode import attention_reference

    return attention_reference(q_THD, k_TKD, v_TKD, scale)
