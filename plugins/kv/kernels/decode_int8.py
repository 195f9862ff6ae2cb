"""Split-KV decode attention over INT8 codes, Q · K on the INT8 tensor cores.

Queries and softmax weights are written as a high and a low part, which fill the rows of a tile that
the query heads of one KV head leave free: nothing is lost to INT8 but what the cache lost.

- Q, times the factors of the keys, becomes s (high + low / 254) with s = max|q| / 127, where high
  is q / s and low 254 (q / s - high), both rounded: |high|, |low| <= 127, and what is left of a
  channel is at most s / 508, 2**-16 of the largest one. Rounding to bfloat16 loses 2**-9 of each,
  which is more in any score that the largest channel takes part in. Sums of products are exact in
  int32: 254 * 127 * 127 * 256 + 127 * 127 * 256 < 2**31.
- Weights, times the scales of the values, become bfloat16(w) + bfloat16(w - bfloat16(w)): 2**-17 of
  each is left. Codes are exact in bfloat16. Float32 goes without.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from plugins.device_limits import num_sms
from plugins.early_launch import early, let_next_start, prefetch, wait_for_previous
from plugins.kv.int8_storage import dequantize
from plugins.kv.kernels.decode import decode_attention_reference
from plugins.kv.kernels.paging import block_ids, position_offsets, token_offsets
from plugins.kv.kernels.splits import choose_num_splits, is_idle, merge_if_last, parts_of
from plugins.kv.kernels.write_int8 import rint

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit(do_not_specialize=["num_splits"])
def _decode_int8_kernel(
    q_ptr, factor_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, slots_ptr, lens_ptr,
    num_decodes_ptr, out_ptr, partial_ptr, lse_ptr, arrivals_ptr, scale_log2, num_splits,
    stride_q_token, stride_q_head, stride_block, stride_kv_head, stride_scale_block, stride_table,
    stride_out,
    GROUP: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    HALF: tl.constexpr, TILE_N: tl.constexpr, LINES: tl.constexpr, SPLIT: tl.constexpr,
    DTYPE: tl.constexpr, MERGES: tl.constexpr, GROUP_PADDED: tl.constexpr,
    SPLITS_PADDED: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    # The way to the first keys is the longest: a row's slot, its blocks, then K.
    num_decodes, length = tl.load(num_decodes_ptr), tl.load(lens_ptr + row)
    slot = tl.load(slots_ptr + row)
    per_split = tl.cdiv(tl.cdiv(length, num_splits), TILE_N) * TILE_N
    begin = split * per_split
    stop = tl.minimum(begin + per_split, length)
    table_row = table_ptr + slot.to(tl.int64) * stride_table
    ids = block_ids(table_row, slot, begin, stop, BLOCK, TILE_N)
    k_head = k_ptr + kv_head.to(tl.int64) * stride_kv_head
    v_head = v_ptr + kv_head.to(tl.int64) * stride_kv_head
    k_scale_head = k_scale_ptr + kv_head * BLOCK
    v_scale_head = v_scale_ptr + kv_head * BLOCK
    if PDL:  # the first tile is on its way to L2 meanwhile: of whole blocks V's lines are K's
        lines = tl.arange(0, LINES) * 128
        first = token_offsets(ids, begin, stride_block, BLOCK, TILE_N, D)
        first = tl.where(begin + tl.arange(0, TILE_N) < stop, first, 0)
        prefetch(k_head + first[:, None] + lines[None, :])
        prefetch(v_head + first[:, None] + lines[None, :])
        scales = position_offsets(ids, begin, stride_scale_block, BLOCK, TILE_N)
        prefetch(k_scale_head + scales)
        prefetch(v_scale_head + scales)
    dim = tl.arange(0, D_PADDED)
    is_dim = (dim < D)[None, :]
    factor = tl.load(factor_ptr + kv_head * D + dim[None, :], mask=is_dim, other=0.0)
    wait_for_previous(PDL)
    if row >= num_decodes:
        return
    if SPLIT:
        if is_idle(begin, stop, split, MERGES):
            return

    # Rows below HALF are the high parts, the others the low parts of the same heads.
    part = tl.arange(0, 2 * HALF)
    is_high = (part < HALF)[:, None]
    heads = kv_head * GROUP + part % HALF
    q_at = q_ptr + row.to(tl.int64) * stride_q_token + heads[:, None] * stride_q_head + dim[None, :]
    q = tl.load(q_at, mask=(part % HALF < GROUP)[:, None] & is_dim, other=0.0).to(tl.float32)
    q = q * factor
    largest = tl.max(tl.abs(q), 1)
    q = q * (127.0 / tl.where(largest > 0, largest, 1.0))[:, None]
    q_high = rint(q)
    q = tl.where(is_high, q_high, rint((q - q_high) * 254.0)).to(tl.int8)
    q_scale = tl.max(tl.reshape(largest, (2, HALF)), 0) * (scale_log2 / (127.0 * 254.0))

    top = tl.full((HALF,), float("-inf"), tl.float32)
    sums = tl.zeros((HALF, TILE_N), tl.float32)  # of every TILE_N-th weight: added up at the end
    acc = tl.zeros((2 * HALF, D_PADDED), tl.float32)
    for start in range(begin, stop, TILE_N):
        # Nothing is masked by position, which would split the copies of V and of the scales into
        # single elements: the block of position `stop` - 1 is whole, later ones are the trash
        # block, and what they hold is never selected.
        k_at = token_offsets(ids, start, stride_block, BLOCK, TILE_N, D)[:, None] + dim[None, :]
        v_at = position_offsets(ids, start, stride_block, BLOCK, TILE_N)
        v_at = v_at[None, :] + dim[:, None] * BLOCK
        scale_at = position_offsets(ids, start, stride_scale_block, BLOCK, TILE_N)
        ids = block_ids(table_row, slot, start + TILE_N, stop, BLOCK, TILE_N)
        if D == D_PADDED:
            k = tl.load(k_head + k_at)
        else:
            k = tl.load(k_head + k_at, mask=is_dim, other=0)
        k_scale = tl.load(k_scale_head + scale_at)
        products = tl.dot(q, tl.trans(k), out_dtype=tl.int32)
        products = tl.where(is_high, products * 254, products)
        products = tl.sum(tl.reshape(products, (2, HALF, TILE_N)), 0)
        is_key = (start + tl.arange(0, TILE_N) < stop)[None, :]
        scores = products.to(tl.float32) * q_scale[:, None] * k_scale[None, :]
        scores = tl.where(is_key, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        top = new_top
        sums = sums * shrink[:, None] + weights
        if D == D_PADDED:
            v = tl.load(v_head + v_at)
        else:
            v = tl.load(v_head + v_at, mask=(dim < D)[:, None], other=0)
        v_scale = tl.load(v_scale_head + scale_at)
        weights = tl.where(is_key, weights * v_scale[None, :], 0.0)
        twice = tl.broadcast_to(weights[None, :, :], (2, HALF, TILE_N))
        weights = tl.reshape(twice, (2 * HALF, TILE_N))
        high = weights.to(DTYPE)
        weights = tl.where(is_high, high, (weights - high.to(tl.float32)).to(DTYPE))
        shrink = tl.reshape(tl.broadcast_to(shrink[None, :], (2, HALF)), (2 * HALF,))
        acc = acc * shrink[:, None]
        acc = tl.dot(weights, tl.trans(v.to(DTYPE)), acc, input_precision="ieee")

    total = tl.sum(sums, 1)
    divisor = tl.where(total > 0, total, 1.0)  # a row of length 0 gives zeros
    result = tl.sum(tl.reshape(acc, (2, HALF, D_PADDED)), 0) / divisor[:, None]
    member = tl.arange(0, HALF)
    heads = kv_head * GROUP + member
    is_query = (member < GROUP)[:, None] & is_dim
    if SPLIT:
        at = (row * tl.num_programs(1) * GROUP + heads) * num_splits + split
        tl.store(partial_ptr + at[:, None] * D + dim[None, :], result, mask=is_query)
        tl.store(lse_ptr + at, top + tl.log2(divisor), mask=member < GROUP)
        if MERGES:
            merge_if_last(
                partial_ptr, lse_ptr, arrivals_ptr, out_ptr, row, kv_head, num_splits, length,
                per_split, stride_out, GROUP, GROUP_PADDED, D, D_PADDED, SPLITS_PADDED, AT_ONCE,
            )  # fmt: skip
    else:
        out_at = out_ptr + row.to(tl.int64) * stride_out + heads[:, None] * D + dim[None, :]
        tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=is_query)


class Launch(NamedTuple):
    """Positions of a program's tile, warps, pipeline stages."""

    tile_n: int
    num_warps: int
    num_stages: int


