"""How many pairs a comparison needs, from how far the base is from itself.

The noise is the standard deviation of the log ratio of a pair of the control (A/A). A control of
few pairs may understate it by chance, so the plan uses its upper 80 % confidence limit (Browne, "On
the use of a pilot sample for sample size determination", Statistics in Medicine 14, 1995). The
power is that of a t-test by the noncentral t distribution, at the level of Holm's strictest test:
one step changed among all of a ladder. Everything is about the machine's noise if the control
answers repeatability, and about workloads, with seeds for pairs, if it answers generality.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from core.errors import UserError
from evals.speed.distributions import scipy
from evals.speed.paired import CONFIDENCE, MARGIN, MIN_UNITS, Ratio

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

# Where runs differ by 3 % (pairs by 4.2 %), drift and one run in a hundred is an outlier, 10 pairs
# call 10 % in 93 of 100 studies of twelve steps, 8 pairs in 81 and 12 in 96.
DEFAULT_PAIRS = 10
MAX_PAIRS = 200
NUM_STEPS = 12
_PILOT_CONFIDENCE = 0.8


class Plan(NamedTuple):
    """Pairs that show the effect, and pairs that show that there is none (None: over 200), both
    even, so that ABBA is balanced; the noise of a pair as measured, and what was reckoned with."""

    num_pairs: int
    num_pairs_no_change: int | None
    spread: float
    spread_at_most: float
    sentence: str


def power(num_pairs: ArrayLike, spread: float, effect: float, num_steps: int = NUM_STEPS) -> Floats:
    """The chance that a ratio of `effect` (1.1: 10 %) is called, alone among `num_steps`."""
    num, special = np.asarray(num_pairs), scipy("special")
    limit = special.stdtrit(num - 2, 1 - (1 - CONFIDENCE) / 2 / num_steps)
    centre = abs(math.log(effect)) * np.sqrt(num) / spread
    return np.asarray(1 - special.nctdtr(num - 2, centre, limit))


def chance_of_no_change(num_pairs: ArrayLike, spread: float, margin: float = MARGIN) -> Floats:
    """That the interval of a ratio of exactly 1 lies within the margin.

    Averaged over the spread that a sample of that size would find: given it, the interval has a
    width, and what the margin leaves beside it is where the mean must fall.
    """
    num, special = np.asarray(num_pairs)[..., None], scipy("special")
    shares = (np.arange(100) + 0.5) / 100
    found = np.sqrt(special.chdtri(num - 2, 1 - shares) / (num - 2))  # over the true spread
    room = math.log1p(margin) * np.sqrt(num) / spread
    room = room - found * special.stdtrit(num - 2, (1 + CONFIDENCE) / 2)
    return np.asarray(np.maximum(0, 2 * special.ndtr(room) - 1).mean(-1))


def upper_spread(control: Ratio) -> float:
    """The upper 80 % confidence limit of the noise of a pair, by the chi-square distribution."""
    least = scipy("special").chdtri(control.df, _PILOT_CONFIDENCE)
    return float(control.spread * np.sqrt(control.df / least))


def plan(
    control: Ratio,
    *,
    effect: float = 1.10,
    wanted: float = 0.90,
    num_steps: int = NUM_STEPS,
    margin: float = MARGIN,
) -> Plan:
    """How often to measure, given the A/A ratio of a pilot.

    Raises UserError where more than 200 pairs were needed to see `effect` with power `wanted`.
    """
    spread = upper_spread(control)
    sizes = np.arange(MIN_UNITS, MAX_PAIRS + 1, 2)
    # A control that repeats exactly, as counters do, needs no more than the least.
    noise = max(spread, 1e-9)
    shown = _first(sizes, power(sizes, noise, effect, num_steps) >= wanted)
    equal = _first(sizes, chance_of_no_change(sizes, noise, margin) >= wanted)
    if shown is None:
        raise UserError(
            f"pairs of the same arm differ by up to {_percent(spread)}, so more than {MAX_PAIRS} "
            f"of them were needed to see {_percent(math.log(effect))}: replay one fixed trace, "
            "measure longer runs or ask for a larger effect"
        )
    also = f"at least {equal}" if equal else f"more than {MAX_PAIRS}"
    sentence = (
        f"pairs of the same arm differ by {_percent(float(control.spread))} (at most "
        f"{_percent(spread)}): {shown} pairs a step see a change of {_percent(math.log(effect))} "
        f"with a chance of {wanted:.0%} among {num_steps} steps; to say that a step changed "
        f"nothing, within {margin:.0%}, takes {also}"
    )
    return Plan(shown, equal, float(control.spread), spread, sentence)


def _first(sizes: NDArray[np.int64], enough: NDArray[np.bool_]) -> int | None:
    return int(sizes[enough.argmax()]) if enough.any() else None


def _percent(log_ratio: float) -> str:
    return f"{math.expm1(abs(log_ratio)):.1%}"
