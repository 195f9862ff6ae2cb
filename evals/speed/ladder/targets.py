"""The largest rate at which a configuration holds a target of TTFT, by bracketing.

A rate is judged by runs of different requests, each of which gives one percentile: it holds if the
upper 95 % limit of their mean (of logarithms, Student's t, one-sided) is within the target, and
misses if the lower one is beyond it, or if the queue grew in any run. While neither is so, more
runs are made, up to `most`; what is open then does not hold. The bracket ends with a rate that was
shown to hold and one above it, by at most `resolution`, that was not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Any, Literal, NamedTuple

import numpy as np

from core.errors import RunError, UserError
from evals.speed.distributions import scipy
from evals.speed.ladder.loads import Load
from evals.speed.ladder.rungs import Arm
from evals.speed.ladder.runner import Runner
from evals.speed.workloads import fewest_samples, percentile

Says = Literal["holds", "misses", "open"]
LOWEST, HIGHEST = 1 / 16, 0.97  # of the capacity: what is looked at
_CONFIDENCE = 0.95


class Target(NamedTuple):
    """That percentile of TTFT, in ms, is to be no more."""

    ttft_ms: float
    percentile: float

    def __str__(self) -> str:
        return f"TTFT p{self.percentile:g} within {self.ttft_ms:g} ms"


class Effort(NamedTuple):
    """Runs of a rate at first and at most, and how near the ends of a bracket are to be."""

    fewest: int
    most: int
    resolution: float


class Probe(NamedTuple):
    """A rate in requests a second, and what its runs came to."""

    rate: float
    says: Says
    ttft_ms: list[float]
    num_behind: int
    output_throughput: float
    itl_ms_p50: float

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "ttft_ms": [round(value, 3) for value in self.ttft_ms]}


class Bracket(NamedTuple):
    """`holds` is the largest rate that was shown to hold, None where none was; `fails` the smallest
    above it that was looked at, None where the capacity ends the search; `lone_ms` is the median
    TTFT of requests one at a time."""

    capacity: float
    holds: Probe | None
    fails: Probe | None
    lone_ms: float


def judged(ttft_ms: Seq[float], target: Target, num_behind: int = 0) -> Says:
    """What runs of one rate say of a target."""
    if num_behind:
        return "misses"
    logs = np.log(ttft_ms) - math.log(target.ttft_ms)
    error = float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    half = error * float(scipy("special").stdtrit(len(logs) - 1, _CONFIDENCE))
    if logs.mean() + half <= 0:
        return "holds"
    return "misses" if logs.mean() - half > 0 else "open"


class Tuner:
    """Brackets over one runner. `probes` are all that were made, by arm."""

    def __init__(self, runner: Runner, target: Target, effort: Effort, seed: int) -> None:
        self._runner, self._target, self._effort, self._seed = runner, target, effort, seed
        self.probes: dict[str, list[Probe]] = {}

    def check(self, num_requests: int) -> None:
        """Raises UserError where a run has too few requests for the percentile."""
        needed = fewest_samples(self._target.percentile)
        if num_requests < needed:
            raise UserError(
                f"p{self._target.percentile:g} needs {needed} requests a run and there are "
                f"{num_requests}: raise --num-requests or lower --percentile"
            )

    def capacity(self, arm: Arm) -> float:
        """Requests a second of a closed loop."""
        run = self._runner.measure(arm, Load("closed"), seed=self._seed, label=f"{arm.name} closed")
        return float(run["figures"]["request_throughput"])

    def lone_ms(self, arm: Arm) -> float:
        """The median TTFT where nobody is in the way."""
        run = self._runner.measure(arm, Load("lone"), seed=self._seed, label=f"{arm.name} lone")
        return float(np.median(run["samples"]["ttft_ms"]))

    def probe(self, arm: Arm, rate: float) -> Probe:
        """Runs at one rate, until they say something or are enough."""
        times: list[float] = []
        rates: list[float] = []
        gaps: list[float] = []
        num_behind, says = 0, "open"
        while len(times) < self._effort.most and not (
            says != "open" and len(times) >= self._effort.fewest
        ):
            i = len(times)
            run = self._runner.measure(
                arm, Load("poisson", rate), seed=self._seed + i, label=f"{arm.name} {rate:.6g} {i}"
            )
            value = percentile(run["samples"]["ttft_ms"], self._target.percentile)
            if value is None:
                raise RunError(f"a run of {arm.name} has too few requests for its percentile")
            times.append(value)
            num_behind += bool(run["is_behind"])
            rates.append(float(run["figures"]["output_throughput"]))
            gaps.append(float(run["figures"]["itl_ms p50"] or 0.0))
            if len(times) >= 2:
                says = judged(times, self._target, num_behind)
        found = Probe(
            rate,
            says,
            times,
            num_behind,
            float(np.median(rates)),
            float(np.median(gaps)),  # type: ignore[arg-type]
        )
        self.probes.setdefault(arm.name, []).append(found)
        return found

    def bracket(self, arm: Arm, above: float | None = None) -> Bracket:
        """The largest rate of an arm. With `above`, only if it is larger than that rate: else
        `holds` is None, at the price of one probe."""
        self._runner.retain([arm])
        capacity = self.capacity(arm)
        highest, step = HIGHEST * capacity, 1 + self._effort.resolution
        holds: Probe | None = None
        fails: Probe | None = None
        rate = 0.7 * capacity if above is None else above * step
        lone_ms = self.lone_ms(arm)
        if rate > highest or lone_ms > self._target.ttft_ms:
            return Bracket(capacity, None, None, lone_ms)
        while True:
            found = self.probe(arm, rate)
            if found.says == "holds":
                holds = found
            else:
                fails = found
            if holds is None:
                if above is not None or rate <= LOWEST * capacity:
                    return Bracket(capacity, None, fails, lone_ms)
                rate = max(rate / 4, LOWEST * capacity)
                continue
            top = highest if fails is None else fails.rate
            if top / holds.rate <= step:
                return Bracket(capacity, holds, fails, lone_ms)
            rate = highest if fails is None else math.sqrt(holds.rate * top)
