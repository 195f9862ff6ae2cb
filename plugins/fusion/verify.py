"""`fusion.verify`: each span, wherever it runs, beside the plain nodes that it replaces.

A watched span first runs its nodes on copies of what it reads: once in the model's dtype, and once,
the oracle, with inputs, weights and gains widened to float32. Then the span runs, and the step goes
on with its result. Its error against the oracle may be `FACTOR` times that of the plain nodes, and
`FLOOR` more: see `core.testing.parity`. So rounding elsewhere than the nodes do is no deviation,
and a sum in half precision is. Errors are relative to the root mean square of their row, and both
their root mean square over all real rows and the worst of them are held to it; rows of padding are
not looked at. In float32 the plain nodes are the oracle, and `FLOOR` is all that is allowed.

What a span stores is read back by `kv.gather` (and from the sink's `fresh`) from places that held
zeros before it: `kv.write` therefore runs once more than otherwise, and once with zeros. Places
that are none of the step's are not looked at; the conformance suite does that.

Sampled ids are equal, or tied: greedily an id wins only where its logit is the row's largest, and
of rows with noise where its score is within `FACTOR` times `TIE` of the best.

It compares on the host and so takes no captured graph, reads each step's values back, and may be
several times as slow. A step with a deviation raises RunError, which ends its requests.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from core.chain import Placed, cover, decoder_chain, execute
from core.errors import RunError, explained
from core.model import EMBED, FINAL_NORM, LAYER, LM_HEAD
from core.sampler import SAMPLE, gumbel_scores
from core.sampling import Needs
from core.testing.parity import FACTOR, FLOOR, RELATIVE_TIE, TIE
from plugins.kv import by_gather

if TYPE_CHECKING:
    from torch import Tensor

    from core.batch import Batch
    from core.model import Operation, Site
    from core.seams import KVManager, Span

    Values = dict[str, Tensor]

_NODES = {node.name: node for node in (EMBED, *LAYER, FINAL_NORM, LM_HEAD, SAMPLE)}


class _Interface(NamedTuple):
    """What a span reads, and what it leaves live, in the order of `core.model.VALUES`; of what it
    reads, that which is read after it too."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    keeps: tuple[str, ...]


class _Error(NamedTuple):
    """Of a value against the oracle, by row and relative to it."""

    rms: float
    worst: float


class Verification:
    """Watches the spans of one fusion set.

    `counts` has an entry for each span that has run: at how many places, and how often it was right
    and deviated, over all of them.
    """

    def __init__(self) -> None:
        self.counts: dict[str, dict[str, int]] = {}
        self._batch: weakref.ref[Batch] | None = None
        self._passed: list[tuple[tuple[str, ...], int]] = []  # places of this pass over the chain
        self._places: set[tuple[tuple[str, ...], int]] = set()

    def watched(self, spans: Iterable[Span]) -> tuple[Span, ...]:
        """`spans`, each of which compares itself when it runs.

        For all spans of a set at once, since places are counted: the advice of an error is how much
        fuel is right. One whose nodes are no run of the chain is refused by the core.
        """
        watched = []
        for span in spans:
            interface = _interface(span)
            run = span.run if interface is None else partial(self._run, span, interface)
            watched.append(replace(span, run=run))
        return tuple(watched)

    def _run(
        self,
        span: Span,
        interface: _Interface,
        sites: tuple[Site, ...],
        batch: Batch,
        *values: Tensor,
    ) -> tuple[Tensor, ...]:
        num_right = self._place(span, sites, batch)
        place = _Place(span, sites, batch, num_right)
        given = dict(zip(interface.reads, values, strict=True))
        stored = _Stored(span, sites, batch)
        plain = place.plain(given)
        plain_stored = stored.read()
        oracle, written = place.oracle(given)
        stored.clear(written)
        if batch.logits is not None and "logits" in interface.writes:
            batch.logits.fill_(torch.nan)
        scores = _scores(given["logits"], batch) if "sampled" in interface.writes else None
        if batch.host is None:  # the dry pass that sizes the cache: over nothing, about memory
            return span.run(sites, batch, *values)
        kept = {name: given[name].clone() for name in interface.keeps}
        counts = self._count(span, sites)
        counts["num_deviating"] += 1  # until it is known to be right
        with explained(f"{place} raised", place.advice(), RunError):
            found = span.run(sites, batch, *values)
        place.check_interface(found, interface, plain)
        place.check_kept(given, kept)
        for name, value in zip(interface.writes, found, strict=True):
            if name == "sampled":
                place.check_ids(value, cast("Tensor", scores))
            else:
                num_rows = len(value) if name == "logits" else batch.host.num_tokens
                three = (x[name][:num_rows] for x in ({name: value}, plain, oracle))
                place.check(name, *three)
        for name, value in stored.read().items():
            place.check(name, value, plain_stored[name], stored.wanted(name, written))
        counts["num_deviating"] -= 1
        counts["num_right"] += 1
        return found

    def _place(self, span: Span, sites: Seq[Site], batch: Batch) -> int:
        """How many places of this pass over the chain came before this one."""
        here = span.nodes, sites[0].layer
        seen = self._batch() if self._batch is not None else None
        if seen is not batch or here in self._passed:
            self._batch, self._passed = weakref.ref(batch), []
        self._passed.append(here)
        return len(self._passed) - 1

    def _count(self, span: Span, sites: Seq[Site]) -> dict[str, int]:
        empty = {"num_places": 0, "num_right": 0, "num_deviating": 0}
        counts = self.counts.setdefault(span.name, empty)
        here = span.nodes, sites[0].layer
        counts["num_places"] += here not in self._places
        self._places.add(here)
        return counts


