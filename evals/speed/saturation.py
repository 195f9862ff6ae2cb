"""Whether a run was beyond what the engine can serve, where no latency is that of a steady state.

An open loop above capacity has none: the queue grows, and TTFT tells how long the run was.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Seq

BEHIND, FEWEST = 0.15, 64
KEPT = 0.98  # of the rate that is offered; nearer to capacity nothing is stationary


def is_behind(due_s: Seq[float], ttft_ms: Seq[float]) -> bool:
    """Whether the engine fell behind those that came; both in the order of arrival.

    The median TTFT of the last quarter is above that of the first by more than 15 % of the time in
    which they came. Of fewer than 64 requests it is not asked: a few that come together look like
    it.
    """
    span = due_s[-1] - due_s[0] if len(due_s) else 0.0
    if not span or len(due_s) < FEWEST:
        return False
    return _growth_s(ttft_ms) > BEHIND * span


def rate_kept(due_s: Seq[float], ttft_ms: Seq[float]) -> float | None:
    """The rate at which first tokens came over the rate at which requests were due, 1 where the
    queue did not grow; None of fewer than 64 requests, and of such as were all due at once."""
    num, quarter = len(due_s), len(due_s) // 4
    if num < FEWEST:
        return None
    first, last = (statistics.median(part) for part in (due_s[:quarter], due_s[-quarter:]))
    if first == last:
        return None
    return min(1.0, 1 / (1 + max(0.0, _growth_s(ttft_ms)) / (last - first)))


def _growth_s(ttft_ms: Seq[float]) -> float:
    """Of the median TTFT, from the first quarter of the requests to the last."""
    quarter = len(ttft_ms) // 4
    first, last = (statistics.median(part) for part in (ttft_ms[:quarter], ttft_ms[-quarter:]))
    return (last - first) * 1e-3


def saturated(due_s: Seq[float], ttft_ms: Seq[float], utilisation: float | None) -> str | None:
    """Why a run is no result of latency, as a sentence; None where nothing speaks against it.

    The queue grew by much, or the load is above 98 % of the capacity that was measured and first
    tokens came at less than 98 % of its rate.
    """
    kept = rate_kept(due_s, ttft_ms)
    beyond = utilisation is not None and utilisation >= KEPT
    if not is_behind(due_s, ttft_ms) and not (beyond and kept is not None and kept < KEPT):
        return None
    said = "the queue grew to the end"
    if kept is not None:
        said = f"first tokens came at {kept:.0%} of the rate at which requests were due"
    load = "" if utilisation is None else f", at {utilisation:.2f} of the capacity"
    return f"saturated, not a latency result: {said}{load}; lower the rate"
