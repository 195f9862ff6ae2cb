"""What the host does in a step, counted, not timed: so it is the same on every machine.

Slots, not objects: what stands between the tokens of a step and the launch of the next one is done
by arrays, whatever the number of rows. What is done row by row comes after the launch.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter

import pytest

import core
from core import Engine, SamplingParams
from evals.speed import host_path

CORE = core.__path__[0]


def engine_of(rows, seats=None, *, overlap=True, **settings):
    """With `rows` sequences that decode, every step of which all ask for room, and publish."""
    engine = Engine(
        model="random:tiny",
        device="cpu",
        overlap=overlap,
        max_model_len=64,
        max_num_seqs=seats or rows,
        max_num_batched_tokens=1024,
        settings={"kv.block_size": 1, **settings},
    )
    host_path.without_device(engine)
    for i in range(rows):
        params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.5, top_k=5)
        engine.add_request([3 + i, 5, 7], params, str(i))
    for _ in range(4):
        engine.step()
    return engine


class Opcodes:
    """How many bytecodes Python runs while `counts`: what is done in a loop counts each time."""

    def __init__(self, counts=True):
        self.counts, self.num = counts, 0

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)

    def _trace(self, frame, event, arg):
        frame.f_trace_opcodes = True
        self.num += self.counts and event == "opcode"
        return self._trace


def opcodes(function):
    with Opcodes() as found:
        function()
    return found.num


def on_the_way_to_the_launch(engine):
    """Opcodes of a step from the moment when its tokens are there to the launch of the next."""
    executor, found = engine._executor, Opcodes(counts=False)
    stage = executor._stage

    def landed():
        assert found.num == 0
        found.counts = True

    def staged(plan):
        made = stage(plan)
        found.counts = False
        return made

    executor._stage = staged
    begun, oldest = engine._in_flight[0]
    engine._in_flight[0] = begun, oldest._replace(wait=landed)
    num_steps = engine.counters.num_steps
    with found:
        events = engine.step()
    assert (
        engine.counters.num_steps == num_steps + 1 and len(events) == engine._schedule.num_running
    )
    assert not found.counts and found.num > 0
    return found.num


@pytest.mark.parametrize("presence_penalty", [0.0, 1.0])
def test_planning_and_staging_do_no_more_for_more_rows(presence_penalty):
    def costs(rows):
        options = {"max_num_seqs": rows, "max_num_batched_tokens": 1024, "max_model_len": 64}
        settings = {"kv.block_size": 32}  # so that no row asks for room
        with Engine(model="random:tiny", device="cpu", settings=settings, **options) as engine:
            given = {"temperature": 0.5, "top_k": 5, "presence_penalty": presence_penalty}
            for i in range(rows):
                engine.add_request([3, 5, 7], SamplingParams(max_tokens=30, **given), str(i))
            for _ in range(3):
                engine.step()
            plans = []
            planning = opcodes(lambda: plans.append(engine._schedule.plan()))
            staging = opcodes(lambda: engine._executor._stage(plans[0]))
            assert plans[0].num_decodes == len(plans[0].slots) == rows
        return planning, staging

    assert costs(4) == costs(64)


def test_between_tokens_and_the_next_launch_nothing_is_done_by_row():
    """Though every row begins a block, publishes one, and has news."""
    found = {}
    for rows in (4, 64):
        with engine_of(rows) as engine:
            assert len(engine._in_flight) == 2, "a step is launched ahead of the events"
            found[rows] = on_the_way_to_the_launch(engine)
    assert found[4] == found[64]


def test_a_step_is_planned_and_staged_before_the_tokens_it_waits_for():
    """Where every seat is taken. What then stands on the way to the launch is less than half."""
    with engine_of(8) as engine:
        foreseen = engine._schedule._foreseen
        assert foreseen.num_decodes == 8 and engine._executor._staged[0] is foreseen
        ahead = on_the_way_to_the_launch(engine)
        assert engine._in_flight[-1][1].plan is foreseen
        engine._executor.stage_ahead(None)
        assert ahead < 0.5 * on_the_way_to_the_launch(engine), "it is staged on the way then"


def test_what_was_foreseen_is_taken_back_where_somebody_goes():
    with engine_of(8) as engine:
        slots, before = engine._slots, engine._schedule._foreseen
        engine.abort("3")
        starts = {seq: slots.num_computed[slot] for slot, seq in engine._schedule.decoding.items()}
        for _ in range(2):  # with a seat free, a step is launched in the next call
            engine.step()
        plan = engine._in_flight[-1][1].plan
        assert plan is not before and len(plan.slots) == 7
        again = {slots.owner[slot]: n for slot, n in zip(plan.slots, plan.starts, strict=True)}
        assert again == {seq: n - 1 for seq, n in starts.items()}, "it stands where it stood"


def test_nothing_is_foreseen_where_a_length_ends_somebody():
    with engine_of(8) as engine:
        engine._slots.max_total[0] = engine._slots.num_tokens[0] + 2
        found = []
        for _ in range(2):
            engine.step()
            found.append(engine._schedule._foreseen is not None)
        assert found == [True, False]


def test_whoever_waits_is_in_the_first_step_after_a_seat_is_free():
    """Though a step of the others could have been planned before."""
    with engine_of(2) as engine:
        engine._slots.max_total[0] = engine._slots.num_tokens[0] + 2
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True), "late")
        while not engine._slots.num_free:
            engine.step()
        late = engine._requests["late"].seq
        assert late.slot is None
        engine.step()
        assert late.slot is not None


def test_what_is_done_by_row_after_the_launch():
    """An event is five calls in the core, of which three are for the text."""

    def calls(rows):
        found = Counter()

        def profile(frame, event, arg):
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(CORE):
                found[code.co_qualname] += 1

        with engine_of(rows, **{"kv.block_size": 32}) as engine:
            sys.setprofile(profile)
            try:
                events = engine.step()
            finally:
                sys.setprofile(None)
            assert [len(event.token_ids) for event in events] == [1] * rows
        return found

    more = calls(64) - calls(4)
    names = ["Engine._event", "Engine._read", "RequestText.push", "StopStrings.push"]
    names.append("RequestText.delta")
    assert {name: more[name] for name in names} == dict.fromkeys(names, 60)
    of_text = {name for name in more if name.startswith(("_byte_decoder", "ByteTokenizer"))}
    assert more.keys() - of_text == set(names)


def test_nobody_asks_for_events_and_none_is_built():
    """`generate` reads the text once, at the end."""
    with engine_of(4) as engine:
        reads, read = [], engine._read
        engine._read = lambda request, final=False: (reads.append(final), read(request, final))
        engine.generate([[9, 8, 7]] * 2, SamplingParams(max_tokens=12, ignore_eos=True))
        assert reads.count(False) == 0 and reads.count(True) == 6  # the four of before ended too


def test_a_step_is_launched_ahead_only_where_no_seat_is_free():
    """Who comes while a seat is free is in the very next step."""
    plans = []
    with engine_of(3, seats=4) as engine:
        plan = engine._schedule.plan
        engine._schedule.plan = lambda: plans.append(plan()) or plans[-1]
        assert len(engine._in_flight) == 1
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True))
        engine.step()
        assert [len(one.slots) - one.num_decodes for one in plans] == [1, 0], "and one ahead of it"
        assert len(engine._in_flight) == 2
        engine.step()
        assert len(plans) == 3 and len(engine._in_flight) == 2
        engine.abort("0")
        engine.step()
        assert len(plans) == 3 and len(engine._in_flight) == 1, (
            "it waits for whoever takes the seat"
        )


def test_without_overlap_nothing_is_launched_ahead():
    with engine_of(2, overlap=False) as engine:
        before = engine.counters.num_steps
        assert len(engine.step()) == 2 and not engine._in_flight
        assert engine.counters.num_steps == before + 1


# -------- the command


def test_the_command_says_what_a_step_costs(tmp_path, capsys):
    file = tmp_path / "host.json"
    arguments = ["--sequences", "1", "3", "--steps", "6", "--context", "8", "--json", str(file)]
    assert host_path.main(["--device", "cpu", *arguments]) == 0
    assert "path p90" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert [row["sequences"] for row in found["us"]] == [1, 3]
    for row in found["us"]:
        phases = [row[name] for name in host_path.PHASES]
        assert row["n"] == 6 and min(phases) > 0 and row["path"] < row["host"] + row["wait"]
    assert found["engine"]["limits"]["max_num_seqs"] == 3 and found["device_left_out"]


def test_phases_are_exclusive_and_add_up():
    """On a clock that each look advances by a microsecond: two looks a phase."""
    clock = itertools.count()
    with pytest.MonkeyPatch.context() as patch, engine_of(2) as engine:
        stopwatch = host_path.Stopwatch(engine)
        for _ in range(2):  # so that the step that lands was launched under the watch
            stopwatch.step()
        patch.setattr(host_path.time, "perf_counter", lambda: next(clock) * 1e-6)
        us, num_tokens = stopwatch.step()
        num_looks = next(clock)
    # A step is staged twice: what was staged ahead is taken, and the next one is staged.
    assert num_tokens == 2 and num_looks == 2 * (1 + len({"wait", *host_path.PHASES}))
    assert us["host"] + us["wait"] == pytest.approx(num_looks - 1)
    # From the end of the wait: of harvest, of plan from begin to end, launch and stage begin, end.
    assert us["path"] == pytest.approx(6)
    assert (us["wait"], us["plan"], us["stage"]) == pytest.approx((1, 1, 2))


def test_a_batch_that_does_not_decode_as_a_whole_is_no_measurement(capsys):
    arguments = "--sequences 3 --steps 3 --context 8 --set kv.num_blocks=9".split()
    assert host_path.main(["--device", "cpu", *arguments]) == 1
    assert "in 3 of 3 steps not all of 3 sequences decoded" in capsys.readouterr().err


def test_more_sequences_than_seats_are_refused_at_once(capsys):
    with pytest.raises(SystemExit) as end:
        host_path.main("--device cpu --sequences 2 --seats 1".split())
    assert end.value.code == 2
    assert "--seats 1 cannot hold 2 sequences" in capsys.readouterr().err