@dataclass(frozen=True)
class _Place:
    """A span at one of its places, in one step. `num_right` places before it are right."""

    span: Span
    sites: tuple[Site, ...]
    batch: Batch
    num_right: int

    def __str__(self) -> str:
        layers = sorted({site.layer for site in self.sites if site.layer >= 0})
        of = f" of layer {' and '.join(map(str, layers))}" if layers else ""
        host = self.batch.host
        num_tokens = self.batch.shape.num_tokens if host is None else host.num_tokens
        tokens = f"{num_tokens} token{'s' * (num_tokens != 1)}"
        nodes = " · ".join(self.span.nodes)
        return f"fusion.verify: span '{self.span.name}' ({nodes}){of}, in a step of {tokens},"

    def advice(self) -> str:
        if self.span.nodes[0] == SAMPLE.name:  # a chain of its own, with fuel of its own
            return "a fusion.only that does not name it leaves it out"
        return f"--set fusion.fuel={self.num_right} leaves it out, and all behind it"

    def plain(self, given: Mapping[str, Tensor]) -> Values:
        """What the nodes leave, in the model's dtype; keys and values in the cache."""
        live = {name: value.clone() for name, value in given.items()}
        return self._execute(self.sites, live)

    def oracle(self, given: Mapping[str, Tensor]) -> tuple[Values, dict[int, Written]]:
        """What they leave in float32, and the keys and values of each layer that they write."""
        if self.span.nodes[0] == SAMPLE.name:
            return {}, {}
        kv = _WideKV(self.sites[0].kv, self.sites[0].facts.softmax_scale)
        sites = [
            replace(
                site,
                facts=replace(site.facts, dtype=torch.float32),
                model=cast(Any, _Wide(site.model)),
                weights=None if site.weights is None else _Wide(site.weights),
                kv=cast("KVManager", kv),
            )
            for site in self.sites
        ]
        live = {name: value.to(torch.float32, copy=True) for name, value in given.items()}
        return self._execute(sites, live), kv.written

    def _execute(self, sites: Seq[Site], live: Values) -> Values:
        pairs = zip(self.span.nodes, sites, strict=True)
        chain = [Placed(_NODES[name], site) for name, site in pairs]
        return execute(cover(chain, []), replace(self.batch, logits=None), live)

    def check_interface(self, found: Any, interface: _Interface, plain: Values) -> None:
        """As many values as are live, each of its shape and dtype, logits in their buffer."""
        names = interface.writes
        if not isinstance(found, tuple) or len(found) != len(names):
            many = f"{len(found)} values" if isinstance(found, tuple) else type(found).__name__
            self._deviates(f"returns {many} and not ({', '.join(names)})")
        for name, value in zip(names, found, strict=True):
            got, wanted = map(_kind, (value, plain[name]))
            if got != wanted:
                self._deviates(f"returns {name} as {got} and not as {wanted}")
            buffer = self.batch.logits
            if name == "logits" and buffer is not None and value.data_ptr() != buffer.data_ptr():
                self._deviates("leaves its logits outside batch.logits, where the sampler reads")

    def check_kept(self, given: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> None:
        """Values that the span read, and that nodes behind it read, are as they were."""
        for name, value in kept.items():
            if not given[name].contiguous().view(torch.uint8).equal(value.view(torch.uint8)):
                self._deviates(f"writes over {name}, which is read after it")

    def check(self, name: str, found: Tensor, plain: Tensor, oracle: Tensor) -> None:
        """Raise where the error of `found` is more than that of `plain` allows."""
        dtype = self.sites[0].facts.dtype
        ours, theirs = (_error(value, oracle) for value in (found, plain))
        for how, off, plain_off in zip(_Error._fields, ours, theirs, strict=True):
            allowed = FACTOR * plain_off + FLOOR[dtype]
            if not off <= allowed:
                of = "over all rows" if how == "rms" else "in the worst row"
                self._deviates(
                    f"leaves {name} with a relative error of {off:.2g} {of}, where that of the "
                    f"plain nodes is {plain_off:.2g} and {allowed:.2g} is allowed"
                )

    def check_ids(self, sampled: Tensor, scores: Tensor) -> None:
        """Raise where an id is neither that of the best score nor tied with it."""
        known = (sampled >= 0) & (sampled < scores.shape[1])
        best = scores.max(-1).values
        chosen = scores.gather(1, torch.where(known, sampled, 0).long()[:, None])[:, 0]
        hot = self.batch.temperature[: len(scores)] > 0
        tie = torch.where(hot, FACTOR * (TIE + RELATIVE_TIE * best.abs()), 0.0)  # both round
        wrong = ~known | ~(best - chosen <= tie)
        if wrong.any():
            row = int(wrong.int().argmax())
            self._deviates(
                f"samples id {int(sampled[row])} in row {row}, whose best is "
                f"{int(scores[row].argmax())}, and differs in {int(wrong.sum())} rows"
            )

    def _deviates(self, how: str) -> None:
        raise RunError(f"{self} {how}: {self.advice()}")


class _Wide:
    """Weights whose tensors are float32, each made when it is asked for."""

    def __init__(self, weights: Any) -> None:
        self._weights = weights

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._weights, name)
        return value.float() if isinstance(value, torch.Tensor) else value


