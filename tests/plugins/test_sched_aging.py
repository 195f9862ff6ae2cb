"""`aging` through the conformance suite; its order, its bound, its measured rate."""

from __future__ import annotations

import numpy as np
import pytest

from core.batch import Limits
from core.testing.clock import Arrival, StepCost, VirtualEngine, sequence_of
from core.testing.sched import SchedulerSuite
from plugins.sched.aging import Aging, typical_speed
from plugins.sched.fifo import Fifo
from plugins.sched.shortest import Shortest

LIMITS = Limits(max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64)


class TestAging(SchedulerSuite):
    plugin = "aging"
    config = {"rate": 500}
    short_passes_long = True

    def pass_bound_s(self, sched, seq):
        return seq.num_prompt / 500


class TestAgingCapped(SchedulerSuite):
    plugin = "aging"
    config = {"rate": 200, "max_wait_s": 0.2}
    short_passes_long = True

    def pass_bound_s(self, sched, seq):
        return min(seq.num_prompt / 200, 0.2)


class TestAgingMeasured(SchedulerSuite):
    """With its defaults, until and after the rate is frozen."""

    plugin = "aging"
    short_passes_long = True


def overload(seed=0, num=300):
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(0.012, num))
    return [Arrival(float(t), int(rng.integers(5, 400)), 3) for t in times]


def serve(sched, arrivals):
    engine = VirtualEngine(sched, limits=LIMITS, num_kv_tokens=8 * 512, record=True)
    return engine.run(arrivals)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weight", [0.0, 1000.0])
def test_the_order_is_that_of_linear_ageing_at_any_moment(seed, weight):
    """work - rate * waited + weight * priority, asked for at three moments."""
    rng = np.random.default_rng(seed)
    rate = float(rng.uniform(50, 5000))
    sched = Aging(Aging.Config(rate=rate, priority_weight=weight))
    seqs = [
        sequence_of(Arrival(float(rng.uniform(0, 60)), n, 1, priority=int(rng.integers(-3, 4))), i)
        for i, n in enumerate(rng.integers(1, 8000, 200).tolist())
    ]
    mine = sorted(seqs, key=lambda seq: sched.key(seq, 0.0))
    for now in (60.0, 61.5, 4000.0):

        def aged(seq, now=now):
            lead = weight * seq.metadata["priority"]
            return seq.remaining + lead - rate * (now - seq.arrival)

        assert sorted(seqs, key=aged) == mine


def test_far_rates_are_fifo_and_shortest():
    arrivals = overload(num=120)
    like_fifo, like_shortest = (Aging(Aging.Config(rate=rate)) for rate in (1e9, 1e-3))
    assert serve(like_fifo, arrivals).steps == serve(Fifo(), arrivals).steps
    assert serve(like_shortest, arrivals).steps == serve(Shortest(), arrivals).steps


def test_equal_prompts_are_served_by_arrival():
    arrivals = [Arrival(0.002 * i, 50, 3) for i in range(60)]
    assert serve(Aging(), arrivals).steps == serve(Fifo(), arrivals).steps


def test_a_cap_bounds_the_longest_wait():
    slow, capped = (
        serve(Aging(Aging.Config(rate=10, max_wait_s=cap)), overload()).ttft_s().max()
        for cap in (None, 0.5)
    )
    fifo = serve(Fifo(), overload()).ttft_s().max()
    assert capped <= fifo + 0.5 < slow


def test_a_unit_of_priority_is_worth_its_weight_in_tokens():
    sched = Aging(Aging.Config(rate=100, priority_weight=50))
    usual = sequence_of(Arrival(0.0, 100, 1), 0)
    for num_prompt, priority, before in ((149, -1, True), (151, -1, False), (49, 1, True)):
        other = sequence_of(Arrival(0.0, num_prompt, 1, priority=priority), 1)
        assert (sched.key(other, 0.0) < sched.key(usual, 0.0)) == before


class TestTheMeasuredRate:
    def test_is_frozen_after_so_many_steps_with_prompt_work(self):
        sched = Aging(Aging.Config(warmup_steps=3, rate_fraction=0.5, assumed_speed=800))
        assert sched.rate == 400
        for _ in range(10):
            sched.observe(8, 8, 0.001)  # one token a row: nothing was prefilled
        for seconds in (1.0, 1.0, 2.0):
            assert sched.rate == 400
            sched.observe(1000, 4, seconds)
        assert sched.rate == 500
        for _ in range(10):
            sched.observe(1_000_000, 4, 0.001)
        assert sched.rate == 500

    def test_is_not_measured_where_it_is_given(self):
        sched = Aging(Aging.Config(rate=7, warmup_steps=1))
        sched.observe(1000, 4, 1.0)
        assert sched.rate == 7

    def test_weighs_steps_by_their_tokens(self):
        small, full, compiled = (90.0, 10), (5000.0, 2000), (20.0, 2000)
        assert typical_speed([small] * 20 + [full] * 5) == 5000
        assert typical_speed([compiled] + [full] * 5) == 5000
        assert typical_speed([full]) == 5000

    def test_keys_of_before_and_after_keep_their_own_bounds(self):
        """Halfway through an overload the rate falls from 1,000 to 300; nobody is sorted again."""
        cost = StepCost(fixed_s=0.0, prefill_s=1 / 3000, decode_s=0.0)
        config = Aging.Config(rate_fraction=0.1, assumed_speed=10_000, warmup_steps=100)
        rates = {}

        class Noted(Aging):
            def key(self, seq, clock):
                rate = rates.setdefault(seq.order, self.rate)
                moment = super().key(seq, clock)
                assert moment == seq.arrival + seq.remaining / rate
                return moment

        sched = Noted(config)
        engine = VirtualEngine(sched, limits=LIMITS, num_kv_tokens=8 * 512, record=True, cost=cost)
        log = engine.run(overload())
        assert sched.rate == pytest.approx(300, rel=0.05)
        assert {round(rate, -2) for rate in rates.values()} == {1000, 300}
        assert log.counters.num_preemptions == 0
        num_passes = 0
        for step in log.steps:
            served = {row.order for row in step.rows[step.num_decodes :]}
            for early in set(step.waiting) - served:
                for late in (order for order in served if order > early):
                    num_passes += 1
                    seq = log.sequences[early]
                    gap = log.sequences[late].arrival - seq.arrival
                    assert gap <= seq.num_prompt / rates[early] + 1e-9
        assert num_passes > 100
