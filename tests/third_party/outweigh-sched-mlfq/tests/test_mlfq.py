"""`mlfq` is held to the contract of its seam, to what it promises, and to a gate of its own."""

from __future__ import annotations

from typing import ClassVar

from outweigh_sched_mlfq import Mlfq

from core.batch import Sequence
from core.registry import Registry
from core.testing.clock import Arrival, VirtualEngine, sequence_of
from core.testing.sched import LIMITS, SchedulerSuite, random_arrivals


class TestMlfq(SchedulerSuite):
    """Levels and promotions that the short sequences of the suite get to see."""

    plugin = "mlfq"
    config: ClassVar = {"quantum": 16, "promote_s": 0.5}


def request(order: int, num_prompt: int, arrival: float = 0.0) -> Sequence:
    return sequence_of(Arrival(arrival, num_prompt, 1), order)


def test_a_prompt_joins_the_level_it_fits_and_sinks_as_it_writes() -> None:
    offer = Mlfq(Mlfq.Config(levels=4, quantum=64, ratio=2.0))
    lengths = (1, 64, 65, 128, 129, 256, 257, 1000)
    assert [offer.key(request(0, n), 0.0) for n in lengths] == [0, 0, 1, 1, 2, 2, 3, 3]
    writer = request(0, 64)
    writer.num_known += 1
    assert offer.key(writer, 0.0) == 1


def test_whoever_waited_too_long_stands_at_the_top_and_keeps_its_room() -> None:
    offer = Mlfq(Mlfq.Config(promote_s=5.0))
    old, young = request(0, 1000), request(1, 1000, arrival=5.0)
    assert offer.key(young, 5.0) > 0
    assert offer.key(old, 5.0) > 0
    assert offer.victim([old, young], request(2, 10, arrival=5.0)) is young
    assert offer.key(old, 5.1) == 0
    assert offer.victim([old], request(2, 10, arrival=5.1)) is None


def mean_ttft_s(name: str) -> float:
    """Mean time to first token of 200 arrivals, in seconds of a virtual clock."""
    offer = Registry().find("sched", name).load()
    engine = VirtualEngine(offer(offer.Config()), limits=LIMITS, num_kv_tokens=1 << 12)
    return float(engine.run(random_arrivals(200, seed=1)).ttft_s().mean())


def test_gate() -> None:
    """Sooner than first come, first served: exact, on every machine."""
    assert mean_ttft_s("mlfq") < mean_ttft_s("fifo")
