"""What is measured of a request. Times are seconds of one monotonic clock; figures for people are
ms."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class RequestMetrics:
    """One finished request.

    `ttft_ms`: from arrival to the first token on the host; None where there was none. `itl_ms`: the
    gaps between consecutive tokens, the first token's wait excluded. `tokens_per_s`: output tokens
    over the whole time.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    queue_ms: float | None
    ttft_ms: float | None
    e2e_ms: float
    itl_ms: tuple[float, ...]

    @property
    def mean_itl_ms(self) -> float | None:
        return float(np.mean(self.itl_ms)) if self.itl_ms else None

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.e2e_ms * 1e3 if self.e2e_ms > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, derived figures included."""
        return {
            **asdict(self),
            "mean_itl_ms": self.mean_itl_ms,
            "tokens_per_s": self.tokens_per_s,
        }


def request_metrics(
    *,
    arrival: float,
    first_scheduled: float | None,
    ended: float,
    token_times: NDArray[np.float64],
    num_prompt: int,
    num_cached: int,
    num_preemptions: int,
) -> RequestMetrics:
    """Metrics from the raw stamps; `token_times` holds one stamp for every output token."""
    return RequestMetrics(
        num_prompt_tokens=num_prompt,
        num_cached_tokens=num_cached,
        num_output_tokens=len(token_times),
        num_preemptions=num_preemptions,
        queue_ms=None if first_scheduled is None else (first_scheduled - arrival) * 1e3,
        ttft_ms=float(token_times[0] - arrival) * 1e3 if len(token_times) else None,
        e2e_ms=(ended - arrival) * 1e3,
        itl_ms=tuple(float(gap) * 1e3 for gap in np.diff(token_times)),
    )


@dataclass
class StepCounters:
    """Counts since the engine was built."""

    num_steps: int = 0
    num_eager_steps: int = 0
    num_graph_steps: int = 0
    num_eager_samplers: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_swapped_bytes: int = 0
    num_extra_plans: int = 0
    num_failed_steps: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
