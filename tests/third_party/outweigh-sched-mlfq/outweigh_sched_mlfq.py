"""`mlfq`: a skip-join multi-level feedback queue, after FastServe.

Wu, Zhong, Zhang, Liu, Liu, Sun, Huang, Liu and Jin, "Fast Distributed Inference Serving for Large
Language Models", arXiv:2305.05920 (2023), section 4: queues of growing quanta; a request joins the
first whose quantum its prompt fits (it skips those above), sinks as it is served, and is promoted
to the top where it has waited too long.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from core import OfferConfig, hookimpl

if TYPE_CHECKING:
    from core.batch import Sequence
    from core.hookspecs import Register


class Mlfq:
    """The highest level first, ties by arrival; levels are quanta of tokens, prompt and text.

    Level i holds whoever has at most `quantum * ratio**i` tokens, the last one everybody else. A
    request joins the level of its prompt, and sinks as it writes. Writers are in each step anyway:
    of them it is the lowest level, and the newest there, that gives way where memory is scarce.

    Whoever arrived `promote_s` ago stands at the top, behind none but older ones: nothing that
    arrives more than `promote_s` after a request passes it.
    """

    api: ClassVar[int] = 1
    heeds_priority: ClassVar[bool] = False
    rekey: ClassVar[Literal["never", "step"]] = "step"
    held_to: ClassVar[dict[str, Any]] = {"short_passes_long": True}

    class Config(OfferConfig):
        levels: int = Field(default=6, ge=1, description="queues")
        quantum: int = Field(default=64, ge=1, description="tokens that the highest queue holds")
        ratio: float = Field(default=2.0, gt=1, description="a quantum by that of the queue above")
        promote_s: float = Field(default=30.0, gt=0, description="seconds from arrival to the top")

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        c = self.config
        self._quanta = [c.quantum * c.ratio**level for level in range(c.levels - 1)]
        self._clock = 0.0  # of the last `key`: `victim` gets none

    def key(self, seq: Sequence, clock: float) -> int:
        self._clock = clock
        return self._level(seq, clock)

    def _level(self, seq: Sequence, clock: float) -> int:
        if clock - seq.arrival > self.config.promote_s:
            return 0
        return sum(quantum < seq.num_known for quantum in self._quanta)

    def chunk(self, seq: Sequence, budget: int) -> int:
        return budget

    def victim(self, running: Seq[Sequence], for_seq: Sequence) -> Sequence | None:
        last = max(running, key=self._place, default=None)
        return last if last is not None and self._place(last) > self._place(for_seq) else None

    def _place(self, seq: Sequence) -> tuple[int, int]:
        return self._level(seq, self._clock), seq.order

    def pass_bound_s(self, seq: Sequence) -> float:
        """Seconds: nothing that arrives so much later passes `seq`."""
        return self.config.promote_s


@hookimpl
def outweigh_register_sched(register: Register) -> None:
    register("mlfq", Mlfq)
