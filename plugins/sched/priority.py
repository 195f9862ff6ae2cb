"""Priority: what the caller calls urgent goes next."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from core.config import OfferConfig
from plugins.sched.giving_way import least_urgent

if TYPE_CHECKING:
    from core.batch import Sequence


class Priority:
    """The lowest `priority` goes first (as in vLLM; 0 where none was given), ties by arrival.

    A running request gives way to a more urgent one for memory, never for a mere seat; then the
    least urgent gives way, of equals the newest.

    Nothing bounds how long a request waits behind more urgent ones, unless `max_wait_s` is set.
    Then time is cut into windows of that length, earlier windows go first, and the most urgent goes
    first within each: nothing that arrives more than `max_wait_s` after a request passes it.
    """

    api = 1
    rekey: Literal["never"] = "never"

    class Config(OfferConfig):
        max_wait_s: float | None = Field(
            None, gt=0, description="seconds; what arrives so much later passes nobody"
        )

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        self._window_s = self.config.max_wait_s or float("inf")

    def key(self, seq: Sequence, clock: float) -> tuple[float, int]:
        return seq.arrival // self._window_s, seq.metadata.get("priority", 0)

    def chunk(self, seq: Sequence, budget: int) -> int:
        return budget

    def victim(self, running: Seq[Sequence], for_seq: Sequence) -> Sequence | None:
        return least_urgent(self.key, running, for_seq)

    def pass_bound_s(self, seq: Sequence) -> float:
        """Seconds after its arrival from which on nothing that arrives passes `seq`, however
        urgent."""
        return self._window_s
