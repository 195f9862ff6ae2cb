"""From (slot, position) of every token of a step to its place in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

_TOKENS = 256  # a program


@triton.jit(do_not_specialize=["num_tokens"])
def _slot_map_kernel(
    positions_ptr, token_slots_ptr, table_ptr, out_ptr, num_tokens, stride_table,
    BLOCK: tl.constexpr, PAGED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = token < num_tokens
    position = tl.load(positions_ptr + token, mask=mask, other=0)
    slot = tl.load(token_slots_ptr + token, mask=mask, other=0)
    if PAGED:
        at = slot.to(tl.int64) * stride_table + position // BLOCK
        block = tl.load(table_ptr + at, mask=mask, other=0)
    else:
        block = slot
    tl.store(out_ptr + token, block * BLOCK + position % BLOCK, mask=mask)


def fill_slot_map(
    positions_T: Tensor, token_slots_T: Tensor, table: Tensor | None, block_size: int, out_T: Tensor
) -> None:
    """out[t] = block * block_size + offset of token t, int32; `out` may be longer than the step.

    `table` int32 [S + 1, W] names the blocks of every slot; None means that the one block of a slot
    is the slot. Padding needs no care here: it carries the trash slot, whose blocks are trash.
    """
    num_tokens = positions_T.numel()
    _slot_map_kernel[(triton.cdiv(num_tokens, _TOKENS),)](
        positions_T,
        token_slots_T,
        positions_T if table is None else table,
        out_T,
        num_tokens,
        0 if table is None else table.stride(0),
        BLOCK=block_size,
        PAGED=table is not None,
        TOKENS=_TOKENS,
    )


def slot_map_reference(
    positions_T: Tensor, token_slots_T: Tensor, table: Tensor | None, block_size: int
) -> Tensor:
    """What `fill_slot_map` writes, int32 [T]."""
    slots, positions = token_slots_T.long(), positions_T.long()
    blocks = slots if table is None else table[slots, positions // block_size].long()
    return (blocks * block_size + positions % block_size).to(torch.int32)
