"""Aging: short prompts first, but a second of waiting counts like so many tokens less to do."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from core.config import OfferConfig
from plugins.sched.giving_way import least_urgent

if TYPE_CHECKING:
    from core.batch import Sequence


class Aging:
    """The smallest `work + rate * arrival + priority_weight * priority` goes first.

    That is the order of `work - rate * waited` at any moment, since `rate * now` is the same for
    all; so no key ever changes and none needs a clock. Keys stand here divided by `rate`, as
    moments: until when a request may be passed.

    The bound: nothing that arrives more than `work / rate` seconds after a request passes it, nor
    anything that arrives more than `max_wait_s` after it, where that is set. What is more urgent
    may come `priority_weight / rate` seconds later for every unit.

    `rate` None is `rate_fraction` of the prefill speed, measured in the first `warmup_steps` steps
    with prompt work, then frozen; until then, of `assumed_speed`. A request keeps the rate that it
    was queued at, and the bound that goes with it. Moments under either rate stand in one order, so
    nothing is sorted again when the rate is frozen. Give `rate` where two runs must order alike. A
    rate near 0 orders like `shortest`, one near the prefill speed like `fifo`.
    """

    api = 1
    rekey: Literal["never"] = "never"

    class Config(OfferConfig):
        rate: float | None = Field(
            None, gt=0, description="tokens that a second of waiting is worth; None: measured"
        )
        rate_fraction: float = Field(
            0.1, gt=0, description="rate as a share of the measured prefill speed"
        )
        warmup_steps: int = Field(
            32, ge=1, description="steps with prompt work over which that speed is measured"
        )
        assumed_speed: float = Field(
            10_000, gt=0, description="prefill speed until it is measured, tokens/s"
        )
        priority_weight: float = Field(
            1000, ge=0, description="tokens that a unit of a request's priority is worth"
        )
        max_wait_s: float | None = Field(
            None, gt=0, description="seconds; what arrives so much later passes nobody"
        )

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        self.rate = self.config.rate or self.config.rate_fraction * self.config.assumed_speed
        self._first_rate, self._last_before, self._newest = self.rate, -1, -1
        self._max_wait_s = self.config.max_wait_s or float("inf")
        self._seen: list[tuple[float, int]] | None = [] if self.config.rate is None else None

    def key(self, seq: Sequence, clock: float) -> float:
        self._newest = max(self._newest, seq.order)
        lag = self.config.priority_weight * seq.metadata.get("priority", 0) / self._rate_of(seq)
        return seq.arrival + self.pass_bound_s(seq) + lag

    def pass_bound_s(self, seq: Sequence) -> float:
        """Seconds after its arrival from which on nothing that arrives passes `seq`, unless it is
        more urgent."""
        return min(seq.remaining / self._rate_of(seq), self._max_wait_s)

    def _rate_of(self, seq: Sequence) -> float:
        return self.rate if seq.order > self._last_before else self._first_rate

    def chunk(self, seq: Sequence, budget: int) -> int:
        return budget

    def victim(self, running: Seq[Sequence], for_seq: Sequence) -> Sequence | None:
        return least_urgent(self.key, running, for_seq)

    def observe(self, num_tokens: int, num_seqs: int, seconds: float) -> None:
        """Measure the prefill speed, until it is frozen."""
        if self._seen is None or num_tokens == num_seqs or seconds <= 0:
            return
        self._seen.append((num_tokens / seconds, num_tokens))
        if len(self._seen) == self.config.warmup_steps:
            self.rate = self.config.rate_fraction * typical_speed(self._seen)
            self._last_before = self._newest  # in the order of arrival
            self._seen = None


def typical_speed(steps: Seq[tuple[float, int]]) -> float:
    """The speed, in tokens/s, that half of all tokens were computed at or below; steps are (speed,
    tokens).

    By tokens, since a small step says more about its fixed cost than about prefill. A median, since
    a first step may have compiled something.
    """
    half, num_slower = sum(num_tokens for _, num_tokens in steps) / 2, 0
    for speed, num_tokens in sorted(steps):
        num_slower += num_tokens
        if num_slower >= half:
            return speed
    raise ValueError("no step was seen")
