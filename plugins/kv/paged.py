"""`paged`: blocks of fixed size, found through a block table, shared between equal prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from core.config import OfferConfig
from core.seams import Capacity, Saved, Usage
from plugins.kv.blocks import (
    NEVER,
    ROOT,
    BlockPool,
    BlockTables,
    Held,
    delta_arrays,
    num_columns,
    num_deltas,
    slot_rows,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from core.batch import Batch, BatchShape, HostBatch, Limits, Sequence
    from core.facts import ModelFacts
    from core.seams import KVSink


class Paged:
    """Blocks of `block_size` tokens in the model's dtype. Block 0 is the trash block."""

    api: ClassVar[int] = 1
    lossless: ClassVar[bool] = True
    prefix_sharing: ClassVar[bool] = True
    graph_safe: ClassVar[bool] = True

    class Config(OfferConfig):
        block_size: int = Field(
            16, ge=1, description="tokens a block; prefixes are shared in whole blocks"
        )
        num_blocks: int | None = Field(
            None, ge=1, description="blocks beside the trash block, instead of what the bytes buy"
        )

    def __init__(self, config: Config) -> None:
        self.config = config
        self.block_size = config.block_size
        self.sharing = True  # the engine turns it off before `bind`
        self._held: dict[Sequence, Held] = {}
        self._is_wide = False  # the round that is planned takes along more than its shape has

    # ------------------------------------------------------------------------------------ host half

    def capacity(self, kv_cache_bytes: int, facts: ModelFacts, limits: Limits) -> Capacity:
        num_blocks, num_seqs = self.room_for(kv_cache_bytes, facts, limits)
        return Capacity(num_blocks * self.block_size, num_seqs)

    def room_for(self, kv_cache_bytes: int, facts: ModelFacts, limits: Limits) -> tuple[int, int]:
        """Blocks and running sequences that the budget buys, as many as there are blocks for.

        The trash block and the tail of the trash slot are paid for and not counted.
        """
        most = limits.max_num_seqs
        if self.config.num_blocks is not None:
            return self.config.num_blocks, min(most, self.config.num_blocks)
        block, tail = self.block_bytes(facts), self.tail_bytes(facts)
        room = max(0, kv_cache_bytes - self.overhead_bytes(facts, limits) - block - tail)
        num_seqs = min(most, room // (block + tail))
        return (room - num_seqs * tail) // block, num_seqs

    def tail_bytes(self, facts: ModelFacts) -> int:
        """Bytes of a running sequence that are in no block, over all layers."""
        return 0

    def block_bytes(self, facts: ModelFacts) -> int:
        """Bytes of one block over all layers."""
        return facts.kv_bytes_per_token * self.block_size

    def overhead_bytes(self, facts: ModelFacts, limits: Limits) -> int:
        """Bytes beside the blocks."""
        from plugins.kv.storage import overhead_bytes

        return overhead_bytes(facts, limits, num_columns(limits, self.block_size))

    def ever_fits(self, num_tokens: int) -> str | None:
        num_blocks, size = self._num_blocks_of(num_tokens), self.block_size
        if num_tokens > self._limits.max_model_len:
            return (
                f"a sequence of {num_tokens} tokens is longer than max_model_len "
                f"{self._limits.max_model_len}; shorten it or raise --max-model-len"
            )
        if num_blocks > self.pool.num_blocks:
            return (
                f"a sequence of {num_tokens} tokens needs {num_blocks} blocks of {size} and the "
                f"cache has {self.pool.num_blocks} ({self.pool.num_blocks * size} tokens); "
                "shorten it or raise --kv-cache-bytes"
            )
        return None

    def acquire(self, seq: Sequence, upto: int) -> int | None:
        held = self._held.get(seq)
        if held is None:
            return self._start(seq, upto)
        num_new = self._num_blocks_of(upto) - len(held.blocks)
        if num_new > self.pool.num_available:
            return None
        if num_new > 0:
            self._extend(held, self.pool.take(num_new))
        return 0

    def _start(self, seq: Sequence, upto: int) -> int | None:
        """Pin hits, take the rest. Hits that nobody holds come out of the same room as the rest."""
        pool, hits = self.pool, list[int]()
        if self._shares(seq):
            hits = pool.match(seq.token_ids, (seq.num_known - 1) // self.block_size)
        num_new = max(0, self._num_blocks_of(upto) - len(hits))
        if num_new > pool.num_available - pool.num_evictable_among(hits):
            return None
        pool.pin(hits)
        chain = [pool.identity(block) for block in hits]
        self._held[seq] = Held([*hits, *pool.take(num_new)], len(hits), chain)
        return len(hits) * self.block_size

    def _extend(self, held: Held, blocks: list[int]) -> None:
        if held.slot is not None:
            self.tables.set(held.slot, len(held.blocks), blocks)
        held.blocks += blocks
        self._refresh_reserved(held)

    def on_slot(self, seq: Sequence, slot: int | None) -> None:
        held = self._held[seq]
        if held.slot is not None:
            self.reserved[held.slot], self.next_publish[held.slot] = 0, NEVER
        held.slot = slot
        if slot is not None:
            self.tables.set(slot, 0, held.blocks)
            self._refresh_reserved(held)
            self._refresh_next_publish(seq, held)

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        if not self._shares(seq):
            return
        held = self._held[seq]
        for i in range(len(held.chain), num_tokens // self.block_size):
            parent = held.chain[-1] if held.chain else ROOT
            held.chain.append(self.pool.publish(held.blocks[i], parent, seq.token_ids, i))
        self._refresh_next_publish(seq, held)

    def rollback(self, seq: Sequence, num_tokens: int) -> None:
        """Blocks that `seq` found in the index stay there: they are as true as before."""
        held = self._held[seq]
        keep = max(num_tokens // self.block_size, held.num_shared)
        for block in held.blocks[keep : len(held.chain)]:
            if self.pool.is_published(block):
                self.pool.unpublish(block)
        del held.chain[keep:]
        self._refresh_next_publish(seq, held)

    def release(self, seq: Sequence) -> None:
        if self._held[seq].slot is not None:
            self.on_slot(seq, None)
        self.pool.unpin(self._held.pop(seq).blocks)

    def save(self, seq: Sequence, num_tokens: int) -> Saved:
        held = self._held[seq]
        data = self.storage.save(held.blocks[: self._num_blocks_of(num_tokens)], self.block_size)
        data += self.storage.save_tail(held.slot, num_tokens)
        return Saved(num_tokens, sum(plane.nbytes for plane in data), data)

    def restore(self, seq: Sequence, saved: Saved, num_cached: int) -> None:
        """Whole shared blocks are left out: they are never written."""
        first, n = num_cached // self.block_size, self._num_blocks_of(saved.num_tokens)
        held, num_planes = self._held[seq], len(self.storage.planes())
        if first < n:
            self.storage.restore(held.blocks[first:n], first, saved.data[:num_planes])
        num_tokens = max(num_cached, saved.num_tokens)
        self.storage.restore_tail(held.slot, num_tokens, saved.data[num_planes:])

    def usage(self) -> Usage:
        pool, size = self.pool, self.block_size
        num_held = pool.num_blocks - pool.num_available
        return Usage(pool.num_blocks * size, num_held * size, pool.num_evictable * size)

    def check_integrity(self) -> None:
        self.pool.check_integrity(self._held.values())
        reserved, next_publish = slot_rows(self._limits, 0), slot_rows(self._limits, NEVER)
        for seq, held in self._held.items():
            assert held.num_shared <= len(held.chain) <= len(held.blocks)
            if held.slot is None:
                continue
            assert not reserved[held.slot], f"two sequences run in slot {held.slot}"
            reserved[held.slot] = len(held.blocks) * self.block_size
            if self._shares(seq):
                next_publish[held.slot] = (len(held.chain) + 1) * self.block_size
            row = self.tables.host[held.slot, : len(held.blocks)]
            assert row.tolist() == held.blocks, f"the table of slot {held.slot} names other blocks"
        assert (reserved == self.reserved).all(), "reserved does not follow the blocks held"
        assert (next_publish == self.next_publish).all(), "next_publish does not follow the chains"

    def _shares(self, seq: Sequence) -> bool:
        return self.sharing and seq.share_prefix

    def _num_blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _refresh_reserved(self, held: Held) -> None:
        if held.slot is not None:
            self.reserved[held.slot] = len(held.blocks) * self.block_size

    def _refresh_next_publish(self, seq: Sequence, held: Held) -> None:
        if held.slot is not None and self._shares(seq):
            self.next_publish[held.slot] = (len(held.chain) + 1) * self.block_size

    # ---------------------------------------------------------------------------------- device half

    def bind(
        self, facts: ModelFacts, limits: Limits, kv_cache_bytes: int, device: torch.device
    ) -> None:
        from plugins.kv.storage import allocate, device_path

        self.bind_host(facts, limits, kv_cache_bytes)
        self.storage = allocate(
            facts,
            limits,
            device,
            num_blocks=self.pool.num_blocks + 1,
            block_size=self.block_size,
            table_width=self.tables.num_columns,
        )
        self.path = device_path(facts, self.storage)

    def bind_host(self, facts: ModelFacts, limits: Limits, kv_cache_bytes: int) -> None:
        """Pool, tables, and the rows that the core reads. Shared by every format that is paged."""
        self._limits = limits
        self.pool = BlockPool(self.room_for(kv_cache_bytes, facts, limits)[0], self.block_size)
        self.tables = BlockTables(limits, self.block_size)
        self.reserved: NDArray[Any] = slot_rows(limits, 0)
        self.next_publish: NDArray[Any] = slot_rows(limits, NEVER)

    def metadata(self, limits: Limits) -> Mapping[str, tuple[tuple[int, ...], str]]:
        return {**delta_arrays(limits, self.block_size), **self.path.metadata(limits)}

    def plan(self, step: HostBatch, host: Mapping[str, NDArray[Any]]) -> bool:
        """True where there are more table changes than a step of this shape has places for: then a
        round before it takes along as many as there is any room for."""
        self.path.plan(step, host)
        places = self._num_places(step.shape or step)
        self._is_wide = self.tables.num_pending > places
        # Whoever launches a step whose shape is not known yet may launch a larger one: there all
        # that is behind the changes is padding.
        end = None if self._is_wide or step.shape is None else places
        self.tables.send(host["delta_index"][:end], host["delta_block"][:end])
        return self._is_wide

    def begin_step(self, batch: Batch) -> None:
        end = None if self._is_wide else self._num_places(batch.shape)
        self.storage.apply_deltas(batch.kv["delta_index"][:end], batch.kv["delta_block"][:end])
        self.path.begin_step(batch)

    def _num_places(self, step: BatchShape | HostBatch) -> int:
        """For the table changes that travel with a step."""
        return num_deltas(step.num_tokens, step.num_seqs, self.block_size)

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        self.path.write(layer, k, v, batch)

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        return self.path.attend(layer, q, batch)

    def gather(self, slot: int, layer: int, lo: int, hi: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.storage.gather(slot, layer, lo, hi)

    def sink(self, layer: int) -> KVSink | None:
        return self.storage.sink(layer)
