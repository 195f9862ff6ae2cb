"""From the chain of atomic nodes and the spans on offer to the list of operations that a step
runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from core.errors import UserError
from core.model import EMBED, FINAL_NORM, LAYER, LM_HEAD, VALUES, Node, Operation, Site

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from core.batch import Batch
    from core.facts import ModelFacts
    from core.seams import KVManager, Span
    from core.weights import ModelWeights


class Placed(NamedTuple):
    """A node at its place in the chain."""

    node: Node
    site: Site


@dataclass(frozen=True)
class Decoder:
    """A model on its device: weights and RoPE tables, to be chained over a kv offer."""

    facts: ModelFacts
    weights: ModelWeights
    rope: tuple[Tensor, Tensor]
    device: torch.device

    def chain(self, kv: KVManager, num_layers: int | None = None) -> list[Placed]:
        """The nodes from token ids to logits, over the first `num_layers` layers (None: all)."""
        shared, layers = (self.facts, self.weights), self.weights.layers[:num_layers]
        sites = [Site(i, *shared, w, *self.rope, kv, kv.sink(i)) for i, w in enumerate(layers)]
        return decoder_chain(Site(-1, *shared, None, *self.rope, kv, None), sites)


def decoder_chain(head_site: Site, layer_sites: Seq[Site]) -> list[Placed]:
    """The whole decoder, from token ids to logits."""
    chain = [Placed(EMBED, head_site)]
    chain += [Placed(node, site) for site in layer_sites for node in LAYER]
    return [*chain, Placed(FINAL_NORM, head_site), Placed(LM_HEAD, head_site)]


def check_spans(spans: Iterable[Span]) -> None:
    """Raises UserError for a span whose nodes are no run of a decoder of any number of layers."""
    for span in spans:
        layers = LAYER * (len(span.nodes) // len(LAYER) + 2)
        names = [node.name for node in (EMBED, *layers, FINAL_NORM, LM_HEAD)]
        runs = [tuple(names[i : i + len(span.nodes)]) for i in range(len(names))]
        if not span.nodes or span.nodes not in (*runs, ("sample",)):
            raise UserError(f"span {span.name!r} is over {span.nodes!r}: give nodes in their order")


def cover(
    chain: Seq[Placed], spans: Iterable[Span], fuel: int | None = None, strict: bool = False
) -> list[Operation]:
    """Replace runs of nodes by spans, without overlap; nodes that no span claims stay plain.

    Spans claim in order of priority, then of length, then of name. With `strict` (spans asked for
    by name) two of one priority that want the same node are an error. `fuel` bounds the number of
    places claimed, counted from the start of the chain: bisecting on it finds the first place where
    a span deviates.
    """
    names = [placed.node.name for placed in chain]
    claimed: dict[int, Span] = {}  # node index -> span, for every node of a claimed run
    starts: dict[int, Span] = {}
    for span in sorted(spans, key=lambda s: (-s.priority, -len(s.nodes), s.name)):
        width = len(span.nodes)
        for i in range(len(chain) - width + 1 if width else 0):
            if tuple(names[i : i + width]) != span.nodes:
                continue
            taken = next((claimed[j] for j in range(i, i + width) if j in claimed), None)
            if taken is None:
                starts[i] = span
                claimed.update(dict.fromkeys(range(i, i + width), span))
            elif strict and taken is not span and taken.priority == span.priority:
                what = f"spans {taken.name!r} and {span.name!r} both claim node {names[i]!r}"
                raise UserError(f"{what}: name one of them in fusion.only")
    if fuel is not None:
        starts = dict(sorted(starts.items())[:fuel])
    return _operations(chain, starts)


def _operations(chain: Seq[Placed], starts: dict[int, Span]) -> list[Operation]:
    operations: list[Operation] = []
    i = 0
    while i < len(chain):
        span = starts.get(i)
        run = chain[i : i + (len(span.nodes) if span else 1)]
        i += len(run)
        if span:
            reads, writes = interface([p.node for p in run], [p.node for p in chain[i:]])
            sites = tuple(placed.site for placed in run)
            operations.append(Operation(span.name, sites, span.run, reads, writes, span.nodes))
        else:
            (name, reads, writes, compute), site = run[0]
            operations.append(Operation(name, site, compute, reads, writes, (name,)))
    return operations


def interface(
    run: Seq[Node | Operation], rest: Seq[Node | Operation]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a run of nodes reads from outside, and what it writes that is read after it."""
    reads: set[str] = set()
    written: set[str] = set()
    for node in run:
        reads |= set(node.reads) - written
        written |= set(node.writes)
    live, pending = set(), set(written)
    for node in rest:
        live |= pending & set(node.reads)
        pending -= set(node.reads) | set(node.writes)
        if not pending:
            break
    if not rest:  # what the last node of a chain writes has no reader: it is the result
        live |= pending & set(run[-1].writes)
    return tuple(v for v in VALUES if v in reads), tuple(v for v in VALUES if v in live)


def execute(operations: Seq[Operation], batch: Batch, live: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run the operations in order. `live` is updated in place and returned."""
    for operation in operations:
        out = operation.run(operation.sites, batch, *[live[name] for name in operation.reads])
        live.update(zip(operation.writes, out, strict=True))
    return live
