"""Causal attention of prompt chunks over the cache, on tiles chosen by the host.

The algorithm is FlashAttention-2 (Dao, 2023).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from plugins.kv.kernels.decode import attention_reference, stored
from plugins.kv.kernels.paging import block_ids, softmax_step, token_offsets
from plugins.kv.kernels.tiles import TILE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


@triton.jit
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, slots_ptr, query_start_ptr, lens_ptr, tiles_ptr,
    out_ptr, scale_log2,
    stride_q_token, stride_q_head, stride_block, stride_kv_head, stride_table, stride_out,
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

    query = first + tl.arange(0, TILE_M)
    dim = tl.arange(0, D_PADDED)
    token = (token0 + query).to(tl.int64)
    is_query = (query < num_queries)[:, None] & (dim < D)[None, :]
    q_at = q_ptr + token[:, None] * stride_q_token + head * stride_q_head + dim[None, :]
    q = tl.load(q_at, mask=is_query, other=0.0)

    slot = tl.load(slots_ptr + row)
    table_row = table_ptr + slot.to(tl.int64) * stride_table
    k_head = k_ptr + (head // GROUP).to(tl.int64) * stride_kv_head
    v_head = v_ptr + (head // GROUP).to(tl.int64) * stride_kv_head
    top = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    acc = tl.zeros((TILE_M, D_PADDED), tl.float32)
    position = context + query
    stop = tl.minimum(context + first + TILE_M, length)
    # Tiles below `diagonal` are seen whole by every query here; key 0 is seen by all, so no maximum
    # stays -inf.
    diagonal = (context + first + 1) // TILE_N * TILE_N
    ids = block_ids(table_row, slot, 0, stop, BLOCK, TILE_N)
    for start in range(0, diagonal, TILE_N):
        offsets = token_offsets(ids, start, stride_block, BLOCK, TILE_N, D)[:, None] + dim[None, :]
        ids = block_ids(table_row, slot, start + TILE_N, stop, BLOCK, TILE_N)
        if D == D_PADDED:
            k = tl.load(k_head + offsets)
        else:
            k = tl.load(k_head + offsets, mask=(dim < D)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if D == D_PADDED:
            v = tl.load(v_head + offsets)
        else:
            v = tl.load(v_head + offsets, mask=(dim < D)[None, :], other=0.0)
        acc, top, total = softmax_step(acc, top, total, scores, v)
    for start in range(diagonal, stop, TILE_N):
        offsets = token_offsets(ids, start, stride_block, BLOCK, TILE_N, D)[:, None] + dim[None, :]
        ids = block_ids(table_row, slot, start + TILE_N, stop, BLOCK, TILE_N)
        key = start + tl.arange(0, TILE_N)
        mask = (key < stop)[:, None] & (dim < D)[None, :]
        k = tl.load(k_head + offsets, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        v = tl.load(v_head + offsets, mask=mask, other=0.0)
        acc, top, total = softmax_step(acc, top, total, scores, v)

    out_at = out_ptr + token[:, None] * stride_out + head * D + dim[None, :]
    tl.store(out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_query)


class Launch(NamedTuple):
    """Queries and keys of a program's tile, warps, pipeline stages."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int


def _launch(head_dim_padded: int, element_size: int) -> Launch:
    """Sizes that keep accumulator, scores and addresses in registers; a test counts spills."""
    if element_size == 4:  # without tensor cores; for checking, not for speed
        return Launch(32, 32, 4, 2) if head_dim_padded <= 64 else Launch(16, 16, 4, 2)
    if head_dim_padded <= 64:
        return Launch(128, 64, 4, 3)
    if head_dim_padded == 128:
        return Launch(128, 64, 8, 3)
    return Launch(64, 32, 4, 3)


def prefill_attention(
    q_THD: Tensor,
    k_NKBD: Tensor,
    v_NKBD: Tensor,
    table: Tensor | None,
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

    `tiles` int32 [n, 2] comes from `fill_tiles`; entries of -1 cost a program that exits at once.
    Query i of a row with n queries and a context of L = seq_lens[r] stands at position L - n + i,
    and sees positions up to its own. Caches, `table`, `scale` and `out` are as in
    `decode_attention`; other rows are left untouched.
    """
    num_heads, head_dim = q_THD.shape[1:]
    padded = triton.next_power_of_2(head_dim)
    launch = _launch(padded, k_NKBD.element_size())
    # Heads run fastest over the grid: all heads of the longest tile start before any shorter one.
    _prefill_kernel[(num_heads, tiles.shape[0], TILE // launch.tile_m)](
        q_THD, k_NKBD, v_NKBD, slots_R if table is None else table, slots_R, query_start_R1,
        seq_lens_R, tiles, out, scale * math.log2(math.e),
        q_THD.stride(0), q_THD.stride(1), k_NKBD.stride(0), k_NKBD.stride(1),
        0 if table is None else table.stride(0), out.stride(0),
        GROUP=num_heads // k_NKBD.shape[1], D=head_dim, D_PADDED=padded,
        BLOCK=0 if table is None else block_size, TILE_M=launch.tile_m, TILE_N=launch.tile_n,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip


def prefill_attention_reference(
    q_THD: Tensor,
    k_NKBD: Tensor,
    v_NKBD: Tensor,
    table: Tensor | None,
    slots_R: Tensor,
    query_start_R1: Tensor,
    seq_lens_R: Tensor,
    rows: Iterable[int],
    *,
    block_size: int,
    scale: float,
) -> Tensor:
    """What `prefill_attention` writes for `rows`, float32 [T, H, D]; NaN at other tokens."""
    out = torch.full(q_THD.shape, torch.nan, device=q_THD.device)
    for row in rows:
        lo, hi = int(query_start_R1[row]), int(query_start_R1[row + 1])
        slot, length = int(slots_R[row]), int(seq_lens_R[row])
        k, v = (stored(c, table, slot, length, block_size) for c in (k_NKBD, v_NKBD))
        out[lo:hi] = attention_reference(q_THD[lo:hi], k, v, scale)
    return out
