"""A policy whose keys move, which no offer that ships has: highest response ratio next."""

from __future__ import annotations

from core.testing.clock import Arrival, VirtualEngine
from core.testing.sched import LIMITS, MAX_LEN, PLENTY, SchedulerSuite
from plugins.sched.fifo import Fifo


class Hrrn(Fifo):
    """Who has waited longest for what he needs; asked anew in every step."""

    rekey = "step"

    def key(self, seq, clock):
        return -(clock - seq.arrival) / max(1, seq.remaining)

    def victim(self, running, for_seq):
        return None  # ratios of those that run say nothing: who asks gives way


class TestHrrn(SchedulerSuite):
    offer = Hrrn
    short_passes_long = True


def test_moving_keys_overtake():
    """The long one is behind at first, and ahead of those that come in once it has waited."""
    long = Arrival(0.02, 40, 2)
    shorts = [Arrival(0.0001 * i, 30, 30) for i in range(6)]
    shorts += [Arrival(0.021 + 0.015 * i, 30, 30) for i in range(40)]
    seats = []
    engine = VirtualEngine(
        Hrrn(),
        limits=LIMITS,
        num_kv_tokens=PLENTY,
        on_admit=lambda seq, others: seats.append(seq.order),
    )
    engine.run([long, *shorts])
    assert seats[:6] == [0, 1, 2, 3, 4, 5]
    assert 7 < seats.index(6) < 40


def test_a_victim_is_chosen_by_keys_of_the_same_plan():
    """Who waits is asked before anybody gives way: `victim` gets no clock but that of `key`."""
    asked, ages = [], []

    class Watched(Hrrn):
        def key(self, seq, clock):
            asked.append(clock)
            return super().key(seq, clock)

        def victim(self, running, for_seq):
            if engine.schedule.head() is not None:
                ages.append(engine.now - asked[-1])

    engine = VirtualEngine(Watched(), limits=LIMITS, num_kv_tokens=MAX_LEN)
    engine.run([Arrival(0.0, 8, 40)] * 12)
    assert ages and max(ages) == 0
