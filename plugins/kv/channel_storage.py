"""Codes with a scale for each channel of K over a block, and for groups of channels of V.

Channels of K differ in size by hundreds and stay as they are over tokens (a few carry the bias of
the projection), so keys are rounded by channel, over the tokens of a block; V has no such channels
and is rounded by token (both as in KIVI, arXiv:2402.02750). Codes of K therefore exist once their
block is full and are never made again; until then its keys lie in the *tail* of the slot, as they
came. A block that is shared is full, so that tails never are.

Shapes: L layers, N blocks, K key/value heads, B tokens a block, D head_dim, G groups of V, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from plugins.kv.affine import NUMBER_BYTES, decode, unpack
from plugins.kv.storage import Storage, overhead_bytes as _overhead_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from core.batch import Limits
    from core.facts import ModelFacts


class Layout(NamedTuple):
    """`bits` of a code, 8 or 4, and channels of V that share a scale, at most."""

    bits: int
    max_group: int

    def num_groups(self, facts: ModelFacts) -> int:
        """Groups of a head of V: the fewest that are alike and have at most `max_group`."""
        fewest = -(-facts.head_dim // self.max_group)
        return next(n for n in range(fewest, facts.head_dim + 1) if facts.head_dim % n == 0)

    def block_bytes(self, facts: ModelFacts, block_size: int) -> int:
        """Bytes of one block over all layers: codes, centres and steps."""
        codes = 2 * block_size * facts.head_dim * self.bits // 8
        numbers = 2 * (facts.head_dim + block_size * self.num_groups(facts))
        return facts.num_layers * facts.num_kv_heads * (codes + numbers * NUMBER_BYTES)


@dataclass(eq=False)
class ChannelStorage(Storage):
    """`k` and `v` uint8 [L, N, K, B, D * bits / 8]; what codes mean is in float16 beside them.

    `k_centre` and `k_step` are [L, N, K, 1, D], `v_centre` and `v_step` [L, N, K, B, G]. `tail` is
    [L, S + 1, K, B, D] in the model's dtype: keys of the block that a slot has not filled yet.
    `lengths` int32 [S + 1], on the host, says how many tokens of a slot are written, or will be by
    the step that has begun.
    """

    k_centre: Tensor
    k_step: Tensor
    v_centre: Tensor
    v_step: Tensor
    tail: Tensor
    lengths: NDArray[np.int32]
    bits: int
    dtype: torch.dtype

    def planes(self) -> tuple[Tensor, ...]:
        return self.k, self.v, self.k_centre, self.k_step, self.v_centre, self.v_step

    def save_tail(self, slot: int | None, num_tokens: int) -> tuple[Tensor, ...]:
        assert slot is not None, "only what runs can be saved"
        return (self.tail[:, slot, :, : num_tokens % self.block_size].cpu().clone(),)

    def restore_tail(self, slot: int | None, num_tokens: int, saved: tuple[Tensor, ...]) -> None:
        assert slot is not None, "only what runs can be restored"
        (tail,) = saved
        self.tail[:, slot, :, : tail.shape[2]] = tail.to(self.tail.device)
        self.lengths[slot] = num_tokens

    def gather(self, slot: int, layer: int, lo: int, hi: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [n, K, D] of positions lo..hi-1: of codes, and of the tail as it is."""
        positions = torch.arange(lo, hi, dtype=torch.int32, device=self.k.device)
        block, offset = self.blocks(torch.full_like(positions, slot), positions)
        codes = unpack(self.k[layer][block, :, offset], self.bits)
        centre, step = (x[layer][block, :, 0] for x in (self.k_centre, self.k_step))
        keys = decode(codes, centre, step, self.bits)
        is_open = positions >= int(self.lengths[slot]) // self.block_size * self.block_size
        keys[is_open] = self.tail[layer, slot][:, offset[is_open]].transpose(0, 1).float()
        packed, centre, step = (
            x[layer][block, :, offset] for x in (self.v, self.v_centre, self.v_step)
        )
        values = decode_groups(packed, centre, step, self.bits)
        return keys.to(self.dtype), values.to(self.dtype), positions

    def sink(self, layer: int) -> None:
        """None: only `write` knows when a block is full."""


def decode_groups(packed: Tensor, centre: Tensor, step: Tensor, bits: int) -> Tensor:
    """float32 [..., D] of packed codes and the [..., G] of their groups."""
    codes = unpack(packed, bits).unflatten(-1, (centre.shape[-1], -1))
    return decode(codes, centre[..., None], step[..., None], bits).flatten(-2)


def allocate(
    facts: ModelFacts,
    limits: Limits,
    device: torch.device,
    *,
    layout: Layout,
    num_blocks: int,
    block_size: int,
    table_width: int,
) -> ChannelStorage:
    """Zeroed storage for `num_blocks` blocks, the trash block counted."""
    shape = (facts.num_layers, num_blocks, facts.num_kv_heads, block_size)
    width = facts.head_dim * layout.bits // 8
    num_groups, num_slots = layout.num_groups(facts), limits.max_num_seqs + 1
    k, v = torch.zeros(2, *shape, width, dtype=torch.uint8, device=device)
    half: dict[str, Any] = {"dtype": torch.float16, "device": device}
    index: dict[str, Any] = {"dtype": torch.int32, "device": device}
    of_keys = torch.zeros(2, *shape[:3], 1, facts.head_dim, **half)
    of_values = torch.zeros(2, *shape, num_groups, **half)
    tail_shape = (facts.num_layers, num_slots, *shape[2:], facts.head_dim)
    return ChannelStorage(
        k=k,
        v=v,
        block_size=block_size,
        slot_map=torch.zeros(limits.max_num_batched_tokens, **index),
        table=torch.zeros(num_slots, table_width, **index),
        fresh=None,
        prefix=None,
        k_centre=of_keys[0],
        k_step=of_keys[1],
        v_centre=of_values[0],
        v_step=of_values[1],
        tail=torch.zeros(tail_shape, dtype=facts.dtype, device=device),
        lengths=np.zeros(num_slots, np.int32),
        bits=layout.bits,
        dtype=facts.dtype,
    )


def tail_bytes(facts: ModelFacts, block_size: int) -> int:
    """Bytes of the keys of one slot's open block over all layers."""
    return block_size * facts.kv_bytes_per_token // 2


def overhead_bytes(facts: ModelFacts, limits: Limits, table_width: int) -> int:
    """Bytes beside blocks and tails: slot map, block tables, scratch, lengths."""
    lengths = (limits.max_num_seqs + 1) * torch.int32.itemsize
    return _overhead_bytes(facts, limits, table_width, num_prefix=0) + lengths
