"""First come, first served: the order of arrival, and the newest gives way."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Literal

from core.config import OfferConfig
from plugins.sched.giving_way import least_urgent

if TYPE_CHECKING:
    from core.batch import Sequence


class Fifo:
    """Requests start in the order of arrival; a preempted one keeps its place."""

    api = 1
    heeds_priority = False
    rekey: Literal["never"] = "never"

    class Config(OfferConfig):
        """No options."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def key(self, seq: Sequence, clock: float) -> int:
        return seq.order

    def chunk(self, seq: Sequence, budget: int) -> int:
        return budget

    def victim(self, running: Seq[Sequence], for_seq: Sequence) -> Sequence | None:
        return least_urgent(self.key, running, for_seq)
