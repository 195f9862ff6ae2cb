"""The device half of INT8 in plain torch: any device that torch knows, and the oracle of kernels.

Only the rows that a step reads are dequantised. Keys stay smoothed: the queries are multiplied
instead, T rows and not the whole context, and the shift is left to softmax. A step reads its own
tokens from their codes too, so a token reads the same in one piece, in chunks, by decoding or after
a prefix hit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plugins.kv.int8_storage import dequantize, quantize
from plugins.kv.torch_path import TorchPath

if TYPE_CHECKING:
    from torch import Tensor

    from core.batch import Batch
    from core.facts import ModelFacts
    from plugins.kv.int8_storage import Int8Storage


class Int8Path(TorchPath):
    """`write` and `attend` over an Int8Storage."""

    _storage: Int8Storage

    def __init__(self, facts: ModelFacts, storage: Int8Storage) -> None:
        super().__init__(facts, storage)

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """Store codes and scales of k (smoothed) and v, [T, K, D]; padding in the trash block."""
        assert self._step is not None
        s, written = self._storage, self._step.written
        smooth_k = (k.float() - s.k_shift[layer]) / s.k_factor[layer]
        for cache, scales, values in ((s.k, s.k_scale, smooth_k), (s.v, s.v_scale, v)):
            codes, scale = quantize(values)
            cache[layer].view(-1, codes.shape[-1]).index_copy_(0, written, codes.flatten(0, 1))
            scales[layer].view(-1).index_copy_(0, written, scale.flatten())

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """Attention of q [T, H, D] over what is stored, [T, H * D]; 0 for padding tokens."""
        factor = self._storage.k_factor[layer]
        grouped = q.float().unflatten(1, (len(factor), -1)) * factor[:, None]
        return super().attend(layer, grouped.flatten(1, 2).to(q.dtype), batch)

    def _read(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        s = self._storage
        k, v = super()._read(layer, rows)
        k_scale, v_scale = (x[layer].view(-1).index_select(0, rows) for x in (s.k_scale, s.v_scale))
        return dequantize(k, k_scale).to(s.dtype), dequantize(v, v_scale).to(s.dtype)
