"""What is measured of requests, steps and the cache. Stamps are seconds of one monotonic clock;
figures for people are ms."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from core.batch import Sequence
    from core.seams import KVManager


_MAX_LOOKS = 512


@dataclass(frozen=True)
class RequestMetrics:
    """One finished request: counts, stamps, and what follows from them.

    It was due at `arrival_s`, reached the engine at `enqueued_s`, got a slot and room first at
    `admitted_s`, was in a step first at `first_scheduled_s`, and ended at `ended_s`; each output
    token was known on the host at its `token_times_s`. What never happened is None.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    arrival_s: float
    enqueued_s: float
    admitted_s: float | None
    first_scheduled_s: float | None
    ended_s: float
    token_times_s: tuple[float, ...]

    @classmethod
    def of(cls, seq: Sequence, ended_s: float) -> RequestMetrics:
        """What `seq`, which has no slot any more, went through."""
        times = seq.token_times[seq.num_prompt : seq.num_known].tolist()
        counts = seq.num_prompt, seq.num_cached, len(times), seq.num_preemptions
        began = seq.arrival, seq.enqueued, seq.admitted, seq.first_scheduled
        return cls(*counts, *began, ended_s, tuple(times))

    @property
    def queue_ms(self) -> float | None:
        """From when it was due to its first step."""
        return _ms(self.arrival_s, self.first_scheduled_s)

    @property
    def prefill_ms(self) -> float | None:
        """The rest of the TTFT."""
        return _ms(self.first_scheduled_s, next(iter(self.token_times_s), None))

    @property
    def ttft_ms(self) -> float | None:
        """From when it was due to its first token."""
        return _ms(self.arrival_s, next(iter(self.token_times_s), None))

    @property
    def itl_ms(self) -> tuple[float, ...]:
        """The gaps between its tokens: one fewer than tokens."""
        return tuple((np.diff(self.token_times_s) * 1e3).tolist())

    @property
    def tpot_ms(self) -> float | None:
        """The mean gap between its tokens."""
        return float(np.mean(self.itl_ms)) if self.itl_ms else None

    @property
    def e2e_ms(self) -> float:
        """From when it was due to its end."""
        return (self.ended_s - self.arrival_s) * 1e3

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over all of its time."""
        return self.num_output_tokens / self.e2e_ms * 1e3 if self.e2e_ms > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, derived figures included."""
        derived = {k: getattr(self, k) for k, v in vars(type(self)).items() if type(v) is property}
        return asdict(self) | derived


def _ms(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else (end_s - begin_s) * 1e3


class KVUse:
    """The cache over time: a look at each step until there are `_MAX_LOOKS`, then at every second
    one, and so on, the earlier ones thinned out alike: evenly spaced however long the run."""

    def __init__(self) -> None:
        self._looks: list[tuple[float, int, int, int]] = []
        self._num_steps, self._stride, self._peak = 0, 1, 0

    def look(self, kv: KVManager, num_computed: NDArray[np.int32], now_s: float) -> None:
        """Once a step. `num_computed` is by slot, like the rows of the kv offer."""
        self._num_steps += 1
        if self._num_steps % self._stride == 0:
            (_, held, cached), num_live = kv.usage(), int(num_computed[kv.reserved > 0].sum())
            self._looks.append((now_s, held, cached, num_live))
            self._peak = max(self._peak, held)
        if len(self._looks) == _MAX_LOOKS:
            self._looks, self._stride = self._looks[1::2], self._stride * 2

    def as_dict(self) -> dict[str, Any]:
        """JSON-able. `fragmentation` is the mean share of the room held that no token lies in,
        below 0 where shared blocks hold tokens of several sequences."""
        names = "at_s", "num_held_tokens", "num_cached_tokens", "num_live_tokens"
        empty = [1 - live / held for _, held, _, live in self._looks if held]
        return {
            "peak_held_tokens": self._peak,
            "fragmentation": float(np.mean(empty)) if empty else None,
            "over_time": [dict(zip(names, look, strict=True)) for look in self._looks],
        }


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
