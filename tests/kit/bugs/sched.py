"""Schedulers with one fault each, and schedules: what the core does with a scheduler's answers.

B-numbers are those of bugs seen in other engines.
"""

from __future__ import annotations

import heapq
import inspect
import random

import numpy as np

from core import hookimpl
from core.schedule import Schedule
from core.testing.sched import BLOCK_SIZE
from plugins.sched.aging import Aging
from plugins.sched.fifo import Fifo
from plugins.sched.shortest import Shortest

# -------- schedulers


class SoundShortest(Shortest):
    """Held to what it is for, which no contract asks of it."""

    held_to = {"short_passes_long": True}


class SoundAging(Aging):
    held_to = {"short_passes_long": True}


class ReadsTheClock(SoundShortest):
    """Ages its keys in the heap: an order that depends on when each key was asked for."""

    def key(self, seq, clock):
        return seq.remaining - 1000 * (clock - seq.arrival)


class ForgetsTheArrival(SoundAging):
    """Ageing that does nothing: a long prompt waits for as long as short ones come."""

    def key(self, seq, clock):
        return seq.remaining


class StandsInNoOrder(Fifo):
    """Some keys are not a number, and compare with nothing."""

    nan = float("nan")

    def key(self, seq, clock):
        return self.nan if seq.num_prompt % 7 == 3 else seq.order


class DrawsLots(SoundShortest):
    """Those of about equal work stand in another order in every run."""

    def key(self, seq, clock):
        return seq.remaining // 8, seq.metadata.setdefault("lot", random.random())


class EvictsTheMoreUrgent(Fifo):
    """The newest of the others gives way, also to one that is newer still."""

    def victim(self, running, for_seq):
        return max(running, key=lambda seq: seq.order, default=None)


class AsksForMore(Fifo):
    """A chunk larger than what the step has left."""

    def chunk(self, seq, budget):
        return budget + 1


class HoldsOn(SoundShortest):
    """B4: a prompt that has begun is not passed, however much of it is left."""

    def key(self, seq, clock):
        return 0 if seq.num_computed else 1, seq.remaining


class KeepsAReserve(Fifo):
    """No bug: it starts nobody who would leave less than two blocks."""

    def may_start(self, seq, usage):
        return usage.num_tokens - usage.num_held >= seq.num_tokens + 2 * BLOCK_SIZE


# -------- schedules: each is held to its clauses under a scheduler without a fault


class PromptsFirst(Schedule):
    """B3: while a prompt can run, nobody decodes."""

    hold = False

    def plan(self):
        self.hold = True
        plan = super().plan()
        self.hold = False
        return super().plan() if plan is None else plan

    def _slots_of_decodes(self):
        return np.zeros(0, np.int32) if self.hold else super()._slots_of_decodes()


class CountsDecodesTwice(Schedule):
    """B15: what decodes have taken of the budget is given out again."""

    def _prefill_rows(self, budget, admit):
        return super()._prefill_rows(self._limits.max_num_batched_tokens, admit)


class KeepsTheVictimsRow(Schedule):
    """B15: who gives way stays in the step that it was chosen for."""

    def _make_room_for_decodes(self):
        self._decoding_slots = None
        chosen = self._slots_of_decodes().tolist()
        preempted = super()._make_room_for_decodes()
        s = self._slots
        gone = [i for i in chosen if s.owner[i] is None and s.num_tokens[i] + 1 < s.max_total[i]]
        self._decoding_slots = np.array([*self.decoding, *gone], np.int32)
        return preempted


class AdmitsOnTheFirstChunk(Schedule):
    """B17: a prompt starts with room for its first 16 tokens."""

    def _admit(self, seq):
        whole, seq.num_tokens = seq.num_tokens, min(seq.num_tokens, 16)
        admitted = super()._admit(seq)
        seq.num_tokens = whole
        if admitted:
            self._slots.num_tokens[seq.slot] = whole
        return admitted


class GoesOnWhereItWas(Schedule):
    """B14: a preempted sequence is thought to have what it had before."""

    def preempt(self, seq):
        self._slots.sync(seq)
        seq.metadata["had"] = seq.num_computed
        super().preempt(seq)

    def _admit(self, seq):
        admitted = super()._admit(seq)
        if admitted:
            self._slots.num_computed[seq.slot] = seq.metadata.pop("had", 0)
        return admitted


class NeverOverrules(Schedule):
    """B18: a policy that starts nobody is obeyed although nobody runs."""

    num_running = 1


class SkipsForEver(Schedule):
    """B19: a head without room is passed as often as others fit."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._max_bypass *= 10**6


class RevivesOldPlaces(Schedule):
    """Who waits again, with more to do, is found under the place that he had before."""

    def head(self):
        while self._heap and self._heap[0][2] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


class PreemptsInFlight(Schedule):
    """B10, B25: a sequence gives way before its last token has landed."""

    def __init__(self, *args, drain, **options):
        super().__init__(*args, drain=lambda: False, **options)


def under_a_sound_policy(bug):
    """An offer without a fault, held to its clauses in a schedule that has one."""
    policy = {NeverOverrules: KeepsAReserve, RevivesOldPlaces: SoundAging}.get(bug, Fifo)
    held_to = {**getattr(policy, "held_to", {}), "schedule": bug}
    return type(bug.__name__, (policy,), {"held_to": held_to})


@hookimpl
def outweigh_register_sched(register):
    register("SoundFifo", Fifo)
    for name, found in globals().items():
        if inspect.isclass(found) and found.__module__ == __name__:
            broken = issubclass(found, Schedule)
            register(name, under_a_sound_policy(found) if broken else found)
