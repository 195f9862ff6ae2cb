"""An `attend` built on `gather`: a new cache format needs `write` and `gather` alone.

    def attend(self, layer, q, batch):
        return by_gather.attend(self, layer, q, batch, scale=self.facts.softmax_scale)

It masks by position, so a format that keeps fewer tokens than it was given (an evictor) or keeps
them in another order is read correctly. It loops over the rows on the host: such an offer declares
`graph_safe = False`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from core.batch import Batch


class Gathers(Protocol):
    """What is asked of a cache here."""

    def gather(self, slot: int, layer: int, lo: int, hi: int) -> tuple[Tensor, Tensor, Tensor]: ...


def attend(kv: Gathers, layer: int, q_THD: Tensor, batch: Batch, *, scale: float) -> Tensor:
    """Attention of q [T, H, D] over what `kv.gather` gives for each row: [T, H * D] in q's dtype.

    Padding gives 0. Every query must see at least one stored key at or before its own position,
    usually its own.
    """
    host = batch.host
    assert host is not None, "attention by gather runs eagerly: declare graph_safe = False"
    out_THD = torch.zeros_like(q_THD)
    starts = host.query_start.tolist()
    for slot, seq_len, lo, hi in zip(
        host.slots.tolist(), host.seq_lens.tolist(), starts[:-1], starts[1:], strict=True
    ):
        k_NKD, v_NKD, positions = kv.gather(slot, layer, 0, seq_len)
        row = (q_THD[lo:hi], k_NKD, v_NKD)
        q, k, v = (values.to(q_THD.dtype).transpose(0, 1)[None] for values in row)
        mask = positions[None, :] <= batch.positions[lo:hi, None]
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
        out_THD[lo:hi] = out[0].transpose(0, 1)
    return out_THD.flatten(1)
