"""Causal attention of prompt chunks over INT8 codes, on tiles chosen by the host.

Codes are converted to the dtype of the queries where they are read, which is exact in all of them;
scales stay outside of both products. Only Q times the factors of the keys is rounded once more.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from plugins.kv.kernels.decode_int8 import dequantized
from plugins.kv.kernels.paging import block_ids, position_offsets, token_offsets
from plugins.kv.kernels.prefill import Launch, prefill_attention_reference
from plugins.kv.kernels.tiles import TILE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


@triton.jit
def _prefill_int8_kernel(
    q_ptr, factor_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, slots_ptr,
    query_start_ptr, lens_ptr, tiles_ptr, out_ptr, scale_log2,
    stride_q_token, stride_q_head, stride_block, stride_kv_head, stride_scale_block, stride_table,
    stride_out,
    GROUP: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.load(tiles_ptr + 2 * tl.program_id(1))
    if row < 0:
        return
    first = tl.load(tiles_ptr + 2 * tl.program_id(1) + 1) + tl.program_id(2) * TILE_M
    token0 = tl.load(query_start_ptr + row)
    num_queries = tl.load(query_start_ptr + row + 1) - token0
    if first >= num_queries:
        return
    length = tl.load(lens_ptr + row)
    context = length - num_queries  # position of the row's first query
    slot = tl.load(slots_ptr + row)
    table_row = table_ptr + slot.to(tl.int64) * stride_table
    stop = tl.minimum(context + first + TILE_M, length)
    ids = block_ids(table_row, slot, 0, stop, BLOCK, TILE_N)

    kv_head = head // GROUP
    query = first + tl.arange(0, TILE_M)
    dim = tl.arange(0, D_PADDED)
    is_dim = (dim < D)[None, :]
    token = (token0 + query).to(tl.int64)
    is_query = (query < num_queries)[:, None] & is_dim
    q_at = q_ptr + token[:, None] * stride_q_token + head * stride_q_head + dim[None, :]
    q = tl.load(q_at, mask=is_query, other=0.0)
    dtype: tl.constexpr = q.dtype
    factor = tl.load(factor_ptr + kv_head * D + dim[None, :], mask=is_dim, other=0.0)
    q = (q.to(tl.float32) * factor).to(dtype)

    k_head = k_ptr + kv_head.to(tl.int64) * stride_kv_head
    v_head = v_ptr + kv_head.to(tl.int64) * stride_kv_head
    k_scale_head = k_scale_ptr + kv_head * BLOCK
    v_scale_head = v_scale_ptr + kv_head * BLOCK
    top = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    acc = tl.zeros((TILE_M, D_PADDED), tl.float32)
    position = context + query
    for start in range(0, stop, TILE_N):
        # Nothing is masked by position: see decode_int8. Key 0 is seen by all queries, so that no
        # maximum stays -inf.
        k_at = token_offsets(ids, start, stride_block, BLOCK, TILE_N, D)[:, None] + dim[None, :]
        v_at = position_offsets(ids, start, stride_block, BLOCK, TILE_N)
        v_at = v_at[None, :] + dim[:, None] * BLOCK
        scale_at = position_offsets(ids, start, stride_scale_block, BLOCK, TILE_N)
        ids = block_ids(table_row, slot, start + TILE_N, stop, BLOCK, TILE_N)
        key = start + tl.arange(0, TILE_N)
        if D == D_PADDED:
            k = tl.load(k_head + k_at)
        else:
            k = tl.load(k_head + k_at, mask=is_dim, other=0)
        k_scale = tl.load(k_scale_head + scale_at) * scale_log2
        scores = tl.dot(q, tl.trans(k.to(dtype)), input_precision="ieee") * k_scale[None, :]
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        top = new_top
        total = total * shrink + tl.sum(weights, 1)
        if D == D_PADDED:
            v = tl.load(v_head + v_at)
        else:
            v = tl.load(v_head + v_at, mask=(dim < D)[:, None], other=0)
        v_scale = tl.where(key < stop, tl.load(v_scale_head + scale_at), 0.0)
        if dtype == tl.float16:  # small weights times small scales would fall below its range
            v = v.to(tl.float32) * v_scale[None, :]
        else:
            weights = weights * v_scale[None, :]
        acc = tl.dot(
            weights.to(dtype), tl.trans(v.to(dtype)), acc * shrink[:, None], input_precision="ieee"
        )

    out_at = out_ptr + token[:, None] * stride_out + head * D + dim[None, :]
    tl.store(out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_query)


def _launch(head_dim_padded: int, element_size: int, block_size: int) -> Launch:
    """Sizes that keep sums, scores and converted codes in registers; a test counts spills."""
    if element_size == 4:  # without tensor cores; for checking, not for speed
        return Launch(32, 32, 4, 1) if head_dim_padded <= 64 else Launch(16, 16, 4, 1)
    if block_size % 4 or head_dim_padded > 128:  # values in single bytes come through registers
        return Launch(64, 32, 8, 3)
    return Launch(128, 64, 4 if head_dim_padded <= 64 else 8, 3)


def prefill_int8(
    q_THD: Tensor,
    factor_KD: Tensor,
    codes: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    table: Tensor,
    slots_R: Tensor,
    query_start_R1: Tensor,
    seq_lens_R: Tensor,
    tiles: Tensor,
    *,
    block_size: int,
    scale: float,
    out: Tensor,
) -> None:
    """Causal attention of the rows that `tiles` names over what is stored for them, into `out`.

    Codes, scales and `factor` are as in plugins.kv.kernels.decode_int8.decode_int8, all else is as
    in plugins.kv.kernels.prefill.prefill_attention.
    """
    num_heads, head_dim = q_THD.shape[1:]
    (k, v), (k_scale, v_scale) = codes, scales
    padded = triton.next_power_of_2(head_dim)
    launch = _launch(padded, q_THD.element_size(), block_size)
    # Heads run fastest over the grid: all heads of the longest tile start before any shorter one.
    _prefill_int8_kernel[(num_heads, tiles.shape[0], TILE // launch.tile_m)](
        q_THD, factor_KD, k, v, k_scale, v_scale, table, slots_R, query_start_R1, seq_lens_R, tiles,
        out, scale * math.log2(math.e),
        q_THD.stride(0), q_THD.stride(1), k.stride(0), k.stride(1), k_scale.stride(0),
        table.stride(0), out.stride(0),
        GROUP=num_heads // k.shape[1], D=head_dim, D_PADDED=padded, BLOCK=block_size,
        TILE_M=launch.tile_m, TILE_N=launch.tile_n,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip


def prefill_int8_reference(
    q_THD: Tensor,
    factor_KD: Tensor,
    codes: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    table: Tensor,
    slots_R: Tensor,
    query_start_R1: Tensor,
    seq_lens_R: Tensor,
    rows: Iterable[int],
    *,
    block_size: int,
    scale: float,
) -> Tensor:
    """What `prefill_int8` writes for `rows`, float32 [T, H, D]; NaN at other tokens."""
    k, v = dequantized(factor_KD, codes, scales)
    return prefill_attention_reference(
        q_THD, k, v, table, slots_R, query_start_R1, seq_lens_R, rows,
        block_size=block_size, scale=scale,
    )  # fmt: skip
