"""The device half of codes by channel, in plain torch.

A query at position p reads what is stored after p: codes of all blocks that are full by then, and
the keys of the block that p stands in as they came, unless p fills it. So a token reads the same in
one piece, in chunks, by decoding or after a prefix hit. A chunk of several blocks is computed over
the codes first; then the scores of each query with its own block are made again, of the keys that
were rounded after it.

Shapes beside those of plugins.kv.channel_storage: M blocks that the step touches, T its tokens, R
its rows, E keys of open blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from plugins.kv.affine import decode, encode, pack, unpack
from plugins.kv.channel_storage import decode_groups
from plugins.kv.torch_path import DecodeGroup, PrefillRow, TorchPath

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from core.batch import Batch, HostBatch
    from core.facts import ModelFacts
    from plugins.kv.channel_storage import ChannelStorage

_MAX_SCORES = 1 << 23  # of a tile of queries, float32: 32 MiB


class Touched(NamedTuple):
    """The blocks that a step writes to, in order of rows. int64, on the device of the storage."""

    num_blocks: int
    place: Tensor  # [T], which of them a token goes to
    offset: Tensor  # [T], and where in it
    slots: Tensor  # [R]
    firsts: Tensor  # [R], the first of each row
    lasts: Tensor  # [R]
    carried: Tensor  # bool [R, 1, B, 1], what the first has from earlier steps
    full: Tensor  # those that are full when the step is written
    full_blocks: Tensor  # their numbers in the cache


@dataclass(frozen=True)
class OpenDecodeGroup(DecodeGroup):
    """Where keys of open blocks stand among those read, int64 [E] each, and where they are."""

    row: Tensor
    column: Tensor
    place: Tensor
    offset: Tensor


@dataclass(frozen=True)
class OpenPrefillRow(PrefillRow):
    """`num_open` keys of the last block are of the tail; `positions` int64 [hi - lo]."""

    num_open: int
    positions: Tensor


class ChannelPath(TorchPath):
    """`write` and `attend` over a ChannelStorage. `attend` follows the `write` of its layer."""

    _storage: ChannelStorage
    _touched: Touched

    def __init__(self, facts: ModelFacts, storage: ChannelStorage) -> None:
        super().__init__(facts, storage)
        self._layer = -1
        self._keys = storage.tail[0, :0]  # [M, K, B, D] of `_layer`, as they came

    def begin_step(self, batch: Batch) -> None:
        assert batch.host is not None
        self._touched = self._touch(batch.host)
        self._layer = -1
        self._storage.lengths[batch.host.slots] = batch.host.seq_lens
        super().begin_step(batch)

    def _touch(self, host: HostBatch) -> Touched:
        s, size = self._storage, self._storage.block_size
        assert s.table is not None
        starts = host.seq_lens - np.diff(host.query_start)
        first, last = starts // size, (host.seq_lens - 1) // size
        num = last - first + 1
        base = np.cumsum(num) - num
        row = np.repeat(np.arange(host.num_seqs), num)
        column = first[row] + np.arange(len(row)) - base[row]
        full = np.flatnonzero((column + 1) * size <= host.seq_lens[row])
        of_token = np.repeat(np.arange(host.num_seqs), np.diff(host.query_start))
        place = (base - first)[of_token] + host.positions // size
        indices = (
            place, host.positions % size, host.slots, base, base + num - 1,
            np.arange(size) < (starts % size)[:, None], full,
            host.slots[row[full]], column[full],
        )  # fmt: skip
        device = s.k.device
        *found, full_slots, full_columns = (_index(x, device) for x in indices)
        found[5] = found[5].bool()[:, None, :, None]
        return Touched(len(row), *found, s.table[full_slots, full_columns].long())

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """Store v by token, and codes of the keys of blocks that are full now; k is [T, K, D].

        Padding is left out.
        """
        s, at = self._storage, self._touched
        num_tokens = len(at.place)
        size, dim = s.block_size, self._facts.head_dim
        keys = k.new_zeros(at.num_blocks, self._facts.num_kv_heads, size, dim)
        keys[at.firsts] = torch.where(at.carried, s.tail[layer, at.slots], 0)
        keys[at.place, :, at.offset] = k[:num_tokens]
        s.tail[layer, at.slots] = keys[at.lasts]
        codes, centre, step = encode(keys[at.full], -2, s.bits)
        s.k[layer, at.full_blocks] = pack(codes, s.bits)
        s.k_centre[layer, at.full_blocks], s.k_step[layer, at.full_blocks] = centre, step
        self._layer, self._keys = layer, keys
        self._write_values(layer, v[:num_tokens])

    def _write_values(self, layer: int, v: Tensor) -> None:
        assert self._step is not None
        s = self._storage
        num_groups = s.v_centre.shape[-1]
        codes, centre, step = encode(v.unflatten(-1, (num_groups, -1)), -1, s.bits)
        written = self._step.written[: len(v) * self._facts.num_kv_heads]
        of_values = pack(codes.flatten(-2), s.bits), centre[..., 0], step[..., 0]
        for cache, made in zip((s.v, s.v_centre, s.v_step), of_values, strict=True):
            cache[layer].view(-1, made.shape[-1]).index_copy_(0, written, made.flatten(0, 1))

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """Attention of q [T, H, D] over what is stored, [T, H * D]; 0 for padding tokens."""
        assert layer == self._layer, f"layer {layer} is read after layer {self._layer} was written"
        return super().attend(layer, q, batch)

    def _read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of codes, float32 [n, D]; keys of open blocks are garbage, to be replaced."""
        s, dim = self._storage, self._facts.head_dim
        packed, centre, step = (x[layer].view(-1, x.shape[-1])[rows] for x in
                                (s.v, s.v_centre, s.v_step))  # fmt: skip
        values = decode_groups(packed, centre, step, s.bits)
        codes = unpack(s.k[layer].view(-1, s.k.shape[-1])[rows], s.bits)
        blocks = rows // s.block_size
        centre, step = (x[layer].view(-1, dim)[blocks] for x in (s.k_centre, s.k_step))
        return decode(codes, centre, step, s.bits), values

    # ------------------------------------------------------------------------------------- decoding

    def _decode_group(self, members: NDArray[np.int64], host: HostBatch) -> OpenDecodeGroup:
        plain, size = super()._decode_group(members, host), self._storage.block_size
        seq_lens = host.seq_lens[members]
        # Padding repeats the last key.
        positions = np.minimum(np.arange(seq_lens.max()), seq_lens[:, None] - 1)
        row, column = np.nonzero(positions >= (seq_lens // size * size)[:, None])
        device = self._storage.k.device
        found = (_index(x, device) for x in (row, column, positions[row, column] % size))
        rows, columns, offsets = found
        place = self._touched.place[_index(members, device)][rows]  # of row i is token i
        return OpenDecodeGroup(plain.tokens, plain.rows, plain.mask, rows, columns, place, offsets)

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, group: DecodeGroup) -> Tensor:
        assert isinstance(group, OpenDecodeGroup)
        keys = k.view(len(q), self._facts.num_kv_heads, -1, self._facts.head_dim)
        keys[group.row, :, group.column] = self._keys[group.place, :, group.offset].float()
        return super()._decode(q.float(), keys, v, group).to(q.dtype)

    # --------------------------------------------------------------------------------------- chunks

    def _prefill_row(self, lo: int, hi: int, slot: int, seq_len: int) -> OpenPrefillRow:
        plain = super()._prefill_row(lo, hi, slot, seq_len)
        positions = torch.arange(seq_len - hi + lo, seq_len, device=self._storage.k.device)
        num_open = seq_len % self._storage.block_size
        return OpenPrefillRow(lo, hi, plain.rows, None, num_open, positions)

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, row: PrefillRow) -> Tensor:
        """In float32, a tile of queries at a time, over the keys up to the tile's last."""
        assert isinstance(row, OpenPrefillRow)
        heads, dim = self._facts.num_kv_heads, self._facts.head_dim
        k, v = k.view(heads, -1, dim), v.view(heads, -1, dim)
        if row.num_open:
            last = self._keys[self._touched.place[row.hi - 1]]
            k[:, -row.num_open :] = last[:, : row.num_open].float()
        out = torch.empty_like(q)
        size = max(1, _MAX_SCORES // (q.shape[1] * k.shape[1]))
        for lo in range(0, len(q), size):
            tile = slice(lo, min(lo + size, len(q)))
            num_keys = k.shape[1] - len(q) + tile.stop
            asked = q[tile].float().unflatten(1, (heads, -1)).transpose(0, 1)  # [K, t, H / K, D]
            place = self._touched.place[row.lo + tile.start : row.lo + tile.stop]
            scores = self._scores(asked, k[:, :num_keys], place, row.positions[tile])
            weights = scores.softmax(-1).flatten(1, 2)
            found = (weights @ v[:, :num_keys]).unflatten(1, (len(place), -1))
            out[tile] = found.transpose(0, 1).flatten(1, 2).to(q.dtype)
        return out

    def _scores(self, asked: Tensor, k: Tensor, place: Tensor, positions: Tensor) -> Tensor:
        """Scaled and masked, float32 [K, t, H / K, n]; k is [K, n, D] of what is stored at last."""
        size, num_keys = self._storage.block_size, k.shape[1]
        scores = (asked.flatten(1, 2) @ k.mT).unflatten(1, asked.shape[1:3])
        scores = F.pad(scores, (0, -num_keys % size))  # to whole blocks; masked below
        own = torch.einsum("ktgd,tkbd->ktgb", asked, self._keys[place].float())
        offsets = torch.arange(size, device=k.device)
        columns = (positions // size * size)[:, None] + offsets
        columns = columns[:, None].expand_as(own)
        fills = ((positions + 1) % size == 0)[:, None, None]  # which reads codes of its own block
        own = torch.where(fills, scores.gather(-1, columns), own)
        scores = scores.scatter(-1, columns, own)[..., :num_keys] * self._facts.softmax_scale
        unseen = torch.arange(num_keys, device=k.device) > positions[:, None]
        return scores.masked_fill_(unseen[:, None], float("-inf"))


def _index(x: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, np.int64)).to(device)
