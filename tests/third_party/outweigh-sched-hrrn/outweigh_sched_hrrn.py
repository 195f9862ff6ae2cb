"""`hrrn`: the highest response ratio goes next.

Per Brinch Hansen: Short-Term Scheduling in Multiprogramming Systems, Proceedings of the third ACM
Symposium on Operating Systems Principles, 1971. The response ratio of a request is the time that it
will have taken, waiting and service, over its service; a short one gets ahead of a long one, and
the ratio of the long one grows for as long as it is passed.

Service is `seconds_per_token` for each token of prompt that is left. The ratio moves with the
clock, and so do its ranks: keys are asked for in every step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from core import OfferConfig, hookimpl

if TYPE_CHECKING:
    from core.batch import Sequence
    from core.hookspecs import Register


class Hrrn:
    """Whoever runs is passed too: what is left of a prompt is its service."""

    api: ClassVar[int] = 1
    heeds_priority: ClassVar[bool] = False
    rekey: ClassVar[Literal["never", "step"]] = "step"

    class Config(OfferConfig):
        seconds_per_token: float = Field(1e-4, gt=0, description="seconds a token of prompt takes")

    def __init__(self, config: Config) -> None:
        self.config = config
        self._clock = 0.0  # that of the last key: `victim` is given none

    def key(self, seq: Sequence, clock: float) -> float:
        self._clock = clock
        return -self.ratio(seq, clock)

    def ratio(self, seq: Sequence, clock: float) -> float:
        """(waited + service) / service; 1 for whoever has just come."""
        service_s = max(1, seq.remaining) * self.config.seconds_per_token
        return 1 + max(0.0, clock - seq.arrival) / service_s

    def chunk(self, seq: Sequence, budget: int) -> int:
        return budget

    def victim(self, running: Seq[Sequence], for_seq: Sequence) -> Sequence | None:
        last = max(running, key=self._place, default=None)
        return last if last is not None and self._place(last) > self._place(for_seq) else None

    def _place(self, seq: Sequence) -> tuple[float, int]:
        return -self.ratio(seq, self._clock), seq.order


@hookimpl
def outweigh_register_sched(register: Register) -> None:
    register("hrrn", Hrrn)
