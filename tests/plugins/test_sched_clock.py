"""The virtual clock against hand-made schedules."""

from __future__ import annotations

import numpy as np
import pytest

from core.batch import Limits
from core.testing.clock import (
    Arrival,
    Row,
    StepCost,
    VirtualEngine,
    expected_output,
    next_token,
    percentiles,
)
from plugins.sched.fifo import Fifo

LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)
COST = StepCost(fixed_s=1.0, prefill_s=0.1, decode_s=0.01)


def run(arrivals, **options):
    engine = VirtualEngine(
        Fifo(), limits=LIMITS, num_kv_tokens=256, cost=COST, record=True, **options
    )
    return engine.run(arrivals)


def test_times_and_rows_are_those_on_paper():
    """20 tokens over two steps, the second shared with all of another's 6; then both decode."""
    log = run([Arrival(0.0, 20, 3), Arrival(2.0, 6, 2)])
    assert [step.rows for step in log.steps] == [
        (Row(0, 0, 16),),
        (Row(0, 16, 20), Row(1, 0, 6)),
        (Row(0, 20, 21), Row(1, 6, 7)),
        (Row(0, 21, 22),),
    ]
    first = 1.0 + 1.6
    second = first + 1.0 + 1.0
    third = second + 1.0 + 0.02
    ends = [first, second, third, third + 1.01]
    assert [step.end_s for step in log.steps] == pytest.approx(ends)
    assert log.ttft_s() == pytest.approx([second, second - 2.0])
    assert log.sequences[0].token_times[20:] == pytest.approx([second, third, third + 1.01])
    assert log.end_s == pytest.approx(third + 1.01)


def test_an_idle_engine_waits_for_the_next_arrival():
    log = run([Arrival(0.5, 10, 1), Arrival(100.0, 10, 1)])
    assert log.ttft_s() == pytest.approx([2.0, 2.0])
    assert [step.planned_s for step in log.steps] == [0.5, 100.0]


def test_overlap_plans_a_step_before_the_one_before_it_has_landed():
    """What comes in while a step runs is seen one step later; the device is never idle between."""
    log = run([Arrival(0.0, 16, 4), Arrival(2.0, 5, 1)], depth=1)
    assert [step.planned_s for step in log.steps] == pytest.approx([0.0, 0.0, 2.6, 3.61])
    assert [step.end_s for step in log.steps] == pytest.approx([2.6, 3.61, 5.12, 6.13])
    assert [row.order for row in log.steps[2].rows] == [0, 1]


@pytest.mark.parametrize("depth", [0, 1])
def test_outputs_end_where_they_should_and_early_ones_are_cut(depth):
    """One writes all that it may, one ends on its own: the step in flight by then is dropped."""
    arrivals = [Arrival(0.0, 5, 9, 9), Arrival(0.0, 5, 3, 20)]
    log = run(arrivals, depth=depth)
    for seq, arrival in zip(log.sequences, arrivals, strict=True):
        assert log.output(seq) == expected_output(seq, arrival.num_output)
    assert log.faults == [] and log.stalled is None


def test_tokens_depend_on_the_token_before_and_on_the_position():
    previous, position = np.arange(1000), np.full(1000, 7)
    assert len(set(next_token(previous, position).tolist())) == 1000
    assert len(set(next_token(position, previous).tolist())) == 1000


def test_percentiles_are_values_that_occurred():
    assert percentiles([4.0, 1.0, 3.0, 2.0], 50, 75, 76, 100) == [2.0, 3.0, 4.0, 4.0]


def test_nobody_is_held_back_for_ever():
    """A policy may let some wait; where nothing else runs the schedule goes on with them."""

    class Sleeps(Fifo):
        def chunk(self, seq, budget):
            return 0 if seq.order == 1 else budget

    engine = VirtualEngine(Sleeps(), limits=LIMITS, num_kv_tokens=256, cost=COST)
    log = engine.run([Arrival(0.0, 10, 2), Arrival(0.0, 10, 2)])
    assert log.stalled is None
    assert [seq.num_output for seq in log.sequences] == [2, 2]
