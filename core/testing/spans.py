"""Spans beside the nodes they replace: `verify`, and what is wrong where they differ.

The oracle of a span is the run of plain nodes in its place, on the values that the plain chain
leaves there, so that a deviation is its own and not that of a span before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from core.chain import Placed, cover, execute
from core.errors import reason

if TYPE_CHECKING:
    from torch import Tensor

    from core.batch import Batch
    from core.model import Operation
    from core.seams import KVSink, Span

ROW_VALUES = ("logits", "sampled")  # a row a logits row; the others have a row a token
_GAP = 8  # elements between the rows of strided values


class Deviation(NamedTuple):
    """Where a span is not what its nodes are: in how many values it returns, in one of them, in
    what it leaves in the cache, or because it raised."""

    where: str
    what: Literal["number", "value", "cache", "error"]
    how: str

    def __str__(self) -> str:
        return f"{self.where}: {self.how}"


def verify(
    operations: Seq[Operation],
    chain: Seq[Placed],
    batch: Batch,
    *,
    tolerance: float,
    strided: bool = False,
    live: dict[str, Tensor] | None = None,
) -> list[str]:
    """Compare each span of `operations` in place; the names of those compared, in order.

    `operations` cover `chain`. The plain nodes run from its start, where `live` holds the values
    live before it, and each span on copies of what they leave at its place; `strided` copies have a
    gap of NaN between their rows. Rows of real tokens may be off by `tolerance` times (1 + the
    plain value), integers not at all. A span that writes keys and values finds the cache as its
    nodes found it and must leave it as they do, padding's places apart; the storage of its layer is
    copied for that. `batch` is a step that has begun. Raises AssertionError that names the first
    span that deviates, where it stands, and how far it is off.
    """
    compared = compare(operations, chain, batch, tolerance=tolerance, strided=strided, live=live)
    for _, deviations in compared:
        assert not deviations, str(deviations[0])
    return [name for name, _ in compared]


@torch.inference_mode()
def compare(
    operations: Seq[Operation],
    chain: Seq[Placed],
    batch: Batch,
    *,
    tolerance: float,
    strided: bool = False,
    live: dict[str, Tensor] | None = None,
) -> list[tuple[str, list[Deviation]]]:
    """As `verify`, but goes on: the name of each span with all that is wrong about it.

    `live` is updated in place to what the plain nodes leave in the end.
    """
    live = {} if live is None else live
    compared = []
    for operation, placed in _places(operations, chain):
        plain = cover(placed, [])
        if not isinstance(operation.sites, tuple):
            execute(plain, batch, live)
            continue
        copies = [_copy(live[name], strided) for name in operation.reads]
        cache = _Cache(placed, batch)
        execute(plain, batch, live)
        wanted = {name: live[name].clone() for name in operation.writes}
        cache.remember()
        if batch.logits is not None and "logits" in wanted:
            batch.logits.fill_(torch.nan)
        where = _where(operation, placed)
        try:
            found = operation.run(operation.sites, batch, *copies)
        except Exception as error:
            problems = [Deviation(where, "error", f"it raised {reason(error)}")]
        else:
            problems = _deviations(where, found, wanted, batch, tolerance)
            problems += cache.deviations(where, tolerance)
        compared.append((operation.name, problems))
        cache.reset()
        if batch.logits is not None and "logits" in wanted:
            batch.logits.copy_(wanted["logits"])
    return compared


def covers(chain: Seq[Placed], spans: Seq[Span]) -> Iterator[list[Operation]]:
    """Covers of `chain` that between them hold every span which has a place there."""
    rest = list(spans)
    while rest:
        operations = cover(chain, rest)
        claimed = {
            (operation.name, tuple(p.node.name for p in placed))
            for operation, placed in _places(operations, chain)
            if isinstance(operation.sites, tuple)
        }
        if not claimed:
            return
        yield operations
        rest = [span for span in rest if (span.name, span.nodes) not in claimed]


def _places(
    operations: Seq[Operation], chain: Seq[Placed]
) -> Iterator[tuple[Operation, Seq[Placed]]]:
    """Each operation with the nodes that it stands for."""
    at = 0
    for operation in operations:
        width = len(operation.sites) if isinstance(operation.sites, tuple) else 1
        yield operation, chain[at : at + width]
        at += width


def _where(operation: Operation, placed: Seq[Placed]) -> str:
    layers = sorted({p.site.layer for p in placed if p.site.layer >= 0})
    nodes = " · ".join(p.node.name for p in placed)
    at = f" of layer {' and '.join(map(str, layers))}" if layers else ""
    return f"span '{operation.name}' ({nodes}){at}"


def _copy(value: Tensor, strided: bool) -> Tensor:
    if not strided:
        return value.clone()
    rows = value.flatten(1)
    width = rows.shape[1]
    wide = value.new_full((len(rows), width + _GAP), torch.nan)
    wide[:, :width] = rows
    return wide[:, :width].view(value.shape)


def _deviations(
    where: str, found: Any, wanted: Mapping[str, Tensor], batch: Batch, tolerance: float
) -> list[Deviation]:
    if not isinstance(found, tuple) or len(found) != len(wanted):
        got = f"{len(found)} values" if isinstance(found, tuple) else f"a {type(found).__name__}"
        live = f"a tuple of {len(wanted)} ({', '.join(wanted) or 'nothing is live after it'})"
        return [Deviation(where, "number", f"returns {got} and not {live}")]
    problems = []
    for (name, want), got in zip(wanted.items(), found, strict=True):
        if got.shape != want.shape or got.dtype != want.dtype:
            made, meant = (f"{t.dtype} {list(t.shape)}" for t in (got, want))
            problem = f"is {made} and not {meant}"
        elif name == "logits" and batch.logits is not None and not got.equal(batch.logits):
            problem = "is not in batch.logits, where the sampler reads it"
        else:
            n = len(want) if name in ROW_VALUES or batch.host is None else batch.host.num_tokens
            assert want[:n].isfinite().all(), f"the plain nodes leave no finite {name}"
            problem = difference(got[:n], want[:n], tolerance)
        if problem:
            problems.append(Deviation(where, "value", f"{name} {problem}"))
    return problems


def difference(got: Tensor, want: Tensor, tolerance: float) -> str:
    """What is wrong with `got`, of which a row may be off by tolerance * (1 + |want|), or ""."""
    if not got.is_floating_point():
        num_wrong = int((got != want).sum())
        return f"differs in {num_wrong} of {want.numel()} places" if num_wrong else ""
    off = (got.double() - want.double()).abs() / (1 + want.double().abs())
    off = off.masked_fill(got.isnan() & want.isnan(), 0.0)  # padding that both left as it was
    off = off.nan_to_num(nan=torch.inf).flatten(1).amax(1)
    if not (off > tolerance).any():
        return ""
    row = int((off > tolerance).int().argmax())
    return f"is off by {float(off[row]):.2g} in row {row}, where {tolerance:g} is allowed"


class _Cache:
    """What the `kv_write` nodes of a span's place write to: before them and after them."""

    def __init__(self, placed: Seq[Placed], batch: Batch) -> None:
        sites = [p.site for p in placed if p.node.name == "kv_write"]
        self._sinks = [s for site in sites if (s := site.kv.sink(site.layer)) is not None]
        self._batch = batch
        self._tensors = [t for sink in self._sinks for t in (sink.k, sink.v, *(sink.fresh or ()))]
        self._before = [tensor.clone() for tensor in self._tensors]
        self._after: list[Tensor] = []

    def remember(self) -> None:
        """What the storage holds now is what the span has to leave; it finds what was before."""
        self._after = [tensor.clone() for tensor in self._tensors]
        self._set(self._before)

    def reset(self) -> None:
        """The plain nodes go on with what they have written themselves."""
        self._set(self._after)

    def _set(self, values: Seq[Tensor]) -> None:
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.copy_(value)

    def deviations(self, where: str, tolerance: float) -> list[Deviation]:
        for sink in self._sinks:
            for tensor, wanted in zip(self._tensors, self._after, strict=True):
                if any(tensor is scratch for scratch in sink.fresh or ()):
                    self._forgive_rows(tensor, wanted)
                elif tensor is sink.k or tensor is sink.v:
                    self._forgive_places(sink, tensor, wanted)
        problems = []
        for tensor, before, wanted in zip(self._tensors, self._before, self._after, strict=True):
            if problem := difference(tensor, wanted, tolerance):
                unwritten = " (nothing was written)" if tensor.equal(before) else ""
                problems.append(Deviation(where, "cache", f"what is stored {problem}{unwritten}"))
        return problems[:1]

    def _padding(self) -> slice:
        num_tokens = self._batch.shape.num_tokens
        return slice(self._batch.host.num_tokens if self._batch.host else num_tokens, num_tokens)

    def _forgive_rows(self, tensor: Tensor, wanted: Tensor) -> None:
        wanted[self._padding()] = tensor[self._padding()]

    def _forgive_places(self, sink: KVSink, tensor: Tensor, wanted: Tensor) -> None:
        """Padding writes to the trash; in which order, and whether at all, is open."""
        places = sink.slot_map[self._padding()].long()
        block, offset = places // sink.block_size, places % sink.block_size
        wanted[block, :, offset] = tensor[block, :, offset]