class _WideKV:
    """A cache that keeps what it is given, and attends in float32 to what the real one stores."""

    def __init__(self, kv: KVManager, softmax_scale: float) -> None:
        self._kv, self._scale = kv, softmax_scale
        self.written: dict[int, Written] = {}

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        self.written[layer] = k, v

    def gather(self, slot: int, layer: int, lo: int, hi: int) -> tuple[Tensor, Tensor, Tensor]:
        return self._kv.gather(slot, layer, lo, hi)

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        if batch.host is None:
            return q.flatten(1)
        return by_gather.attend(cast("KVManager", self), layer, q, batch, scale=self._scale)


Written = tuple["Tensor", "Tensor"]  # keys and values of a step, float32 [T, K, D]


class _Stored:
    """What the nodes of a span store of this step: read back from the cache, by layer."""

    def __init__(self, span: Span, sites: Seq[Site], batch: Batch) -> None:
        pairs = zip(span.nodes, sites, strict=True)
        self._sites = [site for name, site in pairs if name == "kv_write" and batch.host]
        self._batch = batch
        self._tokens: dict[str, Tensor] = {}  # which tokens of the step were read back

    def read(self) -> Values:
        """Name of what is stored -> copies of its rows, [n, K, D]."""
        values: Values = {}
        for site in self._sites:
            tokens, k, v = (torch.cat(parts) for parts in zip(*self._rows(site), strict=True))
            values |= self._pair("stored", site, (k, v), tokens)
            if site.sink is not None and site.sink.fresh is not None and self._batch.shape.lone:
                own = [scratch[: len(tokens)].clone() for scratch in site.sink.fresh]
                values |= self._pair("fresh", site, own, torch.arange(len(tokens)).to(tokens))
        return values

    def _pair(self, kind: str, site: Site, pair: Iterable[Tensor], tokens: Tensor) -> Values:
        names = [f"{kind} {what} of layer {site.layer}" for what in ("keys", "values")]
        self._tokens |= dict.fromkeys(names, tokens)
        return dict(zip(names, pair, strict=True))

    def _rows(self, site: Site) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of each sequence: tokens of the step, their keys and values."""
        host = self._batch.host
        assert host is not None
        starts, lengths = host.query_start.tolist(), host.seq_lens.tolist()
        for slot, length, lo, hi in zip(
            host.slots.tolist(), lengths, starts[:-1], starts[1:], strict=True
        ):
            first = length - (hi - lo)
            k, v, positions = site.kv.gather(slot, site.layer, first, length)
            yield positions.long() - first + lo, k.clone(), v.clone()

    def wanted(self, name: str, written: Mapping[int, Written]) -> Tensor:
        """Of `name`, what the oracle would store in the rows that were read back."""
        layer, tokens = int(name.rpartition(" ")[2]), self._tokens[name]
        if "values" in name:
            return written[layer][1][tokens]
        keys = written[layer][0]
        if name.startswith("fresh"):  # of some caches without what smoothing shifts them by
            (sink,) = (site.sink for site in self._sites if site.layer == layer)
            keys = keys - getattr(sink, "k_shift", 0)
        return keys[tokens]

    def clear(self, written: Mapping[int, Written]) -> None:
        """Zeros in the places of this step: a span that stores nothing leaves nothing."""
        for site in self._sites:
            k, v = (torch.zeros_like(x, dtype=site.facts.dtype) for x in written[site.layer])
            site.kv.write(site.layer, k, v, self._batch)


def _kind(value: Any) -> str:
    """What a value is, in a word or three."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype} {list(value.shape)} on {value.device}"


