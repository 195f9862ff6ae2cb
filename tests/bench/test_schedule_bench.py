"""How long it takes to plan a step with many requests waiting: `pytest tests/bench -n 0`.

Every plan here admits one request and computes its whole prompt beside 32 decodes; that request
ends, and its seat is given back, between plans.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest

from core.batch import Limits, Sequence
from core.config import RunConfig
from core.metrics import StepCounters
from core.registry import Registry
from core.sampling import SamplingParams
from core.schedule import Schedule
from core.slots import Slots
from core.testing.clock import bound_kv

SCHEDS = ("fifo", "shortest", "aging", "priority")
NUM_DECODES, PROMPT = 32, 64
LIMITS = Limits(max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=NUM_DECODES + PROMPT)
MEDIAN_LIMIT_S = 200e-6
NUM_PLANS = 300
TOKENS, TIMES, PARAMS = np.arange(PROMPT, dtype=np.int32), np.zeros(PROMPT), SamplingParams()


class Queue:
    """A schedule with `num_waiting` requests before it. `plan` is what is timed."""

    def __init__(self, sched: str, num_waiting: int) -> None:
        offer = Registry().find("sched", sched).load()
        self.kv, limits = bound_kv("paged", {}, LIMITS, 64 * 1024, sharing=False)
        self.slots = Slots(limits)
        self.now = 0.0
        self.schedule = Schedule(
            limits,
            self.kv,
            offer(offer.Config()),
            self.slots,
            StepCounters(),
            RunConfig(),
            clock=lambda: self.now,
            drain=lambda: False,
            admit=lambda seq: self.slots.take(seq, seq.order, ()),
        )
        self._num_added = 0
        for _ in range(NUM_DECODES):
            self.add(PROMPT, 900)
            self.plan()
        rng = np.random.default_rng(0)
        for num_prompt in rng.integers(PROMPT // 2, PROMPT + 1, num_waiting).tolist():
            self.now += 1e-4
            self.add(num_prompt, 1)
        self.plan()

    def add(self, num_prompt: int, num_output: int) -> None:
        order = self._num_added
        seq = Sequence(
            str(order), TOKENS, num_prompt, PARAMS, self.now, order, num_prompt + num_output
        )
        seq.num_known = seq.num_tokens = num_prompt
        seq.token_times, seq.metadata = TIMES, {"priority": order % 5}
        self.schedule.enqueue(seq)
        self._num_added += 1

    def plan(self) -> None:
        self.planned = self.schedule.plan()

    def end_and_replace(self) -> None:
        """Who has prefilled ends; as many come in; decodes start again at their first token."""
        s = self.slots
        for slot in self.planned.slots[self.planned.num_decodes :].tolist():
            seq = s.owner[slot]
            self.schedule.remove(seq)
            self.now += 1e-4
            self.add(seq.num_prompt, 1)
        running = list(self.schedule.decoding)
        s.num_tokens[running], s.num_computed[running] = PROMPT + 1, PROMPT


def median_s(queue: Queue) -> float:
    """Median seconds of a plan, over `NUM_PLANS` plans that admit somebody each."""
    times = []
    for _ in range(NUM_PLANS):
        queue.end_and_replace()
        start = time.perf_counter()
        queue.plan()
        times.append(time.perf_counter() - start)
        assert len(queue.planned.slots) > queue.planned.num_decodes == NUM_DECODES
    return statistics.median(times)


@pytest.mark.parametrize("sched", SCHEDS)
def test_a_plan_among_100_000(benchmark, sched):
    queue = Queue(sched, 100_000)
    benchmark.pedantic(queue.plan, setup=queue.end_and_replace, rounds=NUM_PLANS)
    assert len(queue.schedule._waiting) >= 99_000
    assert benchmark.stats is None or benchmark.stats.stats.median < MEDIAN_LIMIT_S


@pytest.mark.parametrize("sched", SCHEDS)
def test_the_time_of_a_plan_grows_at_most_like_the_logarithm(sched):
    """From 1,000 to 100,000: the logarithm grows by 1.7, a scan of the queue would by 100."""
    few, many = (median_s(Queue(sched, num)) for num in (1000, 100_000))
    assert many / few < 3, f"{few * 1e6:.0f} µs among 1,000, {many * 1e6:.0f} µs among 100,000"
