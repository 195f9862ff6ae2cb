"""Scatter a step's keys and values into the cache, and into contiguous scratch if any."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

_ELEMENTS = 1024  # of K a program, and as many of V


@triton.jit(do_not_specialize=["num_rows"])
def _write_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_map_ptr, fresh_k_ptr, fresh_v_ptr, num_rows,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head, stride_block, stride_kv_head,
    HEADS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, HAS_FRESH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # token-major (token, head) pairs
    dim = tl.arange(0, D_PADDED)[None, :]
    is_row = row < num_rows
    mask = is_row[:, None] & (dim < D)
    head = row % HEADS
    token = (row // HEADS).to(tl.int64)
    k = tl.load(k_ptr + (token * stride_k_token + head * stride_k_head)[:, None] + dim, mask=mask)
    v = tl.load(v_ptr + (token * stride_v_token + head * stride_v_head)[:, None] + dim, mask=mask)
    place = tl.load(slot_map_ptr + token, mask=is_row, other=0)
    within = head.to(tl.int64) * stride_kv_head + (place % BLOCK) * D
    at = ((place // BLOCK).to(tl.int64) * stride_block + within)[:, None] + dim
    tl.store(k_cache_ptr + at, k, mask=mask)
    tl.store(v_cache_ptr + at, v, mask=mask)
    if HAS_FRESH:
        fresh_at = (row.to(tl.int64) * D)[:, None] + dim
        tl.store(fresh_k_ptr + fresh_at, k, mask=mask)
        tl.store(fresh_v_ptr + fresh_at, v, mask=mask)


def write_kv(
    k_TKD: Tensor,
    v_TKD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_map_T: Tensor,
    block_size: int,
    fresh: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Store keys and values [T, K, D] where `slot_map` int32 [>= T] says; unit stride in D.

    Caches are [N, K, B, D] with one stride of N and contiguous blocks; `fresh` is a pair of
    contiguous [>= T, K, D]. Tokens that share a place (padding, in the trash block) leave any one
    of them there.
    """
    num_tokens, num_heads, head_dim = k_TKD.shape
    padded = triton.next_power_of_2(head_dim)
    rows = max(1, _ELEMENTS // padded)
    fresh_k, fresh_v = fresh if fresh is not None else (k_cache, v_cache)
    _write_kernel[(triton.cdiv(num_tokens * num_heads, rows),)](
        k_TKD, v_TKD, k_cache, v_cache, slot_map_T, fresh_k, fresh_v, num_tokens * num_heads,
        k_TKD.stride(0), k_TKD.stride(1), v_TKD.stride(0), v_TKD.stride(1),
        k_cache.stride(0), k_cache.stride(1),
        HEADS=num_heads, D=head_dim, D_PADDED=padded, BLOCK=block_size,
        ROWS=rows, HAS_FRESH=fresh is not None, num_warps=4,
    )  # fmt: skip


def write_kv_reference(
    k_TKD: Tensor,
    v_TKD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_map_T: Tensor,
    block_size: int,
    fresh: tuple[Tensor, Tensor] | None = None,
) -> None:
    """What `write_kv` does, in plain torch."""
    num_tokens = k_TKD.shape[0]
    place = slot_map_T[:num_tokens].long()
    blocks, offsets = place // block_size, place % block_size
    k_cache[blocks, :, offsets] = k_TKD
    v_cache[blocks, :, offsets] = v_TKD
    if fresh is not None:
        fresh[0][:num_tokens] = k_TKD
        fresh[1][:num_tokens] = v_TKD
