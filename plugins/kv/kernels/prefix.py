"""A chunk behind a prefix: the prefix in one piece, and attention to two parts made one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from plugins.kv.kernels.decode import stored

if TYPE_CHECKING:
    from torch import Tensor

_ELEMENTS = 2048  # of each tensor a program


@triton.jit(do_not_specialize=["num_rows"])
def _gather_prefix_kernel(
    k_cache_ptr, v_cache_ptr, table_ptr, slots_ptr, k_ptr, v_ptr, num_rows,
    stride_block, stride_kv_head, stride_table,
    HEADS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    PAGED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # position-major (position, head) pairs
    dim = tl.arange(0, D_PADDED)[None, :]
    is_row = row < num_rows
    mask = is_row[:, None] & (dim < D)
    head, position = row % HEADS, row // HEADS
    slot = tl.load(slots_ptr)
    if PAGED:
        at = table_ptr + slot.to(tl.int64) * stride_table + position // BLOCK
        block = tl.load(at, mask=is_row, other=0).to(tl.int64)
    else:
        block = slot.to(tl.int64)
    within = head.to(tl.int64) * stride_kv_head + (position % BLOCK) * D
    source = (block * stride_block + within)[:, None] + dim
    target = (row.to(tl.int64) * D)[:, None] + dim
    tl.store(k_ptr + target, tl.load(k_cache_ptr + source, mask=mask), mask=mask)
    tl.store(v_ptr + target, tl.load(v_cache_ptr + source, mask=mask), mask=mask)


def gather_prefix(
    k_NKBD: Tensor,
    v_NKBD: Tensor,
    table: Tensor | None,
    slots_R: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    *,
    block_size: int,
) -> None:
    """Copy keys and values of positions 0..S-1 of the slot `slots[0]` into contiguous [S, K, D].

    Caches and `table` are as in `decode_attention`; slot and blocks are read on the device.
    """
    num_tokens, num_heads, head_dim = k_SKD.shape
    padded = triton.next_power_of_2(head_dim)
    rows = max(1, _ELEMENTS // padded)
    _gather_prefix_kernel[(triton.cdiv(num_tokens * num_heads, rows),)](
        k_NKBD, v_NKBD, slots_R if table is None else table, slots_R, k_SKD, v_SKD,
        num_tokens * num_heads, k_NKBD.stride(0), k_NKBD.stride(1),
        0 if table is None else table.stride(0),
        HEADS=num_heads, D=head_dim, D_PADDED=padded, BLOCK=block_size, PAGED=table is not None,
        ROWS=rows, num_warps=4,
    )  # fmt: skip


def gather_prefix_reference(
    k_NKBD: Tensor,
    v_NKBD: Tensor,
    table: Tensor | None,
    slots_R: Tensor,
    num_tokens: int,
    *,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """What `gather_prefix` copies, [num_tokens, K, D] each."""
    given = table, int(slots_R[0]), num_tokens, block_size
    return stored(k_NKBD, *given), stored(v_NKBD, *given)


@triton.jit(do_not_specialize=["num_rows"])
def _merge_parts_kernel(
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, num_rows,
    stride_out_token, stride_out_head, stride_part_token, stride_part_head,
    stride_lse, stride_part_lse,
    HEADS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # token-major (token, head) pairs
    dim = tl.arange(0, D_PADDED)[None, :]
    is_row = row < num_rows
    mask = is_row[:, None] & (dim < D)
    head, token = row % HEADS, (row // HEADS).to(tl.int64)
    lse = tl.load(lse_ptr + head * stride_lse + token, mask=is_row, other=0.0)
    part_lse = tl.load(part_lse_ptr + head * stride_part_lse + token, mask=is_row, other=0.0)
    share = 1.0 / (1.0 + tl.exp(part_lse - lse))  # 0 where the exponential overflows
    out_at = out_ptr + (token * stride_out_token + head * stride_out_head)[:, None] + dim
    part_at = part_ptr + (token * stride_part_token + head * stride_part_head)[:, None] + dim
    out = tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    part = tl.load(part_at, mask=mask, other=0.0).to(tl.float32)
    merged = out * share[:, None] + part * (1.0 - share)[:, None]
    tl.store(out_at, merged.to(out_ptr.dtype.element_ty), mask=mask)


def merge_parts(out_THD: Tensor, lse_HT: Tensor, part_THD: Tensor, part_lse_HT: Tensor) -> None:
    """Attention to the union of two sets of keys, in place over `out`, from attention to each.

    `lse` and `part_lse` are float32, natural logarithms of the sums of exponentials, both finite
    and of unit stride in T; `out` and `part` have unit stride in D. Arithmetic is float32.
    """
    num_tokens, num_heads, head_dim = out_THD.shape
    padded = triton.next_power_of_2(head_dim)
    rows = max(1, _ELEMENTS // padded)
    _merge_parts_kernel[(triton.cdiv(num_tokens * num_heads, rows),)](
        out_THD, lse_HT, part_THD, part_lse_HT, num_tokens * num_heads,
        out_THD.stride(0), out_THD.stride(1), part_THD.stride(0), part_THD.stride(1),
        lse_HT.stride(0), part_lse_HT.stride(0),
        HEADS=num_heads, D=head_dim, D_PADDED=padded, ROWS=rows, num_warps=4,
    )  # fmt: skip


def merge_parts_reference(
    out_THD: Tensor, lse_HT: Tensor, part_THD: Tensor, part_lse_HT: Tensor
) -> Tensor:
    """What `merge_parts` leaves in `out`, float32 [T, H, D]."""
    share = (lse_HT - part_lse_HT).sigmoid().T[:, :, None]
    return out_THD.float() * share + part_THD.float() * (1 - share)
