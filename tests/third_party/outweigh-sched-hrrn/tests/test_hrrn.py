"""`hrrn` is held to the contract of its seam, and to gates of its own."""

from __future__ import annotations

from outweigh_sched_hrrn import Hrrn

from core.batch import Limits
from core.registry import Registry
from core.testing.clock import Arrival, StepCost, VirtualEngine, sequence_of
from core.testing.sched import LIMITS, SchedulerSuite, random_arrivals


class TestHrrn(SchedulerSuite):
    plugin = "hrrn"
    short_passes_long = True


def ttft_s(name: str, arrivals: list[Arrival], limits: Limits = LIMITS) -> list[float]:
    """Times to first token, in seconds of a virtual clock."""
    offer = Registry().find("sched", name).load()
    cost = StepCost(fixed_s=2e-3, prefill_s=1e-4, decode_s=1e-4)
    engine = VirtualEngine(offer(offer.Config()), limits=limits, num_kv_tokens=1 << 12, cost=cost)
    return [float(t) for t in engine.run(arrivals).ttft_s()]


def test_gate() -> None:
    """In the mean below first come, first served: exact, on every machine."""
    arrivals = random_arrivals(200, seed=1)
    assert sum(ttft_s("hrrn", arrivals)) < sum(ttft_s("fifo", arrivals))


def test_the_ratio_is_that_of_the_paper() -> None:
    hrrn = Hrrn(Hrrn.Config(seconds_per_token=0.01))
    assert hrrn.ratio(sequence_of(Arrival(0.0, 100, 1), 0), 3.0) == 4.0
    assert hrrn.ratio(sequence_of(Arrival(5.0, 100, 1), 0), 5.0) == 1.0


def test_a_long_prompt_is_not_passed_for_ever() -> None:
    """Where the shortest first starves it: it is served while short ones still come."""
    limits = Limits(160, 2, 24)
    shorts = [Arrival(i * 4e-3, 24, 1) for i in range(400)]
    arrivals = [Arrival(0.001, 150, 1), *shorts]
    long_s = {name: ttft_s(name, arrivals, limits)[1] for name in ("hrrn", "shortest")}
    assert long_s["hrrn"] < 0.5 * long_s["shortest"]
