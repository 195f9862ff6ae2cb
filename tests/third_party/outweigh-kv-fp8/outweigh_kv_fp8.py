"""`fp8`: paged keys and values as 8-bit floats, E4M3, with a scale for each token and head.

Format: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433 (2022). T tokens of a
step, K key/value heads, D head_dim, S slots, B tokens a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from core import OfferConfig, hookimpl
from core.seams import Capacity, Usage

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from core.batch import Batch, HostBatch, Limits, Sequence
    from core.facts import ModelFacts
    from core.hookspecs import Register

NEVER = int(np.iinfo(np.int32).max)  # a length at which nothing is ever due
LARGEST = 448.0  # of E4M3 without infinities
SCALE_BYTES = 4  # float32


class Fp8:
    """Blocks of `block_size` tokens, one byte a value. Block 0 is the trash block; none is shared.

    A value is rounded to 3 bits of mantissa: an error of at most 1/16 of itself.
    """

    api: ClassVar[int] = 1
    lossless: ClassVar[bool] = False
    prefix_sharing: ClassVar[bool] = False
    graph_safe: ClassVar[bool] = False  # the default attention loops over rows on the host
    # Of the kv suite: attention's worst error, of which 0.056 was seen, and bytes of a token.
    held_to: ClassVar[dict[str, Any]] = {"tolerance": 0.07, "bytes_per_token": 288}
    # Of evals.quality: a mean KL of 6e-3 was seen, and 0.95 of the likeliest tokens the same.
    quality: ClassVar[dict[str, float]] = {"mean_kl": 2e-2, "tail_kl": 0.1, "top1": 0.9}

    class Config(OfferConfig):
        block_size: int = Field(default=16, ge=1, description="tokens a block")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.sharing = False  # set by the core before `bind`
        self._blocks: dict[Sequence, list[int]] = {}  # of everybody who has room
        self._slots: dict[Sequence, int] = {}

    # -------- host half: who has room, no device work

    def capacity(self, kv_cache_bytes: int, facts: ModelFacts, limits: Limits) -> Capacity:
        num_blocks = self._num_blocks(kv_cache_bytes, facts, limits)
        return Capacity(num_blocks * self.config.block_size, min(limits.max_num_seqs, num_blocks))

    def _num_blocks(self, kv_cache_bytes: int, facts: ModelFacts, limits: Limits) -> int:
        """Blocks beside the trash block that the bytes buy, tables paid."""
        table = 4 * (limits.max_num_seqs + 1) * self._row_blocks(limits)
        a_block = self.config.block_size * token_bytes(facts)
        return max(0, (kv_cache_bytes - table) // a_block - 1)

    def _row_blocks(self, limits: Limits) -> int:
        return -(-limits.max_model_len // self.config.block_size)

    def ever_fits(self, num_tokens: int) -> str | None:
        room = self._pool * self.config.block_size
        if num_tokens <= room:
            return None
        return f"a sequence has {num_tokens} tokens and the cache {room}: raise --kv-cache-bytes"

    def acquire(self, seq: Sequence, upto: int) -> int | None:
        held = self._blocks.get(seq, [])
        more = -(-upto // self.config.block_size) - len(held)
        if more > len(self._free):
            return None
        self._blocks[seq] = held + [self._free.pop() for _ in range(more)]
        if seq in self._slots:
            self._show(seq)
        return 0

    def on_slot(self, seq: Sequence, slot: int | None) -> None:
        before = self._slots.pop(seq, None)
        if before is not None:
            self.reserved[before], self._table[before] = 0, 0
        if slot is not None:
            self._slots[seq] = slot
            self._show(seq)

    def _show(self, seq: Sequence) -> None:
        slot, blocks = self._slots[seq], self._blocks[seq]
        self._table[slot, : len(blocks)] = blocks
        self.reserved[slot] = len(blocks) * self.config.block_size

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Nothing is shared."""

    def rollback(self, seq: Sequence, num_tokens: int) -> None:
        """Nothing was published."""

    def release(self, seq: Sequence) -> None:
        self.on_slot(seq, None)
        self._free += reversed(self._blocks.pop(seq))

    def usage(self) -> Usage:
        total = self._pool * self.config.block_size
        return Usage(total, total - len(self._free) * self.config.block_size, 0)

    def check_integrity(self) -> None:
        held = [block for blocks in self._blocks.values() for block in blocks]
        assert sorted(held + self._free) == list(range(1, self._pool + 1)), "a block is lost"
        assert set(self.reserved.nonzero()[0].tolist()) == set(self._slots.values()), "reserved"

    # -------- device half: where keys and values lie

    def bind(
        self, facts: ModelFacts, limits: Limits, kv_cache_bytes: int, device: torch.device
    ) -> None:
        self._facts, self._limits = facts, limits
        self._pool = self._num_blocks(kv_cache_bytes, facts, limits)
        self._free = list(range(self._pool, 0, -1))
        self.reserved: NDArray[Any] = np.zeros(limits.max_num_seqs + 1, np.int32)
        self.next_publish: NDArray[Any] = np.full(limits.max_num_seqs + 1, NEVER, np.int32)
        self._table = np.zeros((limits.max_num_seqs + 1, self._row_blocks(limits)), np.int32)
        self._allocate(device)

    def _allocate(self, device: torch.device) -> None:
        import torch

        f = self._facts
        shape = (2, f.num_layers, self._pool + 1, self.config.block_size, f.num_kv_heads)
        self.codes = torch.zeros(*shape, f.head_dim, dtype=torch.float8_e4m3fn, device=device)
        self.scales = torch.zeros(*shape, dtype=torch.float32, device=device)

    def metadata(self, limits: Limits) -> Mapping[str, tuple[tuple[int, ...], str]]:
        return {"block_table": ((limits.max_num_seqs + 1, self._row_blocks(limits)), "int32")}

    def plan(self, step: HostBatch, host: Mapping[str, NDArray[Any]]) -> bool:
        host["block_table"][...] = self._table
        return False

    def begin_step(self, batch: Batch) -> None:
        """The block and the place in it of each token, once for all layers."""
        size = self.config.block_size
        slots, positions = batch.token_slots.long(), batch.positions.long()
        self._at = batch.kv["block_table"][slots, positions // size].long(), positions % size

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        for half, values in enumerate((k, v)):
            codes, scales = encode(values)
            self.codes[half, layer][self._at] = codes
            self.scales[half, layer][self._at] = scales

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        from plugins.kv import by_gather

        return by_gather.attend(self, layer, q, batch, scale=self._facts.softmax_scale)

    def gather(self, slot: int, layer: int, lo: int, hi: int) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        size = self.config.block_size
        positions = torch.arange(lo, hi, dtype=torch.int32, device=self.codes.device)
        row = torch.from_numpy(self._table[slot]).to(self.codes.device)
        at = row[positions.long() // size].long(), positions.long() % size
        k, v = (
            self.codes[half, layer][at].float() * self.scales[half, layer][at][..., None]
            for half in (0, 1)
        )
        return k.to(self._facts.dtype), v.to(self._facts.dtype), positions

    def sink(self, layer: int) -> None:
        return None  # only `write` may write here


def token_bytes(facts: ModelFacts) -> int:
    """What a token costs: K and V of each layer and head, D codes and a scale."""
    return 2 * facts.num_layers * facts.num_kv_heads * (facts.head_dim + SCALE_BYTES)


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """[T, K, D] as E4M3 codes of the same shape and their scales [T, K], float32."""
    import torch

    values = values.float()
    scales = values.abs().amax(-1).clamp(min=1e-12) / LARGEST
    return (values / scales[..., None]).to(torch.float8_e4m3fn), scales


@hookimpl
def outweigh_register_kv(register: Register) -> None:
    register("fp8", Fp8)
