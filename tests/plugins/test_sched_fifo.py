"""`fifo` through the conformance suite."""

from __future__ import annotations

from core.testing.sched import SchedulerSuite


class TestFifo(SchedulerSuite):
    plugin = "fifo"
    short_passes_long = False

    def pass_bound_s(self, sched, seq):
        return 0.0
