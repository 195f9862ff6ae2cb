"""The device half on CUDA: kernels for what is stored and for short prompts, cuDNN for a longer one
that sees only itself.

A whole chunk behind a prefix (plugins.kv.cudnn.is_whole) takes cuDNN too, where it serves the model
(bfloat16 or float16, head_dim a multiple of 8 up to 128; else, and at other lengths, the kernels):
over the prefix, gathered into one piece, and over the chunk's own keys, apart. Each part is rounded
to the dtype once before both are merged in float32 by their sums. On an H200, 16 heads of 128 over
8, a chunk of 8,192 tokens behind 24,576 takes 3.1 ms so and 4.3 ms by the kernel; 1,024 behind
3,072 take 150 us and 216 us.

Safe in a captured graph: nothing here reads the device on the host, and only BatchShape decides the
route.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from core.errors import UserError
from plugins.kv import cudnn
from plugins.kv.kernels.decode import decode_attention
from plugins.kv.kernels.fresh import fresh_attention, suits_fresh
from plugins.kv.kernels.limits import refusal
from plugins.kv.kernels.prefill import prefill_attention
from plugins.kv.kernels.prefix import gather_prefix, merge_parts
from plugins.kv.kernels.slot_map import fill_slot_map
from plugins.kv.kernels.splits import MAX_ARRIVALS
from plugins.kv.kernels.tiles import fill_tiles, max_tiles, tiles_shape
from plugins.kv.kernels.write import write_kv

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from core.batch import Batch, BatchShape, HostBatch, Limits
    from core.facts import ModelFacts
    from plugins.kv.storage import Storage

# Causal forward on an H200, 16 heads of 128, TFLOP/s at 1k / 4k / 16k tokens: cuDNN 187 / 445 /
# 622, flash 95 / 221 / 320.
_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class CudaPath:
    """`write` and `attend` over a Storage by the kernels of plugins/kv/kernels.

    Raises UserError where these do not serve the model's shapes.
    """

    def __init__(self, facts: ModelFacts, storage: Storage) -> None:
        if (reason := refusal(facts)) is not None:
            raise UserError(f"{reason}; choose another model, or --device cpu")
        assert storage.fresh is not None
        self._scale = facts.softmax_scale
        self._storage, self._fresh = storage, storage.fresh
        self._arrivals = torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=storage.k.device)

    def metadata(self, limits: Limits) -> dict[str, tuple[tuple[int, ...], str]]:
        """The tiles of prefill attention, planned on the host."""
        return {"tiles": tiles_shape(limits)}

    def plan(self, step: HostBatch, host: Mapping[str, NDArray[Any]]) -> None:
        """Cut the prefill rows of the step into tiles, unless its route reads none."""
        shape = step.shape
        if shape is None or not (shape.fresh or shape.decode_only or self._in_parts(shape)):
            fill_tiles(step, host["tiles"])

    def begin_step(self, batch: Batch) -> None:
        """Fill the slot map from the block table."""
        s = self._storage
        out = s.slot_map[: batch.shape.num_tokens]
        fill_slot_map(batch.positions, batch.token_slots, s.table, s.block_size, out)

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """Store k and v, [T, K, D]; a lone chunk leaves a contiguous copy too, to be read alone."""
        s, num_tokens = self._storage, batch.shape.num_tokens
        fresh = self._fresh_tokens(num_tokens) if batch.shape.lone else None
        slot_map = s.slot_map[:num_tokens]
        write_kv(k, v, s.k[layer], s.v[layer], slot_map, s.block_size, fresh=fresh)

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """Attention of q [T, H, D], [T, H * D]."""
        if batch.shape.fresh:
            return self._attend_fresh(q)
        if self._in_parts(batch.shape):
            return self._attend_in_parts(layer, q, batch)
        # Rows of padding keep what the memory held: they lead to the trash block and to no logits.
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._decode(layer, q, batch, out)
        if not batch.shape.decode_only:
            self._prefill(layer, q, batch, out)
        return out.flatten(1)

    def _attend_fresh(self, q: Tensor) -> Tensor:
        """Rows beyond the prompt are padding, written and finite; being causal, no real row sees
        them."""
        k, v = self._fresh_tokens(len(q))
        if suits_fresh(q):
            return fresh_attention(q, k, v, scale=self._scale).flatten(1)
        with sdpa_kernel(_BACKENDS, set_priority=True):
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                is_causal=True,
                scale=self._scale,
                enable_gqa=True,
            )
        return out[0].transpose(0, 1).flatten(1)

    def _in_parts(self, shape: BatchShape) -> bool:
        """Whether cuDNN attends to prefix and chunk apart."""
        return self._storage.prefix is not None and cudnn.is_whole(shape)

    def _attend_in_parts(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """No row is padding: a shape with a prefix is exact."""
        s, start = self._storage, batch.shape.start
        assert s.prefix is not None
        k, v = (room[:start] for room in s.prefix)
        gather_prefix(s.k[layer], s.v[layer], s.table, batch.slots, k, v, block_size=s.block_size)
        before = cudnn.attention(q, k, v, is_causal=False, scale=self._scale)
        own = self._fresh_tokens(len(q))
        out, lse = cudnn.attention(q, *own, is_causal=True, scale=self._scale)
        merge_parts(out, lse, *before)
        return out.flatten(1)

    def _decode(self, layer: int, q: Tensor, batch: Batch, out: Tensor) -> None:
        s = self._storage
        decode_attention(
            q,
            s.k[layer],
            s.v[layer],
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
        prefill_attention(
            q,
            s.k[layer],
            s.v[layer],
            s.table,
            batch.slots,
            batch.query_start,
            batch.seq_lens,
            self._tiles(batch),
            block_size=s.block_size,
            scale=self._scale,
            out=out,
        )

    def _tiles(self, batch: Batch) -> Tensor:
        """The list of prefill tiles, as long as a step of this shape may need."""
        return batch.kv["tiles"][: max_tiles(batch.shape.num_tokens, batch.shape.num_seqs)]

    def _fresh_tokens(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        k, v = self._fresh
        return k[:num_tokens], v[:num_tokens]
