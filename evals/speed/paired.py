"""Whether two arms of a serving benchmark differ, by the paired ratios of their runs.

The unit of replication is the *run*. Latencies within a run share its queue and are correlated, so
an interval over requests is far too narrow. A round measures every arm once, in the order of
`evals.speed.arms.in_turn`: forwards and backwards in turn (ABBA). A pair is the run of an arm and
that of its base in one round, on one trace, and its datum is the log of their ratio. Logs, because
effects and noise multiply: a ratio and its inverse lie equally far from none, their mean is the
geometric mean of the ratios (Fleming and Wallace, "How not to lie with statistics", CACM 29, 1986),
and run times that are skewed to the right become symmetric. Student's t, because there are 4 to 20
pairs, a normal or a bootstrap interval of so few is too narrow, and a rank test of eight pairs has
no p below 1/128, which Holm's correction over twelve steps can never accept (Georges, Buytaert and
Eeckhout, "Statistically rigorous Java performance evaluation", OOPSLA 2007; Kalibera and Jones,
"Rigorous benchmarking in reasonable time", ISMM 2013; Hoefler and Belli, "Scientific benchmarking
of parallel computing systems", SC 2015).

What drifts slowly is common to a pair and falls out of its ratio; what drifts within a round meets
forward and backward rounds with opposite signs. The two orders average to nothing, and the term
for the order keeps that part out of the error: the analysis of a two-period crossover (Senn,
"Cross-over trials in clinical research", 2002), at the price of one degree of freedom. That is
exact for drift in a straight line; the curve of a warm-up belongs before the first round.

Two questions have two intervals. *Repeatability*: one trace, the pairs differ by the machine's
noise, and the interval is about this trace. *Generality*: the rounds of a seed are averaged first,
the seeds differ by workload, and the interval is about workloads of that kind.

All fields of a `Ratio` are arrays of one shape, () for one comparison, so that a test can put
thousands of studies through the same code.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from core.errors import UserError
from evals.speed.distributions import scipy

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

Question = Literal["repeatability", "generality"]
Said = Literal["faster", "slower", "no change", "inconclusive"]

CONFIDENCE = 0.95
MARGIN = 0.03  # a ratio within 1/1.03 .. 1.03 is no change
MIN_UNITS = 4  # with the order's term, two degrees of freedom


class Run(NamedTuple):
    """A figure of one run: its workload's seed, the round it was measured in (even rounds run the
    arms forwards, odd ones backwards), and the value, in any unit, more than 0."""

    seed: int
    position: int
    value: float


@dataclass(frozen=True)
class Ratio:
    """A geometric mean of paired ratios, on the scale of logs.

    `log_mean`, its standard error `error`, the standard deviation `spread` of one unit, the degrees
    of freedom `df` of both, and how many units (pairs, or seeds) they come from. Shape [...] all.
    """

    log_mean: Floats
    error: Floats
    spread: Floats
    df: NDArray[np.int64]
    num_units: NDArray[np.int64]

    @property
    def ratio(self) -> Floats:
        """Arm over base."""
        return np.exp(self.log_mean)

    @property
    def half(self) -> Floats:
        """Half the width of the 95 % interval, on the scale of logs."""
        return np.asarray(self.error * scipy("special").stdtrit(self.df, (1 + CONFIDENCE) / 2))

    @property
    def low(self) -> Floats:
        return np.exp(self.log_mean - self.half)

    @property
    def high(self) -> Floats:
        return np.exp(self.log_mean + self.half)

    @property
    def p_equal(self) -> Floats:
        """Of the two-sided t-test that the ratio is 1; below 0.05 where the interval excludes 1."""
        return np.asarray(2 * scipy("special").stdtr(self.df, -np.abs(self._t(self.log_mean))))

    def p_outside(self, margin: float = MARGIN) -> Floats:
        """Of two one-sided tests that the ratio is outside 1/(1 + margin) .. 1 + margin: the larger
        of their p (Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15, 1987).

        It is below 0.025 exactly where the 95 % interval lies inside, which is the level used here,
        so that the verdict can be read off the interval shown; the customary level of 0.05 would
        belong to a 90 % interval.
        """
        nearest = math.log1p(margin) - np.abs(self.log_mean)
        return np.asarray(scipy("special").stdtr(self.df, -self._t(nearest)))

    def is_inside(self, margin: float = MARGIN) -> NDArray[np.bool_]:
        """Whether the 95 % interval lies within 1/(1 + margin) .. 1 + margin."""
        return np.abs(self.log_mean) + self.half < math.log1p(margin)

    def _t(self, distance: Floats) -> Floats:
        """Distances in standard errors; runs may repeat exactly, as counters do."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.nan_to_num(distance / self.error, nan=0.0, posinf=np.inf, neginf=-np.inf)


