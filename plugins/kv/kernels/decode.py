"""Decode attention, a row's context shared out among programs where rows are few.

The query heads of one KV head are the rows of one tile: keys and values are read once for all.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from plugins.device_limits import num_sms
from plugins.early_launch import early, let_next_start, prefetch, wait_for_previous
from plugins.kv.kernels.limits import MAX_GROUP
from plugins.kv.kernels.paging import block_ids, softmax_step, token_offsets
from plugins.kv.kernels.splits import choose_num_splits, is_idle, merge_if_last, parts_of

if TYPE_CHECKING:
    from torch import Tensor


class Residency(NamedTuple):
    """Tiles of `tile_elements` of K (bf16), fetched `num_stages` ahead: that `per_sm` programs
    share an SM."""

    tile_elements: int
    num_stages: int
    per_sm: int


WIDE, NARROW = Residency(8 * 1024, 3, 3), Residency(4 * 1024, 4, 4)


@triton.jit(do_not_specialize=["num_splits"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, slots_ptr, lens_ptr, num_decodes_ptr,
    out_ptr, partial_ptr, lse_ptr, arrivals_ptr, scale_log2, num_splits,
    stride_q_token, stride_q_head, stride_block, stride_kv_head, stride_table, stride_out,
    GROUP: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, LINES: tl.constexpr, SPLIT: tl.constexpr,
    MERGES: tl.constexpr, GROUP_PADDED: tl.constexpr, SPLITS_PADDED: tl.constexpr,
    AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_decodes, length = tl.load(num_decodes_ptr), tl.load(lens_ptr + row)
    slot = tl.load(slots_ptr + row)
    per_split = tl.cdiv(tl.cdiv(length, num_splits), TILE_N) * TILE_N
    begin = split * per_split
    stop = tl.minimum(begin + per_split, length)
    table_row = table_ptr + slot.to(tl.int64) * stride_table
    ids = block_ids(table_row, slot, begin, stop, BLOCK, TILE_N)
    k_head = k_ptr + kv_head.to(tl.int64) * stride_kv_head
    v_head = v_ptr + kv_head.to(tl.int64) * stride_kv_head
    if PDL:  # the first tile is on its way to L2 meanwhile
        lines = tl.arange(0, LINES) * (128 // k_ptr.dtype.element_ty.itemsize)
        first = token_offsets(ids, begin, stride_block, BLOCK, TILE_N, D)
        first = tl.where(begin + tl.arange(0, TILE_N) < stop, first, 0)
        prefetch(k_head + first[:, None] + lines[None, :])
        prefetch(v_head + first[:, None] + lines[None, :])
    wait_for_previous(PDL)
    if row >= num_decodes:
        return
    if SPLIT:
        if is_idle(begin, stop, split, MERGES):
            return

    member = tl.arange(0, TILE_M)
    dim = tl.arange(0, D_PADDED)
    heads = kv_head * GROUP + member
    is_query = (member < GROUP)[:, None] & (dim < D)[None, :]
    q_at = q_ptr + row.to(tl.int64) * stride_q_token + heads[:, None] * stride_q_head + dim[None, :]
    q = tl.load(q_at, mask=is_query, other=0.0)

    top = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    acc = tl.zeros((TILE_M, D_PADDED), tl.float32)
    for start in range(begin, stop, TILE_N):
        offsets = token_offsets(ids, start, stride_block, BLOCK, TILE_N, D)[:, None] + dim[None, :]
        # The next tile's ids travel while this tile is computed. Loaded where they are used, they
        # would sit between the pipeline and K and V, and halve how far ahead those are fetched.
        ids = block_ids(table_row, slot, start + TILE_N, stop, BLOCK, TILE_N)
        is_key = start + tl.arange(0, TILE_N) < stop
        mask = is_key[:, None] & (dim < D)[None, :]
        k = tl.load(k_head + offsets, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        v = tl.load(v_head + offsets, mask=mask, other=0.0)
        acc, top, total = softmax_step(acc, top, total, scores, v)

    divisor = tl.where(total > 0, total, 1.0)  # a row of length 0 gives zeros
    acc = acc / divisor[:, None]
    if SPLIT:
        at = (row * tl.num_programs(1) * GROUP + heads) * num_splits + split
        tl.store(partial_ptr + at[:, None] * D + dim[None, :], acc, mask=is_query)
        tl.store(lse_ptr + at, top + tl.log2(divisor), mask=member < GROUP)
        if MERGES:
            merge_if_last(
                partial_ptr, lse_ptr, arrivals_ptr, out_ptr, row, kv_head, num_splits, length,
                per_split, stride_out, GROUP, GROUP_PADDED, D, D_PADDED, SPLITS_PADDED, AT_ONCE,
            )  # fmt: skip
    else:
        out_at = out_ptr + row.to(tl.int64) * stride_out + heads[:, None] * D + dim[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=is_query)


def default_launch(num_rows: int, num_kv_heads: int, num_sms: int) -> tuple[int, Residency]:
    """Splits of a row's context, and how programs share an SM. On an H200 with 8 KV heads: 32 for
    one row, 7 for 8; from 25 rows to 98 whichever of one and two leaves the last wave fullest.

    For 1,088 tokens a row in bf16, µs, with the merge: 64 rows 69.9 in one wave of narrow tiles,
    73.5 in two and a half of wide ones and two splits, 80 in one and a third (their bytes: 67.3);
    32 rows 39.8 against 42.9; 48 rows in one wave of wide tiles 53.2, in two splits 56.2. From two
    full waves on they hardly differ (256 rows: 262.5 both), nor do the rows end together there.
    """
    programs = num_rows * num_kv_heads
    if 2 * programs < 3 * num_sms:
        return choose_num_splits(programs, num_sms, num_kv_heads, WIDE.per_sm), WIDE
    if programs >= 2 * WIDE.per_sm * num_sms:
        return 1, WIDE

    def fill(launch: tuple[int, Residency]) -> float:
        """Of the SMs over all waves, to a tenth: less is noise, and the first is the simplest."""
        waves = programs * launch[0] / (launch[1].per_sm * num_sms)
        return round(waves / math.ceil(waves), 1)

    return max(((1, WIDE), (1, NARROW), (2, WIDE), (2, NARROW)), key=fill)


def decode_attention(
    q_THD: Tensor,
    k_NKBD: Tensor,
    v_NKBD: Tensor,
    table: Tensor | None,
    slots_R: Tensor,
    seq_lens_R: Tensor,
    num_decodes: Tensor,
    *,
    block_size: int,
    scale: float,
    num_rows: int,
    out: Tensor,
    arrivals: Tensor | None = None,
    num_splits: int | None = None,
) -> None:
    """Attention of one query a row over the first seq_lens[r] positions of its slot, into `out`.

    Row r is token r of q [T, H, D] and of `out` ([T, H, D] or [T, H * D], heads contiguous). Rows
    from the device scalar `num_decodes` int32 [1] on are left untouched; rows of length 0 below it
    become zeros. Caches are [N, K, B, D] with one stride of N and contiguous blocks; `table` int32
    [S + 1, W] names the blocks of every slot, None means that the one block of a slot is the slot.
    `scale` multiplies q·k, `arrivals` is that of plugins.kv.kernels.splits.parts_of. Accumulates in
    float32.
    """
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads = k_NKBD.shape[1]
    padded = triton.next_power_of_2(head_dim)
    chosen, residency = default_launch(num_rows, num_kv_heads, num_sms(q_THD.device))
    num_splits = num_splits or chosen
    tile_n = _tile_n(residency.tile_elements, padded, k_NKBD.element_size())
    parts = parts_of(q_THD, num_rows, num_kv_heads, num_splits, arrivals)
    _decode_kernel[(num_rows, num_kv_heads, num_splits)](
        q_THD, k_NKBD, v_NKBD, slots_R if table is None else table, slots_R, seq_lens_R,
        num_decodes, out, parts.results, parts.lse, seq_lens_R if arrivals is None else arrivals,
        scale * math.log2(math.e), num_splits,
        q_THD.stride(0), q_THD.stride(1), k_NKBD.stride(0), k_NKBD.stride(1),
        0 if table is None else table.stride(0), out.stride(0),
        GROUP=num_heads // num_kv_heads, D=head_dim, D_PADDED=padded,
        BLOCK=0 if table is None else block_size, TILE_M=MAX_GROUP, TILE_N=tile_n,
        LINES=max(1, padded * k_NKBD.element_size() // 128), SPLIT=num_splits > 1,
        **parts.constants(num_kv_heads, num_warps=4), num_stages=residency.num_stages,
        **early(out.device),
    )  # fmt: skip
    parts.merge(seq_lens_R, num_decodes, out, tile_n)


def _tile_n(elements: int, head_dim_padded: int, element_size: int) -> int:
    if element_size == 4:
        elements //= 4  # float32 goes without tensor cores, where wide tiles spill registers
    return max(16, min(128, elements // head_dim_padded))


def stored(
    cache_NKBD: Tensor, table: Tensor | None, slot: int, length: int, block_size: int
) -> Tensor:
    """The first `length` positions of a slot as a copy [length, K, D], in plain torch."""
    if table is None:
        return cache_NKBD[slot, :, :length].transpose(0, 1)
    blocks = table[slot, : -(-length // block_size)].long()
    return cache_NKBD[blocks].transpose(1, 2).flatten(0, 1)[:length]


def attention_reference(q_nHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, scale: float) -> Tensor:
    """Causal attention of the last n of L positions, [n, H, D] in float32, in plain torch."""
    n, num_heads, _ = q_nHD.shape
    length, num_kv_heads, _ = k_LKD.shape
    k, v = (x.float().repeat_interleave(num_heads // num_kv_heads, 1) for x in (k_LKD, v_LKD))
    scores = torch.einsum("nhd,lhd->hnl", q_nHD.float(), k) * scale
    positions = torch.arange(length, device=k.device)
    hidden = positions[None, :] > positions[length - n :, None]
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def decode_attention_reference(
    q_THD: Tensor,
    k_NKBD: Tensor,
    v_NKBD: Tensor,
    table: Tensor | None,
    slots_R: Tensor,
    seq_lens_R: Tensor,
    num_decodes: int,
    *,
    block_size: int,
    scale: float,
) -> Tensor:
    """What `decode_attention` writes for rows below `num_decodes`, float32 [num_decodes, H, D]."""
    out = torch.zeros(num_decodes, *q_THD.shape[1:], device=q_THD.device)
    for row in range(num_decodes):
        slot, length = int(slots_R[row]), int(seq_lens_R[row])
        if length:
            k, v = (stored(c, table, slot, length, block_size) for c in (k_NKBD, v_NKBD))
            out[row] = attention_reference(q_THD[row : row + 1], k, v, scale)[0]
    return out
