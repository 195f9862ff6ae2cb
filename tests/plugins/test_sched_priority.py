"""`priority` through the conformance suite, and from `add_request` on."""

from __future__ import annotations

from core import Engine, SamplingParams
from core.batch import Limits
from core.testing.clock import Arrival, VirtualEngine
from core.testing.sched import SchedulerSuite
from plugins.sched.priority import Priority

LIMITS = Limits(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32)


class TestPriority(SchedulerSuite):
    plugin = "priority"
    short_passes_long = False  # of equal priority

    def pass_bound_s(self, sched, seq):
        return 0.0


class TestPriorityInWindows(SchedulerSuite):
    plugin = "priority"
    short_passes_long = False  # of equal priority
    config = {"max_wait_s": 0.1}

    def pass_bound_s(self, sched, seq):
        return 0.0


def admitted(sched, arrivals, **options):
    """Orders in which seats were given."""
    found = []
    engine = VirtualEngine(
        sched,
        limits=LIMITS,
        num_kv_tokens=128,
        on_admit=lambda seq, others: found.append(seq.order),
        **options,
    )
    engine.run(arrivals)
    return found


def test_the_lower_value_goes_first_and_equals_go_by_arrival():
    priorities = (0, 1, -5, 0, 1, -5, 7)
    arrivals = [Arrival(0.0, 20, 3, priority=p) for p in priorities]
    assert admitted(Priority(), arrivals) == [2, 5, 0, 3, 1, 4, 6]


def test_windows_let_the_urgent_pass_for_so_long_and_no_longer():
    """A stream of urgent requests that alone fills both seats, and one that is not."""
    patient = Arrival(0.001, 20, 3, priority=1)
    urgent = [Arrival(0.004 * i, 20, 3, priority=-1) for i in range(200)]
    place = {}
    for max_wait_s in (None, 0.3, 0.1):
        order = admitted(Priority(Priority.Config(max_wait_s=max_wait_s)), [patient, *urgent])
        place[max_wait_s] = order.index(1)  # the second to arrive
    assert place[None] == 200
    assert place[0.3] <= 75 and place[0.1] <= 25  # as many as arrive in a window, at most


def test_the_least_urgent_gives_way_for_memory():
    """Two fill the pool; where it runs out the less urgent starts over, though it came first."""
    arrivals = [Arrival(0.0, 14, 40, priority=p) for p in (3, 0)]
    engine = VirtualEngine(Priority(), limits=LIMITS, num_kv_tokens=64, kv_config={"block_size": 4})
    log = engine.run(arrivals)
    assert [seq.num_preemptions for seq in log.sequences] == [1, 0]


def test_a_request_brings_its_priority():
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with Engine(
        model="random:tiny",
        sched="priority",
        device="cpu",
        max_num_seqs=1,
        max_model_len=64,
        kv_cache_bytes="4MiB",
    ) as engine:
        for name, priority in (("late", 9), ("usual", 0), ("urgent", -1)):
            engine.add_request([5, 6, 7], params, name, priority=priority)
        ended = []
        while engine.has_unfinished():
            ended += [event.request_id for event in engine.step() if event.output]
    assert ended == ["urgent", "usual", "late"]
