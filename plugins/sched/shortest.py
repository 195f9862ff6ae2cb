"""Shortest first: the least prompt work goes next."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from core.config import OfferConfig
from plugins.sched.giving_way import least_urgent

if TYPE_CHECKING:
    from core.batch import Sequence


class Shortest:
    """The request with the fewest tokens left to compute goes first; ties by arrival.

    What a waiting request has left is a snapshot taken when it is queued, prefix hits not yet
    known. A prompt that is half done competes with its other half, so a short one that comes in
    behind it is served in the next step.

    Nothing bounds how long short prompts pass a long one, unless `max_wait_s` is set. Then time is
    cut into windows of that length, earlier windows go first, and the shortest goes first within
    each: nothing that arrives more than `max_wait_s` after a request passes it. Windows need no
    clock, so keys never change; and where the backlog is older than `max_wait_s`, short prompts
    still go first among their own, where promoting whoever is overdue would serve all by arrival.

    Who gives way is the last in the same order: the prompt with the most still to do, which has
    shown its reader nothing yet; among those that decode, one token each to do, the newest, which
    as a rule has the least to compute again.
    """

    api = 1
    heeds_priority = False
    rekey: Literal["never"] = "never"

    class Config(OfferConfig):
        max_wait_s: float | None = Field(
            None, gt=0, description="seconds; what arrives so much later passes nobody"
        )

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        self._window_s = self.config.max_wait_s or float("inf")

    def key(self, seq: Sequence, clock: float) -> tuple[float, int]:
        return seq.arrival // self._window_s, seq.remaining

    def chunk(self, seq: Sequence, budget: int) -> int:
        return budget

    def victim(self, running: Seq[Sequence], for_seq: Sequence) -> Sequence | None:
        return least_urgent(self.key, running, for_seq)

    def pass_bound_s(self, seq: Sequence) -> float:
        """Seconds after its arrival from which on nothing that arrives passes `seq`."""
        return self._window_s