def estimate(log_ratios: ArrayLike, orders: ArrayLike) -> Ratio:
    """The Ratio of `log_ratios` [..., units], by least squares with a term for `orders` [units].

    An order is 1 where the unit's rounds ran forwards, -1 where backwards, 0 where both were
    averaged; if all are alike the term is left out, and drift within a round with it.
    """
    logs, order = np.asarray(log_ratios, float), np.asarray(orders, float)
    num = logs.shape[-1]
    centred, middle = order - order.mean(), logs.mean(-1)
    weight = float(centred @ centred)
    df = num - 2 if weight else num - 1
    slope = logs @ centred / weight if weight else np.zeros_like(middle)
    rest = logs - middle[..., None] - slope[..., None] * centred
    spread = np.sqrt((rest**2).sum(-1) / df)
    leverage = 1 / num + (order.mean() ** 2 / weight if weight else 0)
    log_mean = np.asarray(middle - slope * order.mean())
    counts = (np.full(log_mean.shape, n) for n in (df, num))
    return Ratio(log_mean, spread * leverage**0.5, spread, *counts)


def paired(base: Iterable[Run], arm: Iterable[Run], question: Question) -> Ratio:
    """The ratio of `arm` to `base`, whose runs are paired by seed and position.

    Raises UserError where a run has no partner, a value is no positive number, there are fewer than
    four units, all rounds ran in one order, or the seeds do not fit the question.
    """
    return _contrast({"base": (-1, base), "arm": (1, arm)}, question)


def interaction(
    base: Iterable[Run],
    alone: Iterable[Run],
    without: Iterable[Run],
    full: Iterable[Run],
    question: Question,
) -> Ratio:
    """How much more a step does in company than alone: (full / without) / (alone / base).

    `alone` is the base with the step, `full` the whole ladder, `without` the ladder less the step,
    all measured in the same rounds. It is 1 where effects multiply, on the scale of logs add: then
    a ladder's order does not matter. Raises UserError as `paired` does.
    """
    arms = {"base": (1, base), "alone": (-1, alone), "without": (-1, without), "full": (1, full)}
    return _contrast(arms, question)


def _contrast(arms: Mapping[str, tuple[int, Iterable[Run]]], question: Question) -> Ratio:
    """The Ratio whose log is the sum of sign * log of the arms' runs in every round."""
    tables = {name: _table(name, runs) for name, (_, runs) in arms.items()}
    keys = sorted(next(iter(tables.values())))
    for name, table in tables.items():
        if odd := set(keys) ^ set(table):
            seed, position = min(odd)
            raise UserError(
                f"{len(odd)} runs of {name} or its base have no partner, the first of seed {seed} "
                f"in round {position}: measure all arms in every round"
            )
    logs = [sum(s * math.log(tables[n][key]) for n, (s, _) in arms.items()) for key in keys]
    order = [-1.0 if position % 2 else 1.0 for _, position in keys]
    seeds = [seed for seed, _ in keys]
    num_seeds = len(set(seeds))
    if question == "repeatability" and num_seeds > 1:
        raise UserError(
            f"repeatability is about one trace and these runs have {num_seeds} seeds: ask for "
            "generality or give the runs of one seed"
        )
    if question == "generality":
        logs, order = _means(logs, seeds), _means(order, seeds)
    if len(logs) < MIN_UNITS:
        kind = "pairs" if question == "repeatability" else "seeds"
        raise UserError(f"{len(logs)} {kind} are too few to judge by: measure at least {MIN_UNITS}")
    if min(order) == max(order) != 0:
        raise UserError(
            f"all {len(logs)} units ran the arms in one order, so drift within a round looks like "
            "an effect: run every other round backwards"
        )
    return estimate(logs, order)


def _table(name: str, runs: Iterable[Run]) -> dict[tuple[int, int], float]:
    table: dict[tuple[int, int], float] = {}
    for seed, position, value in runs:
        if not 0 < value < math.inf:
            raise UserError(
                f"the run of {name} with seed {seed} in round {position} measured {value}: leave "
                "that round out, a ratio needs positive numbers"
            )
        if (seed, position) in table:
            raise UserError(
                f"{name} has two runs of seed {seed} in round {position}: number the rounds apart"
            )
        table[seed, position] = value
    return table


def _means(values: Seq[float], seeds: Seq[int]) -> list[float]:
    """Of the values of each seed."""
    of_seed: defaultdict[int, list[float]] = defaultdict(list)
    for seed, value in zip(seeds, values, strict=True):
        of_seed[seed].append(value)
    return [float(np.mean(v)) for v in of_seed.values()]


def stacked(ratios: Iterable[Ratio]) -> Ratio:
    """Comparisons of one shape as one, along a new last axis."""
    columns: list[list[Any]] = [list(vars(r).values()) for r in ratios]
    return Ratio(*(np.stack(column, -1) for column in zip(*columns, strict=True)))
