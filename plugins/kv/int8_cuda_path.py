"""The device half of INT8 on CUDA: kernels over codes; a prompt that sees only itself as its base.

Queries read every key from its codes on each route, those of their own step too: `write_int8`
leaves a lone chunk's round trip in the scratch, where a fresh one's is read; a chunk behind a
prefix is left to the kernel. Factors go to the queries of decode and chunks, and to the keys of the
scratch; the shift is left to softmax. Safe in a captured graph, as its base.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plugins.kv.cuda_path import CudaPath
from plugins.kv.kernels.decode_int8 import decode_int8
from plugins.kv.kernels.prefill_int8 import prefill_int8
from plugins.kv.kernels.write_int8 import write_int8

if TYPE_CHECKING:
    from torch import Tensor

    from core.batch import Batch
    from plugins.kv.int8_storage import Int8Storage


class Int8CudaPath(CudaPath):
    """`write` and `attend` over an Int8Storage whose values lie as on CUDA."""

    _storage: Int8Storage

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """Store codes and scales of k and v, [T, K, D], and the round trip of a lone chunk."""
        s, num_tokens = self._storage, batch.shape.num_tokens
        write_int8(
            k,
            v,
            s.k_shift[layer],
            s.k_factor[layer],
            self._codes(layer),
            self._scales(layer),
            s.slot_map[:num_tokens],
            s.block_size,
            fresh=self._fresh_tokens(num_tokens) if batch.shape.lone else None,
        )

    def _decode(self, layer: int, q: Tensor, batch: Batch, out: Tensor) -> None:
        s = self._storage
        decode_int8(
            q,
            s.k_factor[layer],
            self._codes(layer),
            self._scales(layer),
            s.table,
            batch.slots,
            batch.seq_lens,
            batch.num_decodes,
            block_size=s.block_size,
            scale=self._scale,
            num_rows=batch.shape.num_seqs,
            out=out,
            arrivals=self._arrivals,
        )

    def _prefill(self, layer: int, q: Tensor, batch: Batch, out: Tensor) -> None:
        s = self._storage
        prefill_int8(
            q,
            s.k_factor[layer],
            self._codes(layer),
            self._scales(layer),
            s.table,
            batch.slots,
            batch.query_start,
            batch.seq_lens,
            self._tiles(batch),
            block_size=s.block_size,
            scale=self._scale,
            out=out,
        )

    def _codes(self, layer: int) -> tuple[Tensor, Tensor]:
        """Codes of keys [N, K, B, D] and of values [N, K, D, B], as the kernels take them."""
        s = self._storage
        return s.k[layer], s.v[layer].transpose(-1, -2)

    def _scales(self, layer: int) -> tuple[Tensor, Tensor]:
        s = self._storage
        return s.k_scale[layer], s.v_scale[layer]
