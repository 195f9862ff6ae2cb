"""A span at its places alone: what it reads, prepared, and the plain nodes that it replaces.

A step of T tokens is composed over a real cache, and the plain chain runs up to the first place of
the span: what is live there, in its shapes, strides and magnitudes, is what every place of the span
reads. So each place has its own weights, sink and layer, and the same values, which are as warm as
those that a node before has just written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from core.batch import Limits
from core.chain import Decoder, Placed, cover, execute
from core.conform import bind
from core.errors import UserError
from core.registry import Registry
from core.rope import rope_tables
from core.sampler import SAMPLE
from core.sampling import Needs
from core.seams import offered
from core.testing.rig import Rig
from core.testing.spans import compare

if TYPE_CHECKING:
    from torch import Tensor

    from core.batch import Batch, Sequence
    from core.facts import ModelFacts
    from core.model import Operation
    from core.seams import Span
    from core.weights import ModelWeights

Values = dict[str, "Tensor"]

# Fields of LayerWeights that a node reads.
_WEIGHTS = {
    "attn_norm": ("attn_norm",),
    "qkv_proj": ("qkv", "qkv_bias"),
    "qk_norm": ("q_norm", "k_norm"),
    "o_proj": ("o",),
    "mlp_norm": ("mlp_norm",),
    "gate_up": ("gate_up",),
    "down": ("down",),
}


@dataclass(frozen=True)
class Case:
    """The places of one span in a step: for each the span's operation and the nodes under it, and
    the values that all of them read."""

    batch: Batch
    places: Seq[tuple[Operation, Seq[Placed]]]
    values: Values

    def copy(self) -> Case:
        """The same places over values of their own, which a span may write in place."""
        return Case(self.batch, self.places, {n: _copy(v) for n, v in self.values.items()})

    def repeated(self, num_places: int) -> Case:
        """The places over and over, in order, until there are at least as many."""
        return Case(self.batch, [*self.places] * -(-num_places // len(self.places)), self.values)

    def plain(self) -> Iterator[Values]:
        """Run the plain nodes of each place; what they leave live, place by place."""
        runs = [(cover(placed, []), operation.writes) for operation, placed in self.places]
        for operations, writes in runs:
            live = execute(operations, self.batch, dict(self.values))
            yield {name: live[name] for name in writes}

    def fused(self) -> Iterator[Values]:
        """Run the span at each place; what it leaves live, place by place."""
        for operation, _ in self.places:
            reads = [self.values[name] for name in operation.reads]
            out = operation.run(operation.sites, self.batch, *reads)
            yield dict(zip(operation.writes, out, strict=True))

    def deviations(self, tolerance: float) -> list[str]:
        """Where the span is not what its nodes are, in values and in the cache: sentences."""
        problems: list[str] = []
        for operation, placed in self.places:
            live = dict(self.values)
            for _, found in compare(
                [operation], placed, self.batch, tolerance=tolerance, live=live
            ):
                problems += map(str, found)
        return problems

    def least_bytes(self) -> int | None:
        """Bytes that one place must move: weights read once, values read, values written. None
        where it reads the cache, or writes one whose format is not the model's."""
        operation, placed = self.places[0]
        names = [p.node.name for p in placed]
        sink = next((p.site.sink for p in placed if p.node.name == "kv_write"), None)
        writes_cache = "kv_write" in names
        if "attention" in names or (writes_cache and (sink is None or sink.kind != "blocks")):
            return None
        reads = {name: self.values[name] for name in operation.reads}
        num_rows = len(self.batch.logit_rows)
        if names[0] == "lm_head":  # of all tokens it reads those that have logits
            reads["hidden"] = reads["hidden"][:num_rows]
        moved = [*reads.values(), *next(self.plain()).values()]
        total = sum(map(_num_bytes, moved)) + sum(self._own_bytes(p) for p in placed)
        facts, num_tokens = placed[0].site.facts, self.batch.shape.num_tokens
        return total + writes_cache * num_tokens * facts.kv_bytes_per_token // facts.num_layers

    def _own_bytes(self, placed: Placed) -> int:
        """Bytes that a node reads beside values: its weights, and rows of tables."""
        (name, *_), site, batch = placed.node, placed.site, self.batch
        if name == "embed":
            return int(batch.token_ids.unique().numel()) * site.model.embed[0].nbytes
        if name == "rope":
            return int(batch.positions.unique().numel()) * (site.cos[0].nbytes * 2)
        if name in ("final_norm", "lm_head"):
            return int(getattr(site.model, name).nbytes)
        fields = [getattr(site.weights, field) for field in _WEIGHTS.get(name, ())]
        return sum(field.nbytes for field in fields if field is not None)


