"""`sinks`: the first few tokens and a window of the last ones; what lies between is forgotten.

Guangxuan Xiao, Yuandong Tian, Beidi Chen, Song Han, Mike Lewis: Efficient Streaming Language Models
with Attention Sinks, ICLR 2024 (arXiv:2309.17453). A softmax has to put its weight somewhere, and
models learn to put what they do not need on the first tokens; a window alone loses these and the
text falls apart.

A query at p sees the keys at 0..num_sinks-1 and at p-window+1..p, however its prompt was cut into
chunks. Keys keep the positions that RoPE gave them: the paper counts positions inside the cache,
which nobody can do who gets keys after RoPE. So the text may not outgrow the model's own context.

A row has num_sinks places, then a ring. All keys of a step are written before any is read, so that
the ring has room for the window and for a whole step. T tokens, K key/value heads, D head_dim.
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

NEVER = int(np.iinfo(np.int32).max)


class Sinks:
    """A row a slot; lossy where a sequence is longer than the sinks and the window."""

    api: ClassVar[int] = 1
    lossless: ClassVar[bool] = False
    prefix_sharing: ClassVar[bool] = False
    graph_safe: ClassVar[bool] = False

    class Config(OfferConfig):
        num_sinks: int = Field(4, ge=0, description="tokens kept from the start of a sequence")
        window: int = Field(1024, ge=1, description="tokens kept before a query, itself among them")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.sharing = False
        self._held: dict[Sequence, int | None] = {}

    # -------- host half

    def num_rows(self, limits: Limits) -> int:
        """Tokens that a sequence has room for; a shorter context needs no eviction."""
        kept = self.config.num_sinks + self.config.window + limits.max_num_batched_tokens
        return min(limits.max_model_len, kept)

    def capacity(self, kv_cache_bytes: int, facts: ModelFacts, limits: Limits) -> Capacity:
        rows = kv_cache_bytes // (facts.kv_bytes_per_token * self.num_rows(limits)) - 1
        num_seqs = min(limits.max_num_seqs, max(0, rows))
        return Capacity(num_seqs * limits.max_model_len, num_seqs)

    def ever_fits(self, num_tokens: int) -> str | None:
        longest = self._limits.max_model_len
        if num_tokens <= longest:
            return None
        return f"a sequence of {num_tokens} tokens outgrows max_model_len {longest}: raise that"

    def acquire(self, seq: Sequence, upto: int) -> int | None:
        if seq not in self._held:
            if len(self._held) == self._limits.max_num_seqs:
                return None
            self._held[seq] = None
        return 0

    def on_slot(self, seq: Sequence, slot: int | None) -> None:
        before, self._held[seq] = self._held[seq], slot
        if before is not None:
            self.reserved[before] = 0
        if slot is not None:
            self.reserved[slot] = self._limits.max_model_len

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """What is forgotten cannot be shared."""

    def rollback(self, seq: Sequence, num_tokens: int) -> None:
        """Nothing was published."""

    def release(self, seq: Sequence) -> None:
        self.on_slot(seq, None)
        del self._held[seq]

    def usage(self) -> Usage:
        longest = self._limits.max_model_len
        return Usage(self._limits.max_num_seqs * longest, len(self._held) * longest, 0)

    def check_integrity(self) -> None:
        slots = [slot for slot in self._held.values() if slot is not None]
        assert len(set(slots)) == len(slots), "two sequences run in one slot"
        assert set(self.reserved.nonzero()[0].tolist()) == set(slots), "reserved is out of date"

    # -------- device half

    def bind(
        self, facts: ModelFacts, limits: Limits, kv_cache_bytes: int, device: torch.device
    ) -> None:
        import torch

        self._facts, self._limits = facts, limits
        self.reserved: NDArray[Any] = np.zeros(limits.max_num_seqs + 1, np.int32)
        self.next_publish: NDArray[Any] = np.full(limits.max_num_seqs + 1, NEVER, np.int32)
        shape = (2, facts.num_layers, limits.max_num_seqs + 1, self.num_rows(limits))
        heads = (facts.num_kv_heads, facts.head_dim)
        self.k, self.v = torch.zeros(*shape, *heads, dtype=facts.dtype, device=device)

    def metadata(self, limits: Limits) -> Mapping[str, tuple[tuple[int, ...], str]]:
        return {}

    def plan(self, step: HostBatch, host: Mapping[str, NDArray[Any]]) -> bool:
        return False

    def begin_step(self, batch: Batch) -> None:
        """The host's view of the step is all that `attend` needs."""

    def _places(self, positions: Tensor) -> Tensor:
        """Where in its row each position stands: sinks first, then the ring."""
        sinks, num_rows = self.config.num_sinks, self.k.shape[2]
        if num_rows == self._limits.max_model_len:
            return positions
        ring = sinks + (positions - sinks) % (num_rows - sinks)
        return ring.where(positions >= sinks, positions)

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        at = (batch.token_slots, self._places(batch.positions))
        self.k[layer].index_put_(at, k)
        self.v[layer].index_put_(at, v)

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """Each row alone, over the keys that any of its queries sees."""
        import torch
        import torch.nn.functional as F

        host = batch.host
        assert host is not None, "attention on the host's view of a step is never captured"
        out, starts = torch.zeros_like(q), host.query_start.tolist()
        for r, (slot, length) in enumerate(
            zip(host.slots.tolist(), host.seq_lens.tolist(), strict=True)
        ):
            lo, hi = starts[r], starts[r + 1]
            asked = batch.positions[lo:hi, None]
            k, v, positions = self._kept(slot, layer, length - (hi - lo), length)
            mask = (positions <= asked) & self.sees(asked, positions)
            row = F.scaled_dot_product_attention(
                q[lo:hi].transpose(0, 1)[None],
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                mask,
                scale=self._facts.softmax_scale,
                enable_gqa=True,
            )
            out[lo:hi] = row[0].transpose(0, 1)
        return out.flatten(1)

    def sees(self, asked: Any, keys: Any) -> Any:
        """Which keys at or before it a query at `asked` still sees: of both the positions. The
        suite asks, too."""
        return (keys < self.config.num_sinks) | (keys > asked - self.config.window)

    def _kept(self, slot: int, layer: int, first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values that any query at first..end-1 sees, [n, K, D], and positions [n]."""
        import torch

        oldest = max(0, first - self.config.window + 1)
        sinks = torch.arange(min(self.config.num_sinks, oldest), device=self.k.device)
        positions = torch.cat((sinks, torch.arange(oldest, end, device=self.k.device)))
        places = self._places(positions)
        return self.k[layer, slot, places], self.v[layer, slot, places], positions

    def gather(self, slot: int, layer: int, lo: int, hi: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of positions lo..hi-1 those that a query at hi - 1 sees, which is the newest."""
        k, v, positions = self._kept(slot, layer, max(hi - 1, 0), hi)
        chosen = positions >= lo
        return k[chosen], v[chosen], positions[chosen]

    def sink(self, layer: int) -> None:
        return None


@hookimpl
def outweigh_register_kv(register: Register) -> None:
    register("sinks", Sinks)
