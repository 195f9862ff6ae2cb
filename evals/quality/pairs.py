"""Right and wrong answers of two arms to the same items, and what the one lost of the other's."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, TypeVar

import numpy as np

from evals.intervals import Interval, mcnemar, paired_interval, wilson
from evals.quality.statistics import mean_interval

_T = TypeVar("_T")


def grouped(values: Seq[_T], groups: Seq[Any]) -> list[list[_T]]:
    """The values of each group, groups in order of appearance."""
    found: dict[Any, list[_T]] = {}
    for value, group in zip(values, groups, strict=True):
        found.setdefault(group, []).append(value)
    return list(found.values())


def difference(values: Seq[float], groups: Seq[Any], seed: int) -> tuple[float, Interval]:
    """The mean of paired differences, with an interval that draws whole groups."""
    parts = [np.array(part, float) for part in grouped(values, groups)]
    return float(np.mean(values)), mean_interval(parts, seed)


def paired_shares(base: Seq[bool], other: Seq[bool], groups: Seq[Any], seed: int) -> dict[str, Any]:
    """Two shares of the same items and the other's less the reference's, with its interval.

    That is the hull of Tango's, which takes items as independent, and of a bootstrap over groups:
    items of one group (a context, a document) may stand and fall together. `mcnemar_p` tests
    whether there is a difference at all, which is another question than how large it may be.
    """
    pairs = list(zip(base, other, strict=True))
    n, gained, lost = len(pairs), pairs.count((False, True)), pairs.count((True, False))
    delta, drawn = difference([float(b) - float(a) for a, b in pairs], groups, seed)
    tango = paired_interval(gained, lost, n)
    return {
        "n": n,
        "num_groups": len(set(groups)),
        "num_right": {"reference": sum(base), "other": sum(other)},
        "reference": sum(base) / n,
        "other": sum(other) / n,
        "reference_interval": wilson(sum(base), n),
        "other_interval": wilson(sum(other), n),
        "num_gained": gained,
        "num_lost": lost,
        "difference": delta,
        "interval": (min(drawn[0], tango[0]), max(drawn[1], tango[1])),
        "mcnemar_p": mcnemar(gained, lost),
    }
