"""Numbers of a comparison: divergence, agreement and loss, whole, by position and by document.

Documents are the independent units: intervals of means draw whole documents with replacement
(percentiles of 2,000 draws, 95 %). A share of positions has Wilson's interval too, which is the
wider one where documents are few or all alike; what a verdict reads is the hull of both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np

from evals.intervals import Interval, quantiles, wilson

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from evals.quality.lockstep import Compared

_DRAWS = 2000
_PERCENTILES = (0.1, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)
_TINY = 1e-12  # nats; stands for a divergence of 0 below a fraction line


def bucket_edges(longest: int) -> list[tuple[int, int]]:
    """(first, last) of the buckets of positions 0 .. longest - 1: 0-63, 64-255, 256-1,023, …"""
    edges = [0, 64]
    while edges[-1] < longest:
        edges.append(edges[-1] * 4)
    return [(lo, hi - 1) for lo, hi in zip(edges, edges[1:], strict=False)]


def drawn(sums: Any, seed: int) -> NDArray[np.float64]:
    """Sums [documents, k] of documents drawn with replacement, [2000, k]; the same for a seed."""
    values = np.asarray(sums, np.float64)
    num = len(values)
    counts = np.random.default_rng(seed).multinomial(num, np.full(num, 1 / num), _DRAWS)
    found: NDArray[np.float64] = counts @ values
    return found


def mean_interval(parts: Seq[NDArray[Any]], seed: int) -> Interval:
    """Of the mean over all positions; `parts` are the values of each document, none empty."""
    sums = drawn([(part.sum(), len(part)) for part in parts], seed)
    return quantiles(sums[:, 0] / sums[:, 1])


def share_interval(parts: Seq[NDArray[np.bool_]], seed: int) -> Interval:
    """Of a share of positions: the hull of Wilson's interval and that over documents."""
    num, n = sum(int(part.sum()) for part in parts), sum(map(len, parts))
    (a, b), (c, d) = wilson(num, n), mean_interval(parts, seed)
    return min(a, c), max(b, d)


def statistics(found: Seq[Compared], tail_kl: float, seed: int) -> dict[str, Any]:
    """All of one comparison; `tail_kl` is the divergence above which a position is in the tail."""
    flat = joined(found)
    p_base, p = np.exp(-flat.base_nats), np.exp(-flat.nats)
    tail = [one.kl > tail_kl for one in found]
    return {
        **_core(found, seed),
        "kl_percentiles": _percentiles(flat.kl),
        "tail_kl": tail_kl,
        "tail_share": float(np.concatenate(tail).mean()),
        "tail_share_interval": share_interval(tail, seed),
        "delta_p": {
            "mean": float((p - p_base).mean()),
            "rms": float(np.sqrt(np.square(p - p_base).mean())),
            "min": float((p - p_base).min()),
            "max": float((p - p_base).max()),
            "percentiles": _percentiles(p - p_base),
        },
        "base_perplexity": _perplexity(flat.base_nats),
        "perplexity": _perplexity(flat.nats),
        "num_not_finite": int((~flat.finite).sum()),
        "buckets": by_position(found, seed),
    }


def _core(found: Seq[Compared], seed: int) -> dict[str, Any]:
    """What is said of all positions and of every bucket alike; no document is empty."""
    flat = joined(found)
    num_same, n = int(flat.same.sum()), len(flat.same)
    same = [one.same for one in found]
    return {
        "num_documents": len(found),
        "num_positions": n,
        "mean_kl": float(flat.kl.mean()),
        "mean_kl_interval": mean_interval([one.kl for one in found], seed),
        "median_kl": float(np.median(flat.kl)),
        "p99_kl": float(np.quantile(flat.kl, 0.99)),
        "max_kl": float(flat.kl.max()),
        "top1": num_same / n,
        "top1_wilson": wilson(num_same, n),
        "top1_interval": share_interval(same, seed),
        "base_nats": float(flat.base_nats.mean()),
        "nats": float(flat.nats.mean()),
        "delta_nats": float((flat.nats - flat.base_nats).mean()),
        "delta_nats_interval": mean_interval([one.nats - one.base_nats for one in found], seed),
    }


def by_position(found: Seq[Compared], seed: int) -> list[dict[str, Any]]:
    """A row for each bucket that a document reaches."""
    rows = []
    for first, last in bucket_edges(max(len(one.kl) for one in found)):
        inside = [_cut(one, first, last) for one in found if len(one.kl) > first]
        rows.append({"first": first, "last": last, **_core(inside, seed)})
    return rows


def drift(
    found: Seq[Compared], early: tuple[int, int], late: tuple[int, int], seed: int
) -> tuple[float, Interval]:
    """Mean KL at the late positions over that at the early ones (first, last), with its interval.

    Of documents that reach the late ones, so that both come from the same texts.
    """
    sums = []
    for one in found:
        if len(one.kl) > late[0]:
            a, b = _cut(one, *early).kl, _cut(one, *late).kl
            sums.append((a.sum(), len(a), b.sum(), len(b)))
    whole = np.sum(sums, 0, keepdims=True)
    return float(_ratio(whole)[0]), quantiles(_ratio(drawn(sums, seed)))


def _ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    early, late = sums[:, 0] / sums[:, 1], sums[:, 2] / sums[:, 3]
    found: NDArray[np.float64] = late / np.maximum(early, _TINY)
    return found


def joined(found: Seq[Compared]) -> Compared:
    """All positions of all documents in a row."""
    return type(found[0])(*map(np.concatenate, zip(*found, strict=True)))


def of_document(one: Compared) -> dict[str, Any]:
    """The figures of one document."""
    return {
        "num_positions": len(one.kl),
        "mean_kl": float(one.kl.mean()),
        "p99_kl": float(np.quantile(one.kl, 0.99)),
        "max_kl": float(one.kl.max()),
        "top1": float(one.same.mean()),
        "base_nats": float(one.base_nats.mean()),
        "nats": float(one.nats.mean()),
        "delta_nats": float((one.nats - one.base_nats).mean()),
    }


def _cut(one: Compared, first: int, last: int) -> Compared:
    parts: Any = (part[first : last + 1] for part in one)
    return type(one)(*parts)


def _percentiles(values: NDArray[np.float64]) -> dict[str, float]:
    found = np.percentile(values, _PERCENTILES).tolist()
    return {f"{p:g}": value for p, value in zip(_PERCENTILES, found, strict=True)}


def _perplexity(nats: NDArray[np.float64]) -> float:
    return math.exp(min(float(nats.mean()), 700.0))  # e ** 709 is the last float
