"""`shortest` through the conformance suite, with and without windows, and what it is for."""

from __future__ import annotations

import numpy as np

from core.batch import Limits
from core.testing.clock import Arrival, VirtualEngine
from core.testing.sched import SchedulerSuite
from plugins.sched.fifo import Fifo
from plugins.sched.shortest import Shortest

LIMITS = Limits(max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64)


class TestShortest(SchedulerSuite):
    plugin = "shortest"
    short_passes_long = True


class TestShortestInWindows(SchedulerSuite):
    plugin = "shortest"
    config = {"max_wait_s": 0.1}
    short_passes_long = True

    def pass_bound_s(self, sched, seq):
        return 0.1


def serve(sched, arrivals, **options):
    engine = VirtualEngine(sched, limits=LIMITS, num_kv_tokens=8 * 512, record=True, **options)
    return engine.run(arrivals)


def overload(seed=0, num=300):
    """Prompts of 5 to 400 tokens, a third more of them than can be served."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(0.012, num))
    return [Arrival(float(t), int(rng.integers(5, 400)), 3) for t in times]


def test_equal_prompts_are_served_by_arrival():
    arrivals = [Arrival(0.002 * i, 50, 3) for i in range(60)]
    assert serve(Shortest(), arrivals).steps == serve(Fifo(), arrivals).steps


def test_under_overload_the_median_falls_and_the_longest_wait_grows():
    fifo, shortest = (serve(sched, overload()).ttft_s() for sched in (Fifo(), Shortest()))
    assert np.median(shortest) < 0.5 * np.median(fifo)
    assert shortest.max() > 1.2 * fifo.max()


def test_windows_keep_the_longest_wait_near_that_of_fifo_and_most_of_the_median():
    fifo, shortest, windows = (
        serve(sched, overload()).ttft_s()
        for sched in (Fifo(), Shortest(), Shortest(Shortest.Config(max_wait_s=1.0)))
    )
    assert windows.max() < fifo.max() + 1.0 < shortest.max()
    assert np.median(windows) < np.median(fifo)


def test_a_half_done_prompt_competes_with_what_is_left_of_it():
    """300 tokens, all but 44 done when one of 60 comes in: the first is finished first."""
    long, late = Arrival(0.0, 300, 2), Arrival(0.028, 60, 2)
    log = serve(Shortest(), [long, late])
    arrived = next(i for i, step in enumerate(log.steps) if 1 in step.waiting)
    assert [row.order for row in log.steps[arrived].rows] == [0, 1]
    assert log.steps[arrived].rows[0].hi == 300


def test_who_prefills_gives_way_before_who_decodes():
    """The newest of those that decode; of those that prefill, the one with the most to do."""
    log = serve(Shortest(), [Arrival(0.0, n, 9) for n in (3, 3, 100, 200)])
    sched, (first, second, half, whole) = Shortest(), log.sequences
    for seq, num_left in zip(log.sequences, (1, 1, 50, 200), strict=True):
        seq.num_computed = seq.num_tokens - num_left
    assert sched.victim([second, half, whole], first) is whole
    assert sched.victim([second, half], first) is half
    assert sched.victim([second], first) is second
    assert sched.victim([first], second) is None
    assert sched.victim([], second) is None
