"""Caches with one fault each. Each is a `Paged`, made for blocks of 4 tokens."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np

from core import hookimpl
from plugins.kv.blocks import ROOT, BlockPool, slot_rows
from plugins.kv.paged import Paged


class Leaks(Paged):
    """The last block of a sequence is never given back."""

    def release(self, seq):
        self._held[seq].blocks = self._held[seq].blocks[:-1]
        super().release(seq)


class HandsOutTwice(Paged):
    """A block that was taken stays in the free list."""

    def bind(self, facts, limits, kv_cache_bytes, device):
        super().bind(facts, limits, kv_cache_bytes, device)

        class Pool(BlockPool):
            def take(self, num_blocks):
                taken = super().take(num_blocks)
                self._free[:0] = [block for block in taken if block % 7 == 3]
                return taken

        self.pool = Pool(self.pool.num_blocks, self.block_size)


class PadsIntoTheLastBlock(Paged):
    """Padding has index -1, which an indexed write takes for the last block."""

    def bind(self, facts, limits, kv_cache_bytes, device):
        super().bind(facts, limits, kv_cache_bytes, device)
        self.tables.host[limits.trash_slot] = self.pool.num_blocks
        self.storage.table[limits.trash_slot] = self.pool.num_blocks


class KeepsStaleEntries(Paged):
    """A block given to other content stays in the index under its old tokens."""

    def bind(self, facts, limits, kv_cache_bytes, device):
        super().bind(facts, limits, kv_cache_bytes, device)

        class Pool(BlockPool):
            def unpublish(self, block):
                self._keys[block] = None

            def pin(self, blocks):
                for block in blocks:
                    self._evictable.pop(block, None)
                    self._refs[block] += 1

        self.pool = Pool(self.pool.num_blocks, self.block_size)


class ForgetsWhatCameBefore(Paged):
    """A block is found by its own tokens, whatever stands before them."""

    def bind(self, facts, limits, kv_cache_bytes, device):
        super().bind(facts, limits, kv_cache_bytes, device)

        class Pool(BlockPool):
            def match(self, token_ids, max_blocks):
                found = []
                for i in range(max_blocks):
                    block = self._index.get((ROOT, self._tokens(token_ids, i)))
                    if block is None or block in found:
                        break
                    found.append(block)
                return found

            def publish(self, block, parent, token_ids, i):
                return super().publish(block, ROOT, token_ids, i)

        self.pool = Pool(self.pool.num_blocks, self.block_size)


class WritesOneFurther(Paged):
    """The slot map is off by one from the second token of a sequence on."""

    def begin_step(self, batch):
        last = self._limits.max_model_len - 1
        positions = (batch.positions + (batch.positions > 0)).clamp(max=last)
        super().begin_step(dataclasses.replace(batch, positions=positions))


class ReadsOneFurther(Paged):
    """Decode reads one token beyond the end: a stale column, or what the last owner left there."""

    def begin_step(self, batch):
        seq_lens = batch.host.seq_lens.copy()
        seq_lens[: batch.host.num_decodes] += 1
        host = batch.host._replace(seq_lens=seq_lens.clip(max=self._limits.max_model_len))
        super().begin_step(dataclasses.replace(batch, host=host))


class KeepsTheOldTable(Paged):
    """The first block of a slot's new owner is not sent to the device."""

    def on_slot(self, seq, slot):
        super().on_slot(seq, slot)
        if slot is not None:
            place = slot * self.tables.num_columns
            self.tables._pending.remove(place)


class DropsDeltas(Paged):
    """What does not fit into one step's metadata is forgotten."""

    def plan(self, step, host):
        super().plan(step, host)
        self.tables._pending.clear()
        return False


class AsksForEver(Paged):
    """Once it had more than a step's metadata holds, it has more in every round."""

    more = False

    def plan(self, step, host):
        self.more = super().plan(step, host) or self.more
        return self.more


class CountsWhatItBegins(Paged):
    """A row that decodes is as long as the steps that were begun with it make it."""

    def bind(self, facts, limits, kv_cache_bytes, device):
        super().bind(facts, limits, kv_cache_bytes, device)
        self.begun = slot_rows(limits, 0)

    def on_slot(self, seq, slot):
        super().on_slot(seq, slot)
        if slot is not None:
            self.begun[slot] = 0

    def rollback(self, seq, num_tokens):
        super().rollback(seq, num_tokens)
        self.begun[:] = 0

    def begin_step(self, batch):
        host, begun = batch.host, self.begun[batch.host.slots]
        counted = (np.diff(host.query_start) == 1) & (begun > 0)
        seq_lens = np.where(counted, begun + 1, host.seq_lens).clip(max=self._limits.max_model_len)
        self.begun[host.slots] = seq_lens
        super().begin_step(dataclasses.replace(batch, host=host._replace(seq_lens=seq_lens)))


class CachesTheWholePrompt(Paged):
    """A prompt of whole blocks is found whole, and nothing is left to compute its logits."""

    def acquire(self, seq, upto):
        seq.num_known += 1
        try:
            return super().acquire(seq, upto)
        finally:
            seq.num_known -= 1


class CountsNoHolders(Paged):
    """A shared block goes back with its first holder."""

    def bind(self, facts, limits, kv_cache_bytes, device):
        super().bind(facts, limits, kv_cache_bytes, device)

        class Pool(BlockPool):
            def unpin(self, blocks):
                for block in blocks:
                    self._refs[block] = 1
                super().unpin(blocks)

        self.pool = Pool(self.pool.num_blocks, self.block_size)


class SharesHalfBlocks(Paged):
    """A hit takes one block more, if it begins alike: the follower writes into it."""

    def _start(self, seq, upto):
        cached = super()._start(seq, upto)
        held = self._held.get(seq)
        if not cached or not self._shares(seq) or len(held.blocks) <= held.num_shared:
            return cached
        for other, its in self._held.items():
            i = held.num_shared
            tokens = slice(i * self.block_size, i * self.block_size + 1)
            same = (other.token_ids[tokens] == seq.token_ids[tokens]).all()
            if other is not seq and its.blocks[:i] == held.blocks[:i] and same and its.chain[i:]:
                self.pool.unpin([held.blocks[i]])
                held.blocks[i] = its.blocks[i]
                self.pool._refs[its.blocks[i]] += 1
                break
        return cached


class TakesBeforeItLooks(Paged):
    """A refusal comes after some blocks were taken."""

    def acquire(self, seq, upto):
        before = self.pool.num_available
        room = super().acquire(seq, upto)
        if room is None and before:
            self.pool.take(1)
        return room


class KeepsFailedBlocks(Paged):
    """A failed step's blocks stay published."""

    def rollback(self, seq, num_tokens):
        pass


class PairsHeadsWrongly(Paged):
    """Query heads are dealt to key heads in turn, not in groups."""

    def attend(self, layer, q, batch):
        order = [0, 2, 1, 3]
        out = super().attend(layer, q[:, order], batch)
        return out.unflatten(1, (4, -1))[:, order].flatten(1)


class StatesWhatItMisses(PairsHeadsWrongly):
    """One clause too many."""

    held_to = {
        "expected_failures": {
            "test_write_then_read_is_dense_attention": "heads are paired wrongly",
            "test_capacity_is_what_the_bytes_buy": "holds, and so must not be listed here",
        }
    }


@hookimpl
def outweigh_register_kv(register):
    register("SoundPaged", Paged)
    for name, found in globals().items():
        if inspect.isclass(found) and found.__module__ == __name__:
            register(name, found)