def choose_launch(head_dim_padded: int, element_size: int, block_size: int) -> Launch:
    """For queries of this element size; tiles of 8 KB of K, so that four programs share an SM.

    Measured on an H200, 16 query and 8 KV heads of 128, context 1,088, µs with 1 / 2 / 4 warps: 193
    / 196 / 198 at batch 256, – / 55 / 57 at 64; a tile of 128 or four stages cost more.
    """
    if element_size == 4:  # without tensor cores for P · V; for checking, not for speed
        return Launch(32 if head_dim_padded <= 128 else 16, 4, 1)
    if block_size % 4:  # values come in single bytes, through registers
        return Launch(32, 4, 2)
    return Launch(max(32, min(128, 8 * 1024 // head_dim_padded)), 2, 3)


def decode_int8(
    q_THD: Tensor,
    factor_KD: Tensor,
    codes: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    table: Tensor,
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
    launch: Launch | None = None,
) -> None:
    """Attention of one query a row over the first seq_lens[r] positions of its slot, into `out`.

    `codes` are int8 k [N, K, B, D] and v [N, K, D, B], with one stride of N and contiguous blocks;
    `scales` float32 [N, K, B] of k and v. A key is codes · scale · factor; `factor` is float32
    [K, D], contiguous. Rows, `table`, `scale`, `out` and `arrivals` are as in
    plugins.kv.kernels.decode.decode_attention. Accumulates in float32.
    """
    num_heads, head_dim = q_THD.shape[1:]
    (k, v), (k_scale, v_scale) = codes, scales
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    padded = max(32, triton.next_power_of_2(head_dim))  # what an INT8 instruction sums over
    launch = launch or choose_launch(padded, q_THD.element_size(), block_size)
    if num_splits is None:
        # Half as many as in bfloat16: 55 µs against 69 at batch 64, 15.3 against 15.9 at 8.
        programs = num_rows * num_kv_heads
        num_splits = choose_num_splits(programs, num_sms(q_THD.device), num_kv_heads, per_sm=2)
    parts = parts_of(q_THD, num_rows, num_kv_heads, num_splits, arrivals)
    _decode_int8_kernel[(num_rows, num_kv_heads, num_splits)](
        q_THD, factor_KD, k, v, k_scale, v_scale, table, slots_R, seq_lens_R, num_decodes,
        out, parts.results, parts.lse, seq_lens_R if arrivals is None else arrivals,
        scale * math.log2(math.e), num_splits,
        q_THD.stride(0), q_THD.stride(1), k.stride(0), k.stride(1), k_scale.stride(0),
        table.stride(0), out.stride(0),
        GROUP=group, D=head_dim, D_PADDED=padded, BLOCK=block_size, HALF=8 if group <= 8 else 16,
        TILE_N=launch.tile_n, LINES=max(1, padded // 128), SPLIT=num_splits > 1,
        DTYPE=product_dtype(q_THD),
        **parts.constants(num_kv_heads, launch.num_warps), num_stages=launch.num_stages,
        **early(out.device),
    )  # fmt: skip
    parts.merge(seq_lens_R, num_decodes, out, launch.tile_n)


def product_dtype(q: Tensor) -> tl.dtype:
    """What codes and weights are multiplied in: it need not be the dtype of the model."""
    if q.element_size() == 4:
        return tl.float32
    return tl.float16 if q.device.type == "cpu" else tl.bfloat16  # the interpreter's is wrong


def decode_int8_reference(
    q_THD: Tensor,
    factor_KD: Tensor,
    codes: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    table: Tensor,
    slots_R: Tensor,
    seq_lens_R: Tensor,
    num_decodes: int,
    *,
    block_size: int,
    scale: float,
) -> Tensor:
    """What `decode_int8` writes for rows below `num_decodes`, float32 [num_decodes, H, D]."""
    k, v = dequantized(factor_KD, codes, scales)
    return decode_attention_reference(
        q_THD, k, v, table, slots_R, seq_lens_R, num_decodes, block_size=block_size, scale=scale
    )


def dequantized(
    factor_KD: Tensor, codes: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Keys, but for their shift, and values of a whole cache: float32 [N, K, B, D] each."""
    k, v = dequantize(codes[0], scales[0]), dequantize(codes[1].transpose(2, 3), scales[1])
    return k * factor_KD[:, None], v
