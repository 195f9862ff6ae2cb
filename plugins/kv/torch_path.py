"""The device half in plain torch: any device that torch knows, and the oracle of the kernels.

What a step reads and writes is the same in every layer, so the index tensors are made once, in
`begin_step`; a layer then costs two scatters, and two gathers and one attention for each group of
rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from core.batch import Batch, HostBatch, Limits
    from core.facts import ModelFacts
    from plugins.kv.storage import Storage

# Rows of one padded gather: the longest has at most twice the keys of the shortest, and some that
# are for free.
_FREE_PADDING_TOKENS = 64


@dataclass(frozen=True)
class DecodeGroup:
    """R rows of one token, at `tokens` of the step, over at most n keys.

    `rows` is int64 [R * K * n] into the flat cache, `mask` bool [R, 1, 1, n], or None where all
    have n keys.
    """

    tokens: Tensor | slice
    rows: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class PrefillRow:
    """Tokens lo..hi-1 of the step over n keys. `rows` is int64 [K * n], `mask` bool [hi - lo, n].

    Without a mask attention is causal over the whole context.
    """

    lo: int
    hi: int
    rows: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class StepIndex:
    """Where the tokens of a step go (int64 [T * K]) and what its rows read."""

    written: Tensor
    decodes: list[DecodeGroup]
    prefills: list[PrefillRow]


class TorchPath:
    """`write` and `attend` over a Storage, a layer of it seen as flat rows [N * K * B, D]."""

    def __init__(self, facts: ModelFacts, storage: Storage) -> None:
        self._facts, self._storage = facts, storage
        self._heads = torch.arange(facts.num_kv_heads, device=storage.k.device)[:, None]
        self._step: StepIndex | None = None

    def metadata(self, limits: Limits) -> dict[str, tuple[tuple[int, ...], str]]:
        """Nothing: the host's view of the step is at hand."""
        return {}

    def plan(self, step: HostBatch, host: Mapping[str, NDArray[Any]]) -> None:
        """Nothing to stage."""

    def begin_step(self, batch: Batch) -> None:
        """Index tensors of this step, and the slot map for spans that write through the sink."""
        storage, host = self._storage, batch.host
        assert host is not None, "attention in plain torch needs the host's view of the step"
        block, offset = storage.blocks(batch.token_slots, batch.positions)
        storage.slot_map[: batch.shape.num_tokens] = block * storage.block_size + offset
        written = self._rows(block[:, None], offset[:, None]).transpose(1, 2)
        decodes = [
            self._decode_group(members, host)
            for members in _groups(host.seq_lens[: host.num_decodes])
        ]
        starts = host.query_start.tolist()
        prefills = [
            self._prefill_row(starts[r], starts[r + 1], int(host.slots[r]), int(host.seq_lens[r]))
            for r in range(host.num_decodes, host.num_seqs)
        ]
        self._step = StepIndex(written.flatten(), decodes, prefills)

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """Store k and v, [T, K, D], padding tokens in the trash block."""
        assert self._step is not None
        for cache, values in zip(self._flat(layer), (k, v), strict=True):
            cache.index_copy_(0, self._step.written, values.flatten(0, 1))

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """Attention of q [T, H, D] over what is stored, [T, H * D]; 0 for padding tokens."""
        assert self._step is not None
        out = torch.zeros_like(q)
        for group in self._step.decodes:
            keys, values = self._read(layer, group.rows)
            out[group.tokens] = self._decode(q[group.tokens], keys, values, group)
        for row in self._step.prefills:
            keys, values = self._read(layer, row.rows)
            out[row.lo : row.hi] = self._prefill(q[row.lo : row.hi], keys, values, row)
        return out.flatten(1)

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, group: DecodeGroup) -> Tensor:
        """Query heads that share a key head stand as queries of one attention: no repeats."""
        num_rows, heads, dim = len(q), self._facts.num_kv_heads, self._facts.head_dim
        out = F.scaled_dot_product_attention(
            q.reshape(num_rows, heads, -1, dim),
            k.view(num_rows, heads, -1, dim),
            v.view(num_rows, heads, -1, dim),
            attn_mask=group.mask,
            scale=self._facts.softmax_scale,
        )
        return out.reshape(num_rows, -1, dim)

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, row: PrefillRow) -> Tensor:
        heads, dim = self._facts.num_kv_heads, self._facts.head_dim
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.view(1, heads, -1, dim),
            v.view(1, heads, -1, dim),
            attn_mask=row.mask,
            is_causal=row.mask is None,
            scale=self._facts.softmax_scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)

    def _read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of int64 [n] flat rows as attention computes with them, [n, D]."""
        k, v = self._flat(layer)
        return k.index_select(0, rows), v.index_select(0, rows)

    def _flat(self, layer: int) -> tuple[Tensor, Tensor]:
        dim = self._facts.head_dim
        return self._storage.k[layer].view(-1, dim), self._storage.v[layer].view(-1, dim)

    def _rows(self, block: Tensor, offset: Tensor) -> Tensor:
        """Flat rows of every head: [..., n] to int64 [..., K, n]."""
        wide = block.long()[..., None, :] * self._facts.num_kv_heads + self._heads
        return wide * self._storage.block_size + offset[..., None, :]

    def _decode_group(self, members: NDArray[np.int64], host: HostBatch) -> DecodeGroup:
        """Padding repeats the row's last key, so that nothing foreign is even multiplied by 0."""
        device, slots, seq_lens = (
            self._storage.k.device,
            host.slots[members],
            host.seq_lens[members],
        )
        tokens: Tensor | slice = slice(
            0, len(members)
        )  # a view, where all decode rows are one group
        if len(members) < host.num_decodes:
            tokens = torch.from_numpy(members).to(device)
        lens = torch.from_numpy(seq_lens).to(device)[:, None]
        positions = torch.arange(int(seq_lens.max()), dtype=torch.int32, device=device)
        seen = positions < lens
        positions = torch.minimum(positions, lens - 1)
        block, offset = self._storage.blocks(torch.from_numpy(slots).to(device)[:, None], positions)
        mask = None if seq_lens.min() == seq_lens.max() else seen[:, None, None]
        rows = self._rows(block.expand_as(offset), offset)
        return DecodeGroup(tokens, rows.flatten(), mask)

    def _prefill_row(self, lo: int, hi: int, slot: int, seq_len: int) -> PrefillRow:
        positions = torch.arange(seq_len, dtype=torch.int32, device=self._storage.k.device)
        block, offset = self._storage.blocks(torch.full_like(positions, slot), positions)
        mask = None if hi - lo == seq_len else positions <= positions[seq_len - hi + lo :, None]
        return PrefillRow(lo, hi, self._rows(block, offset).flatten(), mask)


def _groups(seq_lens: NDArray[np.int32]) -> list[NDArray[np.int64]]:
    """Rows of similar length together: a long row must not make short ones gather as much."""
    by_length = np.argsort(-seq_lens, kind="stable")
    groups: list[NDArray[np.int64]] = []
    while len(by_length):
        longest = seq_lens[by_length[0]]
        size = int(np.count_nonzero(seq_lens[by_length] * 2 + _FREE_PADDING_TOKENS >= longest))
        groups.append(np.sort(by_length[:size]))
        by_length = by_length[size:]
    return groups