def _interface(span: Span) -> _Interface | None:
    """Found by covering a chain without weights with the span alone; None where it has no place."""
    nowhere = cast("Site", None)
    layers = [nowhere] * (len(span.nodes) // len(LAYER) + 2)
    for chain in (decoder_chain(nowhere, layers), [Placed(SAMPLE, nowhere)]):
        operations = cover(chain, [span])
        for i, (_, sites, _, reads, writes, _) in enumerate(operations):
            if isinstance(sites, tuple):
                rest = operations[i + 1 :]
                kept = tuple(n for n in reads if n not in writes and _is_read(n, rest))
                return _Interface(reads, writes, kept)
    return None


def _is_read(name: str, operations: Seq[Operation]) -> bool:
    """Whether a value is read by `operations` before it is written."""
    first = next((op for op in operations if name in (*op.reads, *op.writes)), None)
    return first is not None and name in first.reads


def _error(value: Tensor, oracle: Tensor) -> _Error:
    """Of [n, ...] against float32 [n, ...]; infinite where a number is missing."""
    if not len(oracle):
        return _Error(0.0, 0.0)
    off, wanted = (value.float() - oracle).flatten(1), oracle.flatten(1)
    size = wanted.square().mean(1).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    by_row = off.square().mean(1).sqrt() / size
    by_row = torch.where(off.any(1), by_row, 0.0).nan_to_num(nan=torch.inf)
    return _Error(float(by_row.square().mean().sqrt()), float(by_row.max()))


def _scores(logits: Tensor, batch: Batch) -> Tensor:
    """What the `sample` node takes the largest of, float32 [R, V]."""
    if batch.needs & Needs.HOT:
        return gumbel_scores(logits, batch.temperature, batch.sample_keys)
    return logits.float()