class Bench:
    """A decoder over a real cache, which composes steps of `tokens` tokens.

    Up to `max_rows` tokens are as many sequences that decode at `context` tokens; more are a lone
    fresh prompt. `num_layers` (None: all) are chained; behind the chain stands the sampler's node.
    """

    def __init__(
        self,
        facts: ModelFacts,
        weights: ModelWeights,
        device: torch.device,
        tokens: Seq[int],
        *,
        context: int,
        max_rows: int,
        kv: str = "paged",
        num_layers: int | None = None,
    ) -> None:
        rows = max([n for n in tokens if n <= max_rows], default=1)
        longest = max(*tokens, context) + 1
        if longest > facts.max_position:
            raise UserError(
                f"a step of {longest - 1} tokens was asked for and the model has "
                f"{facts.max_position} positions: lower --tokens or --context"
            )
        limits = Limits(longest, rows, max(*tokens, rows))
        offer: Any = Registry().find("kv", kv).load()
        cache = bind("kv", offer(offer.Config()))
        if (look_at := offered(cache, "weights")) is not None:
            look_at(weights)
        # A block more for each, whatever the size of a block up to 64.
        room = max(rows * (context + 64), max(tokens) + 64)
        self._rig = Rig(cache, num_tokens=room, limits=limits, facts=facts, device=str(device))
        if self._rig.limits.max_num_seqs < rows:
            raise UserError(
                f"kv '{kv}' has {self._rig.limits.max_num_seqs} seats in room for {room} tokens "
                f"and {rows} sequences are to decode: choose --kv paged, or lower --max-rows"
            )
        for stored in self._rig.storage():
            stored.normal_()
        self.facts, self.max_rows, self._context = facts, max_rows, context
        decoder = Decoder(facts, weights, rope_tables(facts, longest, device), device)
        chain = decoder.chain(cache, num_layers)
        self.chain = [*chain, Placed(SAMPLE, chain[-1].site)]

    @property
    def sink(self) -> Any:
        """That of the first layer: what spans are asked about."""
        return self.chain[1].site.sink

    @contextmanager
    def step(self, num_tokens: int) -> Iterator[Batch]:
        """A step that has begun, with no padding; it ends with the context."""
        rng = np.random.default_rng(num_tokens)
        decodes = num_tokens <= self.max_rows
        lengths = [self._context] * num_tokens if decodes else [num_tokens]
        running = []
        for n in lengths:
            ids = rng.integers(0, self.facts.vocab_size, n).tolist()
            running.append(self._rig.sequence(ids, share_prefix=False))
            assert self._rig.admit(running[-1]) == 0, "the room was made for it"
            running[-1].num_computed = n - 1 if decodes else 0
        try:
            yield self._begin(running, decodes)
        finally:
            for seq in running:
                self._rig.release(seq)

    def _begin(self, running: list[Sequence], decodes: bool) -> Batch:
        prompts = [(seq, seq.num_known) for seq in running]
        step = self._rig.begin(running) if decodes else self._rig.begin([], prompts)
        batch, device = step.batch, self._rig.device
        ids = np.concatenate([row.seq.token_ids[row.lo : row.hi] for row in step.rows])
        batch.token_ids.copy_(torch.from_numpy(ids))
        batch.logit_rows.copy_(batch.query_start[1:] - 1)
        batch.sample_slots.copy_(batch.slots)
        batch.temperature.fill_(1.0)
        generator = torch.Generator().manual_seed(len(ids))
        keys = torch.randint(-(2**31), 2**31, tuple(batch.sample_keys.shape), generator=generator)
        batch.sample_keys.copy_(keys)
        batch.needs = Needs.HOT
        shape = len(batch.slots), self.facts.vocab_size
        batch.logits = torch.zeros(shape, dtype=self.facts.dtype, device=device)
        return batch

    def case(self, span: Span, batch: Batch) -> Case | None:
        """The places of `span`, alone, in a step that has begun; None where it has none."""
        places: list[tuple[Operation, Seq[Placed]]] = []
        at = first = 0
        for operation in cover(self.chain, [span]):
            width = len(operation.sites) if isinstance(operation.sites, tuple) else 1
            if isinstance(operation.sites, tuple):
                first = first if places else at
                places.append((operation, self.chain[at : at + width]))
            at += width
        if not places:
            return None
        live = execute(cover(self.chain[:first], []), batch, {})
        reads = {name for operation, _ in places for name in operation.reads}
        return Case(batch, places, {name: live[name] for name in reads})


def _copy(value: Tensor) -> Tensor:
    """A copy with the same strides, of views too."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    return value.new_empty(size).as_strided(value.shape, value.stride()).copy_(value)


def _num_bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()
