"""Latencies of one run from its events, and the percentiles that a run of its length carries.

The definitions are those of `vllm bench serve`, but for the clock: it starts when a request was
*due*, not when it was sent, so that a client or a server that falls behind cannot hide the wait
("coordinated omission"; MLPerf's LoadGen measures so too).

- TTFT: first token - due. E2E: last token - due.
- TPOT: (last token - first token) / (tokens - 1), of requests with two tokens or more.
- ITL: every gap between consecutive tokens, pooled over requests; tokens that arrive together have
  gaps of 0 between them, where a streaming client counts one gap for all of them.
- Goodput: requests a second that keep every limit; one that failed keeps none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence as Seq
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from core.errors import UserError
from evals.speed.distributions import scipy
from evals.speed.paired import CONFIDENCE

# MLPerf's LoadGen estimates a percentile where, with 99 % confidence, two requests or more of the
# run lie beyond it: from 64 requests for p90, 662 for p99, 6.4 and 6.62 expected beyond (its early
# stopping, loadgen/early_stopping.cc). Seven is that as one number.
BEYOND = 7


class Served(NamedTuple):
    """When a request was due, and when each of its output tokens came, in seconds of one clock;
    none where it failed."""

    due_s: float
    token_times_s: Seq[float]


class Percentile(NamedTuple):
    """Of one run: value, distribution-free 95 % interval, number of observations."""

    value: float
    low: float
    high: float
    num: int


def ttft_ms(request: Served) -> float | None:
    """Time to first token; None where there is none."""
    times = request.token_times_s
    return (times[0] - request.due_s) * 1e3 if len(times) else None


def e2e_ms(request: Served) -> float | None:
    """End-to-end latency; None where there is no token."""
    times = request.token_times_s
    return (times[-1] - request.due_s) * 1e3 if len(times) else None


def itl_ms(request: Served) -> list[float]:
    """Inter-token latencies: one fewer than tokens."""
    return [float(gap) for gap in np.diff(request.token_times_s) * 1e3]


def tpot_ms(request: Served) -> float | None:
    """Time per output token after the first; None with fewer than two tokens."""
    times = request.token_times_s
    return (times[-1] - times[0]) / (len(times) - 1) * 1e3 if len(times) > 1 else None


_FIGURES = {"ttft": ttft_ms, "tpot": tpot_ms, "e2el": e2e_ms}


def latencies_ms(requests: Iterable[Served]) -> dict[str, list[float]]:
    """All of them by vLLM's names (ttft, tpot, itl, e2el), of the requests that have each: count
    those that failed beside it."""
    served = list(requests)
    found = {name: [v for r in served if (v := of(r)) is not None] for name, of in _FIGURES.items()}
    return found | {"itl": [gap for request in served for gap in itl_ms(request)]}


def goodput(requests: Iterable[Served], limits_ms: Mapping[str, float], duration_s: float) -> float:
    """Requests a second, over `duration_s`, with tokens and within all of `limits_ms` (of ttft,
    tpot, e2el); one with a single token keeps any limit of TPOT. Raises UserError for other names.
    """
    if unknown := set(limits_ms) - set(_FIGURES):
        raise UserError(f"goodput has no limit {min(unknown)}: give {', '.join(_FIGURES)}")

    def is_good(request: Served) -> bool:
        found = {name: _FIGURES[name](request) or 0.0 for name in limits_ms}
        return len(request.token_times_s) > 0 and all(v <= limits_ms[n] for n, v in found.items())

    return sum(map(is_good, requests)) / duration_s


def smallest_sample(percent: float, beyond: int = BEYOND) -> int:
    """How many observations carry a percentile: of so many, `beyond` are expected beyond it."""
    point = Fraction(str(percent))
    return math.ceil(100 * beyond / min(point, 100 - point))


def percentile(values: Seq[float], percent: float) -> Percentile:
    """By linear interpolation, as vLLM has it, with the order statistics that enclose the true one
    with 95 % confidence by the binomial distribution (David and Nagaraja, "Order statistics", 3rd
    edition, 7.1).

    The interval takes the values for independent. Those of one run are not, so it says how well
    that run carries its percentile, and nothing of the next run: compare runs by
    `evals.speed.paired`. Raises UserError where there are fewer values than `smallest_sample`.
    """
    num, needed = len(values), smallest_sample(percent)
    if num < needed:
        raise UserError(
            f"{num} observations do not carry p{percent:g}, which takes {needed}: "
            "measure more requests or ask for a lower percentile"
        )
    test = scipy("stats").quantile_test(values, p=percent / 100)
    low, high = test.confidence_interval(CONFIDENCE)
    return Percentile(float(np.percentile(values, percent)), float(low), float(high), num)
