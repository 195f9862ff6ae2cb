"""The default `attend`, built on `gather`: a new cache format needs `write` and `gather` alone.

    def attend(self, layer, q, batch):
        return attention.attend(self, layer, q, batch, scale=self.facts.softmax_scale)

It masks by position, so a format that keeps fewer tokens than it was given (an evictor) or keeps
them in another order is read correctly. It loops over the rows on the host: such an offer declares
`graph_safe = False`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from core.batch import Batch
    from core.seams import KVManager


def attend(kv: KVManager, layer: int, q_THD: Tensor, batch: Batch, *, scale: float) -> Tensor:
    """Attention of q [T, H, D] over what `kv.gather` gives for each row: [T, H * D] in q's dtype.

    Padding gives 0. Every query must see at least one stored key at or before its own position,
    usually its own.
    """
    host = batch.host
    assert host is not None, "the default attend runs eagerly; declare graph_safe = False"
    out_THD = torch.zeros_like(q_THD)
    starts = host.query_start.tolist()
    for slot, seq_len, lo, hi in zip(
        host.slots.tolist(), host.seq_lens.tolist(), starts[:-1], starts[1:], strict=True
    ):
        k, v, positions = kv.gather(slot, layer, 0, seq_len)
        out_THD[lo:hi] = _attend_row(q_THD[lo:hi], k, v, positions, batch.positions[lo:hi], scale)
    return out_THD.flatten(1)


def _attend_row(
    q: Tensor, k: Tensor, v: Tensor, key_positions: Tensor, query_positions: Tensor, scale: float
) -> Tensor:
    """q [n, H, D] of one row over its k and v [m, K, D], masked by position: [n, H, D]."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.to(q.dtype).transpose(0, 1)[None],
        v.to(q.dtype).transpose(0, 1)[None],
        attn_mask=key_positions[None, :] <= query_positions[:, None],
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
