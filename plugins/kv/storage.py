"""The tensors of a block-wise cache in the model's own dtype, and where a token stands in them.

Shapes: L layers, N blocks, K key/value heads, B tokens a block, D head_dim, S slots, W columns of a
table, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from core.seams import KVSink
from plugins.kv.cudnn import prefix_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from core.batch import Limits
    from core.facts import ModelFacts
    from plugins.kv.cuda_path import CudaPath
    from plugins.kv.torch_path import TorchPath

_INDEX_BYTES = torch.int32.itemsize


@dataclass(eq=False)
class Storage:
    """Keys and values of all layers, [L, N, K, B, D] each, and the static buffers around them.

    `table` is int32 [S + 1, W]; without one the slot itself is the block. `slot_map` is int32
    [max_num_batched_tokens], block * B + offset of each token of a step. `fresh` is the scratch
    pair of KVSink. `prefix` is room for a prefix in one piece, a pair of [plugins.kv.cudnn
    .prefix_tokens, K, D]; None where no step reads one so.
    """

    k: Tensor
    v: Tensor
    block_size: int
    slot_map: Tensor
    table: Tensor | None
    fresh: tuple[Tensor, Tensor] | None
    prefix: tuple[Tensor, Tensor] | None

    def blocks(self, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Block and offset of each position of each slot; both broadcast, int32."""
        if self.table is None:
            return slots, positions
        return self.table[slots, positions // self.block_size], positions % self.block_size

    def apply_deltas(self, index: Tensor, block: Tensor) -> None:
        """Write int32 [n] blocks at int64 [n] flat places of the table. No host read."""
        assert self.table is not None
        self.table.view(-1).index_copy_(0, index, block)

    def gather(self, slot: int, layer: int, lo: int, hi: int) -> tuple[Tensor, Tensor, Tensor]:
        """Copies of keys and values [n, K, D] of positions lo..hi-1, and the positions, int32."""
        positions = torch.arange(lo, hi, dtype=torch.int32, device=self.k.device)
        block, offset = self.blocks(torch.full_like(positions, slot), positions)
        return self.k[layer][block, :, offset], self.v[layer][block, :, offset], positions

    def planes(self) -> tuple[Tensor, ...]:
        """Everything that belongs to a block and moves with it, [L, N, K, B, ...] each."""
        return self.k, self.v

    def save(self, blocks: list[int], length: int) -> tuple[Tensor, ...]:
        """The first `length` tokens of each block on the host, [L, n, K, length, ...] each plane.

        On CUDA the copies into pinned memory are in stream order and may still be under way.
        """
        index = torch.tensor(blocks, device=self.k.device)
        return tuple(_to_host(plane[:, index, :, :length]) for plane in self.planes())

    def restore(self, blocks: list[int], first: int, saved: tuple[Tensor, ...]) -> None:
        """Write what `save` gave, from its block `first` on, into these blocks."""
        index = torch.tensor(blocks, device=self.k.device)
        for plane, host in zip(self.planes(), saved, strict=True):
            values = host[:, first:].to(plane.device, non_blocking=True)
            plane[:, index, :, : host.shape[3]] = values

    def save_tail(self, slot: int | None, num_tokens: int) -> tuple[Tensor, ...]:
        """What belongs to a slot, and to no block, of a sequence of `num_tokens`: nothing here."""
        return ()

    def restore_tail(self, slot: int | None, num_tokens: int, saved: tuple[Tensor, ...]) -> None:
        """Write what `save_tail` gave into another slot, which has `num_tokens` tokens now."""

    def sink(self, layer: int) -> KVSink | None:
        k, v = self.k[layer], self.v[layer]
        return KVSink("blocks", k, v, self.block_size, self.slot_map, self.fresh)


def _to_host(found: Tensor) -> Tensor:
    if not found.is_cuda:
        return found
    host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    return host.copy_(found, non_blocking=True)


def allocate(
    facts: ModelFacts,
    limits: Limits,
    device: torch.device,
    *,
    num_blocks: int,
    block_size: int,
    table_width: int,
) -> Storage:
    """Zeroed storage for `num_blocks` blocks, the trash block counted; width 0 means no table.

    Scratch for lone prompts is for the kernels of a GPU; a CPU reads what is stored.
    """
    heads, dim, num_tokens = facts.num_kv_heads, facts.head_dim, limits.max_num_batched_tokens
    shape = (2, facts.num_layers, num_blocks, heads, block_size, dim)
    data = torch.zeros(shape, dtype=facts.dtype, device=device)
    table = None
    if table_width:
        rows = limits.max_num_seqs + 1
        table = torch.zeros(rows, table_width, dtype=torch.int32, device=device)
    fresh = prefix = None
    if device.type == "cuda":
        scratch = torch.zeros(2, num_tokens, heads, dim, dtype=facts.dtype, device=device)
        fresh = scratch[0], scratch[1]
        num_prefix = prefix_tokens(facts, limits)
        if num_prefix and torch.cuda.get_device_capability(device) >= (8, 0):  # cuDNN's own limit
            scratch = torch.zeros(2, num_prefix, heads, dim, dtype=facts.dtype, device=device)
            prefix = scratch[0], scratch[1]
    return Storage(
        k=data[0],
        v=data[1],
        block_size=block_size,
        slot_map=torch.zeros(num_tokens, dtype=torch.int32, device=device),
        table=table,
        fresh=fresh,
        prefix=prefix,
    )


def overhead_bytes(
    facts: ModelFacts, limits: Limits, table_width: int, num_prefix: int | None = None
) -> int:
    """Bytes beside the blocks: slot map, block tables, scratch; `num_prefix` tokens of it are for a
    prefix (None: as many as `allocate` gives it).

    The scratch is counted on every device, so that a budget buys the same room on a CPU as on a
    GPU.
    """
    num_tokens = limits.max_num_batched_tokens
    if num_prefix is None:
        num_prefix = prefix_tokens(facts, limits)
    scratch = (num_tokens + num_prefix) * facts.kv_bytes_per_token // facts.num_layers
    tables = (limits.max_num_seqs + 1) * table_width
    return scratch + (num_tokens + tables) * _INDEX_BYTES


def device_path(facts: ModelFacts, storage: Storage) -> CudaPath | TorchPath:
    """Who writes and reads the storage: kernels on CUDA, plain torch anywhere else."""
    if storage.k.device.type == "cuda":
        from plugins.kv.cuda_path import CudaPath

        return CudaPath(facts, storage)
    from plugins.kv.torch_path import TorchPath

    return TorchPath(facts, storage)
