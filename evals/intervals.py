"""How far an estimate may be off: proportions, paired proportions, means over clustered samples.

All intervals are two-sided with 95 % confidence, unless a function says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence as Seq
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONFIDENCE = 0.95
_REPLICATES = 2000

Interval = tuple[float, float]


def wilson(num_right: int, n: int) -> Interval:
    """Score interval of a proportion (Wilson 1927); all of [0, 1] where n is 0."""
    if not n:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    centre, share = num_right + z * z / 2, num_right / n
    half = z * (n * share * (1 - share) + z * z / 4) ** 0.5
    return max(0.0, (centre - half) / (n + z * z)), min(1.0, (centre + half) / (n + z * z))


def paired_lower_bound(num_gained: int, num_lost: int, n: int) -> float:
    """One-sided 95 % lower bound of the difference of two proportions on the same n items.

    The difference is (num_gained - num_lost) / n; items on which both agree are the rest. Score
    method of Tango, "Equivalence test and confidence interval for the difference in proportions for
    the paired-sample design", Statistics in Medicine 17 (1998): the difference at which the score
    statistic is the normal quantile, found by bisection.
    """
    return _lowest_difference(num_gained, num_lost, n, NormalDist().inv_cdf(CONFIDENCE))


def paired_interval(num_gained: int, num_lost: int, n: int) -> Interval:
    """Of the same difference, by the same method, two-sided; all of [-1, 1] where n is 0."""
    if not n:
        return -1.0, 1.0
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    low = _lowest_difference(num_gained, num_lost, n, z)
    return low, -_lowest_difference(num_lost, num_gained, n, z)


def _lowest_difference(num_gained: int, num_lost: int, n: int, z: float) -> float:
    low, high = -1.0, (num_gained - num_lost) / n
    for _ in range(60):
        middle = (low + high) / 2
        if _score(num_gained, num_lost, n, middle) > z:
            low = middle
        else:
            high = middle
    return low


def mcnemar(num_gained: int, num_lost: int) -> float:
    """The exact two-sided p that gains and losses on the same items are equally likely.

    McNemar, "Note on the sampling error of the difference between correlated proportions or
    percentages", Psychometrika 12 (1947), by the binomial distribution; 1 where there are neither.
    """
    n, fewer = num_gained + num_lost, min(num_gained, num_lost)
    tail = sum(math.comb(n, k) for k in range(fewer + 1))
    return min(1.0, float(2 * tail / 2**n))


def _score(num_gained: int, num_lost: int, n: int, difference: float) -> float:
    """Tango's statistic that the true difference is `difference`; it falls as that rises."""
    lost = lost_share(num_gained, num_lost, n, difference)
    variance = n * (2 * lost + difference * (1 - difference))
    distance = num_gained - num_lost - n * difference
    return float(distance / variance**0.5) if variance > 0 else float(np.inf) * np.sign(distance)


def lost_share(num_gained: int, num_lost: int, n: int, difference: float) -> float:
    """The likeliest probability that an item is lost, where that of a gain is `difference` more."""
    a = 2 * n
    b = -num_gained - num_lost + (2 * n - num_gained + num_lost) * difference
    c = -num_lost * difference * (1 - difference)
    return float((max(0.0, b * b - 4 * a * c) ** 0.5 - b) / (2 * a))


def clustered_ratio(
    numerators: Seq[float], denominators: Seq[float], clusters: Seq[Hashable], seed: int = 0
) -> Interval:
    """Of sum(numerators) / sum(denominators), by a bootstrap in two stages: clusters are drawn with
    replacement, then the samples of each."""
    members: dict[Hashable, list[int]] = {}
    for i, cluster in enumerate(clusters):
        members.setdefault(cluster, []).append(i)
    pairs = np.stack([np.asarray(numerators, float), np.asarray(denominators, float)], 1)
    groups = [pairs[places] for places in members.values()]
    rng = np.random.default_rng(seed)
    ratios = np.empty(_REPLICATES)
    for i in range(_REPLICATES):
        total = np.zeros(2)
        for g in rng.integers(0, len(groups), len(groups)).tolist():
            total += groups[g][rng.integers(0, len(groups[g]), len(groups[g]))].sum(0)
        ratios[i] = total[0] / total[1]
    return quantiles(ratios)


def clustered_mean(values: Seq[float], clusters: Seq[Hashable], seed: int = 0) -> Interval:
    """Of the mean of `values`, by the same bootstrap."""
    return clustered_ratio(values, [1.0] * len(values), clusters, seed)


def bootstrap(
    values: Seq[float], statistic: Callable[..., NDArray[Any]], seed: int = 0
) -> Interval:
    """Of `statistic(samples, axis=1)` of independent values, as np.median."""
    drawn = np.random.default_rng(seed).choice(np.asarray(values), (_REPLICATES, len(values)))
    return quantiles(statistic(drawn, axis=1))


def quantiles(estimates: NDArray[Any]) -> Interval:
    """What holds the middle `CONFIDENCE` of `estimates`."""
    low, high = np.quantile(estimates, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    return low, high
