"""Device functions of the attention kernels: cache addresses of positions, the softmax step.

A *tile* is `TILE_N` consecutive positions that start at a multiple of `TILE_N`. `BLOCK` is the
block size, or 0 for a contiguous cache, where the one block of a sequence is its slot. Block ids
are loaded once a block wherever tiles and blocks nest, else once a token.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_ids(table_row, slot, start, stop, BLOCK: tl.constexpr, TILE_N: tl.constexpr):
    """Ids of the blocks that hold positions start .. start + TILE_N - 1; 0 from `stop` on.

    A scalar where a block holds whole tiles, [TILE_N // BLOCK] where a tile holds whole blocks,
    else [TILE_N].
    """
    if BLOCK == 0:
        ids = slot
    elif BLOCK % TILE_N == 0:
        ids = tl.load(table_row + start // BLOCK, mask=start < stop, other=0)
    elif TILE_N % BLOCK == 0:
        first = start // BLOCK + tl.arange(0, TILE_N // BLOCK)
        ids = tl.load(table_row + first, mask=first * BLOCK < stop, other=0)
    else:
        position = start + tl.arange(0, TILE_N)
        ids = tl.load(table_row + position // BLOCK, mask=position < stop, other=0)
    return ids


@triton.jit
def token_offsets(
    ids, start, stride_block, BLOCK: tl.constexpr, TILE_N: tl.constexpr, D: tl.constexpr
):
    """Element offsets [TILE_N] int64 of a tile's positions within one head of the cache."""
    lane = tl.arange(0, TILE_N)
    if BLOCK == 0:
        offsets = ids.to(tl.int64) * stride_block + (start + lane) * D
    elif BLOCK % TILE_N == 0:
        offsets = ids.to(tl.int64) * stride_block + (start % BLOCK + lane) * D
    elif TILE_N % BLOCK == 0:
        inner = tl.arange(0, BLOCK) * D
        nested = (ids.to(tl.int64) * stride_block)[:, None] + inner[None, :]
        # The reshape forgets that offsets are multiples of D; without that loads are not wide.
        offsets = tl.multiple_of(tl.reshape(nested, (TILE_N,)), 16)
    else:
        offsets = ids.to(tl.int64) * stride_block + ((start + lane) % BLOCK) * D
    return offsets


@triton.jit
def position_offsets(ids, start, stride_block, BLOCK: tl.constexpr, TILE_N: tl.constexpr):
    """As `token_offsets`, where neighbouring positions are neighbouring elements: [TILE_N] int64.

    `stride_block` is a multiple of BLOCK. With RUN the power of two in BLOCK, up to 16, loads of
    RUN elements are in one piece.
    """
    RUN: tl.constexpr = min(16, BLOCK & -BLOCK)
    lane = tl.arange(0, TILE_N)
    if BLOCK % TILE_N == 0:
        offsets = ids.to(tl.int64) * stride_block + (start % BLOCK + lane)
    elif TILE_N % BLOCK == 0:
        nested = (ids.to(tl.int64) * stride_block)[:, None] + tl.arange(0, BLOCK)[None, :]
        offsets = tl.reshape(nested, (TILE_N,))
    else:
        offsets = ids.to(tl.int64) * stride_block + (start + lane) % BLOCK
    return tl.max_contiguous(tl.multiple_of(offsets, RUN), RUN)


@triton.jit
def softmax_step(acc, top, total, scores, v):
    """One tile of the online softmax (Milakov, Gimelshein 2018).

    `scores` are in log2 units, masked ones -inf.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_top, total
