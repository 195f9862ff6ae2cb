"""A byte model that knows nothing but counts: what the embedded model must beat.

Interpolated Kneser-Ney smoothing after Chen and Goodman, "An empirical study of smoothing
techniques for language modeling" (TR-10-98, Harvard, 1998), section 3.4 and equation 22. The
highest order counts how often a gram occurs; each lower one counts how many different bytes stand
before it:

    p_k(w | h) = (max(c_k(h w) - D_k, 0) + D_k T_k(h) p_{k-1}(w | h')) / sum over v of c_k(h v)

with T_k(h) the number of bytes v that c_k(h v) has seen, h' as h without its first byte, and p_0 =
1 / 256. There is one discount an order, D = n1 / (n1 + 2 n2), n1 and n2 the numbers of grams whose
count is one and two; where no count is one, and so nothing would be left for bytes unseen, 1 / 2.

A gram of k bytes is an int64, its first byte the most significant: its context is a shift and its
suffix a mask, and sorted grams have sorted contexts. Documents begin with order - 1 bytes 0xFF,
which UTF-8 does not have; they are contexts and are never predicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from core.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

NUM_BYTES = 256
_PAD = 0xFF
_FALLBACK_DISCOUNT = 0.5


@dataclass(frozen=True)
class Level:
    """One order: `grams` int64 [G], sorted, with `counts` [G]; `contexts` int64 [C], sorted, with
    the sum of counts and the number of grams that begin with each, [C]."""

    grams: Ints
    counts: Ints
    contexts: Ints
    totals: Ints
    num_types: Ints
    discount: float

    @classmethod
    def of(cls, grams: Ints, counts: Ints) -> Level:
        contexts = grams >> 8
        first = _first_of_runs(contexts)
        num_types = np.diff(np.append(first, len(grams)))
        ones, twos = (int(np.count_nonzero(counts == n)) for n in (1, 2))
        discount = ones / (ones + 2 * twos) if ones else _FALLBACK_DISCOUNT
        totals = np.add.reduceat(counts, first)
        return cls(grams, counts, contexts[first], totals, num_types, discount)

    def interpolate(self, grams: Ints, lower: Floats) -> Floats:
        """p of the last byte of each gram given the others, from that of the order below, [n]."""
        at, seen = _find(self.contexts, grams >> 8)
        place, counted = _find(self.grams, grams)
        own = np.maximum(self.counts[place] * counted - self.discount, 0)
        mixed = (own + self.discount * self.num_types[at] * lower) / self.totals[at]
        return np.where(seen, mixed, lower)


class KneserNey:
    """Probabilities of the bytes of a text, each given the `order` - 1 before it."""

    def __init__(self, levels: list[Level]) -> None:
        self.levels = levels

    @classmethod
    def fit(cls, documents: Iterable[str], order: int = 5, chunk_grams: int = 1 << 25) -> KneserNey:
        """Count exactly. `order` is 1 to 7 bytes.

        At most about `chunk_grams` grams, and at least those that begin with one byte, are sorted
        at a time. 155 MB of text take half a minute and 1.4 GB. Raises UserError where there is no
        byte.
        """
        joined = bytearray()
        padding = bytes([_PAD]) * (order - 1)
        for document in documents:
            joined += padding
            joined += document.encode("utf-8")
        grams, counts = _count(np.frombuffer(joined, np.uint8), order, chunk_grams)
        if not len(grams):
            raise UserError("there is no byte to count: give documents that are not empty")
        levels = [Level.of(grams, counts)]
        for size in range(order - 1, 0, -1):
            grams = levels[-1].grams & _mask(size)  # of each gram one: what stands before differs
            levels.append(Level.of(*_unique(grams)))
        return cls(levels[::-1])

    @property
    def order(self) -> int:
        return len(self.levels)

    def nats(self, text: str) -> Floats:
        """Minus the log-probability of each byte of `text` as UTF-8, float64 [num_bytes]."""
        padded = bytes([_PAD]) * (self.order - 1) + text.encode("utf-8")
        data = np.frombuffer(padded, np.uint8)
        different, inverse = np.unique(_grams(data, self.order), return_inverse=True)
        nats: Floats = -np.log(self._probabilities(different))[inverse]
        return nats

    def bits_per_byte(self, text: str) -> float:
        """Mean of `nats`, in bits. `text` has at least one byte."""
        return float(self.nats(text).mean() / np.log(2))

    def distribution(self, context: bytes) -> Floats:
        """Probabilities of every byte after `context`, which begins a document if it is shorter
        than the order asks, float64 [256]."""
        padded = bytes([_PAD]) * (self.order - 1) + context
        last = int.from_bytes(padded[len(padded) - self.order + 1 :], "big")
        return self._probabilities((last << 8) + np.arange(NUM_BYTES, dtype=np.int64))

    def _probabilities(self, grams: Ints) -> Floats:
        p = np.full(len(grams), 1 / NUM_BYTES)
        for size, level in enumerate(self.levels, 1):
            p = level.interpolate(grams & _mask(size), p)
        return p


def _mask(size: int) -> int:
    return (1 << 8 * size) - 1


def _grams(data: NDArray[np.uint8], size: int, at: Ints | None = None) -> Ints:
    """The gram that begins at each place of `at`, or at every place that has `size` bytes."""
    num = len(data) - size + 1
    grams = np.zeros(num if at is None else len(at), np.int64)
    for i in range(size):
        grams <<= 8
        grams |= data[i : i + num] if at is None else data[at + i]
    return grams


def _count(data: NDArray[np.uint8], size: int, chunk_grams: int) -> tuple[Ints, Ints]:
    """Grams of `data` that end in no padding, sorted, and how often each occurs.

    A chunk is the grams that begin with certain bytes, so the chunks in turn are sorted already.
    """
    leads, ends = data[: len(data) - size + 1], data[size - 1 :]
    edges = [0]
    in_chunk = 0
    for byte, num in enumerate(np.bincount(leads, minlength=NUM_BYTES).tolist()):
        if in_chunk and in_chunk + num > chunk_grams:
            edges.append(byte)
            in_chunk = 0
        in_chunk += num
    found = []
    for low, high in zip(edges, [*edges[1:], NUM_BYTES], strict=True):
        at = np.flatnonzero((leads >= low) & (leads < high) & (ends != _PAD))
        found.append(_unique(_grams(data, size, at)))
    grams, counts = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return grams, counts


def _unique(grams: Ints) -> tuple[Ints, Ints]:
    """Sorted different grams and their counts. Sorts `grams` in place."""
    grams.sort()
    first = _first_of_runs(grams)
    return grams[first], np.diff(np.append(first, len(grams)))


def _first_of_runs(ordered: Ints) -> Ints:
    """Where each run of equal values begins."""
    return np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)])


def _find(ordered: Ints, wanted: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """A place in `ordered` for each of `wanted`, and whether it is there."""
    at = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
    return at, ordered[at] == wanted
