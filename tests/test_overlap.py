"""Depth 0, depth 1, and depth 1 on a device that runs late give the same, whatever lands when.

On a CPU a step has run when its launch returns, so `overlap=True` alone cannot show who reads a
token before it is there; `core.testing.late` runs steps as late as they may run.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import weakref
from contextlib import contextmanager, nullcontext
from unittest import mock

import numpy as np
import pytest

from core import Engine, SamplingParams
from core.batch import Limits
from core.staging import core_sections, token_rows
from core.testing.late import LateDevice, running_late
from core.testing.tiny import reference_generate, save_tiny
from core.tokenizer import Tokenizer
from plugins.kv.paged import Paged
from plugins.sched.fifo import Fifo

NEW_TOKENS = 7
AHEAD = "no seat free"  # a step is launched before events are built, its room taken even before
RUNS = {  # overlap, the device, seats for three requests
    "depth 0": (False, nullcontext, 4),
    "depth 1": (True, nullcontext, 4),
    "late": (True, running_late, 4),
    AHEAD: (True, running_late, 3),
}
FARTHEST = ["depth 0", "late"]
ROOM = [("recompute", False), ("recompute", True), ("swap", False), ("swap", True)]


class Spelled(Tokenizer):
    """Every id is two letters and a full stop, so that strings begin and end inside tokens."""

    def incremental(self):
        return lambda ids, final: "".join(f"{chr(97 + i // 26)}{chr(97 + i % 26)}." for i in ids)


class Tight(Paged):
    """Blocks of one token, so that a decode asks for room in every step; `short` says there is none
    until somebody gives some back. One alone has the room that `ever_fits` promised it."""

    short = False

    def acquire(self, seq, upto):
        if self.short and seq in self._held and len(self._held) > 1:
            return None
        return super().acquire(seq, upto)

    def release(self, seq):
        self.short = False
        super().release(seq)


class Chosen(Fifo):
    """The request of that id gives way, where it runs; else whoever needs the room."""

    gives_way = None

    def victim(self, running, for_seq):
        return next((s for s in running if s.request_id == self.gives_way), None)


def prompts():
    rng = np.random.default_rng(12)
    return [rng.integers(3, 290, n).tolist() for n in (5, 9, 6)]


def params_of(**given):
    return SamplingParams(**{"max_tokens": NEW_TOKENS, "ignore_eos": True, **given})


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "qwen3"
    save_tiny("qwen3", path)
    return path


@contextmanager
def engine_of(path, run="depth 0", **options):
    overlap, device, seats = RUNS[run]
    defaults = {"model": str(path), "device": "cpu", "max_model_len": 64, "max_num_seqs": seats}
    defaults |= {"max_num_batched_tokens": 64, "overlap": overlap}
    with device() as late, Engine(**{**defaults, **options}) as engine:
        engine.tokenizer, engine.late = Spelled(), late
        yield engine


@contextmanager
def tight_engine(path, run, preemption, sharing, **options):
    kv, sched = Tight(Tight.Config(block_size=1)), Chosen()
    options = {"preemption": preemption, "enable_prefix_caching": sharing, **options}
    with engine_of(path, run, kv=kv, sched=sched, **options) as engine:
        engine.kv, engine.sched = kv, sched
        yield engine


def serve(engine, all_params, before_step=lambda step: None, all_prompts=None):
    """Outputs in the order of `all_params`, after the engine has come to rest; `before_step(n)` is
    called before the n-th step, from 1 on. Events add up, and each request has one end."""
    for i, params in enumerate(all_params):
        engine.add_request((all_prompts or prompts())[i], params, str(i))
    ids, texts = {name: [] for name in "012"}, dict.fromkeys("012", "")
    outputs, step = {}, 0
    while engine.has_unfinished():
        step += 1
        assert step < 200
        before_step(step)
        for event in engine.step():
            assert event.request_id not in outputs, "an event of what has ended"
            ids[event.request_id] += event.token_ids
            texts[event.request_id] += event.text
            if event.output:
                outputs[event.request_id] = event.output
    for name, output in outputs.items():
        assert (ids[name], texts[name]) == (output.token_ids, output.text)
    engine._kv.check_integrity()
    assert engine._kv.usage().num_held == 0
    assert engine._slots.num_free == engine.limits.max_num_seqs
    return [outputs[str(i)] for i in range(len(all_params))]


def ends(outputs):
    return [(o.token_ids, o.text, o.finish_reason) for o in outputs]


@pytest.fixture(scope="module")
def greedy(path):
    """Of each prompt, by transformers."""
    return [reference_generate(path, prompt, NEW_TOKENS) for prompt in prompts()]


@pytest.fixture(scope="module")
def mixed(path, greedy):
    """A stop id, penalties with a seed, a stop string over tokens; and how each ends alone."""
    text = Spelled().decode(greedy[2][:6])
    assert len(set(greedy[0][:5])) == 5
    all_params = [
        params_of(stop_token_ids=[greedy[0][4]]),
        params_of(temperature=1.0, seed=3, frequency_penalty=-2.0, presence_penalty=-2.0),
        params_of(stop=text[-5:], presence_penalty=0.0),
    ]
    wanted = []
    for prompt, params in zip(prompts(), all_params, strict=True):
        with engine_of(path) as engine:
            wanted += ends(engine.generate(prompt, params))
    assert [(len(ids), how) for ids, _, how in wanted] == [(5, "stop"), (7, "length"), (6, "stop")]
    assert wanted[0][0] == greedy[0][:5] and wanted[2][0] == greedy[2][:6]
    assert len(set(wanted[1][0])) < 4, "it comes back to what it has written"
    return all_params, wanted


# -------- what ends a request, on every step


@pytest.mark.parametrize("offset", range(NEW_TOKENS))
def test_a_stop_id_a_stop_string_and_an_abort_on_every_step(path, greedy, offset):
    text = Spelled().decode(greedy[1][: offset + 1])
    all_params = [params_of(stop_token_ids=[greedy[0][offset]]), params_of(stop=text[-5:])]
    all_params.append(params_of(max_tokens=30, frequency_penalty=0.5))
    found = {}
    for run, (overlap, *_) in RUNS.items():
        with engine_of(path, run) as engine:

            def abort(step, engine=engine):
                if step == offset + 1:
                    engine.abort("2")

            outputs = serve(engine, all_params, abort)
            found[run] = ends(outputs[:2])
            assert outputs[2].finish_reason == "abort"
            assert len(outputs[2].token_ids) == max(0, offset - overlap)
        assert found[run][0][::2] == (greedy[0][: greedy[0].index(greedy[0][offset]) + 1], "stop")
        assert found[run][1][::2] == (greedy[1][: offset + 1], "stop")
    assert all(ended == found["depth 0"] for ended in found.values())


@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_stop_costs_too_much(path, greedy, overlap):
    """A length is known in advance: nothing is computed past it. What only the token tells overruns
    by one step with overlap, and by none without."""
    text = Spelled().decode(greedy[1][:4])
    for run in ("late", "depth 1") if overlap else ("depth 0",):
        for params, num_tokens, late in (
            (params_of(max_tokens=4), 4, 0),
            (params_of(stop_token_ids=[greedy[1][3]]), 4, 1),
            (params_of(stop=text[-5:]), 4, 1),
            (params_of(max_tokens=4, stop_token_ids=[greedy[1][3]]), 4, 0),
        ):
            with engine_of(path, run) as engine:
                (output,) = serve(engine, [params], all_prompts=prompts()[1:])
                assert output.token_ids == greedy[1][:num_tokens]
                assert output.metrics.num_output_tokens == len(output.metrics.itl_ms) + 1 == 4
                computed = engine.counters.num_decode_tokens
                assert computed == num_tokens - 1 + late * overlap


# -------- giving way, on every step


@pytest.mark.parametrize("run", ["depth 0", "depth 1", "late"])
@pytest.mark.parametrize(("preemption", "sharing"), ROOM)
def test_giving_way_on_every_step(path, mixed, run, preemption, sharing):
    """Each request in turn, decoding or in the middle of its prompt, beside two that go on. A token
    ends the first, a string the last, and the penalties of the second look at what it wrote."""
    all_params, wanted = mixed
    num_given_way = dict.fromkeys("012", 0)
    with tight_engine(path, run, preemption, sharing, chunk_size=4) as engine:
        for victim in "012":
            for at in range(2, 10):
                engine.kv.short, engine.sched.gives_way = False, victim

                def no_room(step, at=at, engine=engine):
                    engine.kv.short |= step == at

                before = engine.counters.num_preemptions
                outputs = serve(engine, all_params, no_room)
                assert ends(outputs) == wanted, (victim, at)
                times = [output.metrics.num_preemptions for output in outputs]
                assert engine.counters.num_preemptions - before == sum(times) <= 1
                num_given_way[victim] += times[int(victim)]
        counters = engine.counters
        assert (counters.num_swapped_bytes > 0) == (preemption == "swap")
        assert (counters.num_recomputed_tokens > 0) == (preemption == "recompute")
    assert min(num_given_way.values()) >= 4, num_given_way


ENDS = {
    "stop id": lambda ids, text: params_of(stop_token_ids=[ids[-1]]),
    "stop string": lambda ids, text: params_of(stop=text[-5:]),
    "length": lambda ids, text: params_of(max_tokens=len(ids)),
}


@pytest.mark.parametrize("run", [*FARTHEST, AHEAD])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("how", ENDS)
def test_who_has_ended_in_flight_gives_nothing_back_twice(path, greedy, run, preemption, how):
    """No room on every step, a request that ends on every token. The step before the shortage is in
    flight with overlap: what it brings lands first, and who has ended then does not give way."""
    ids, text = greedy[1], Spelled().decode(greedy[1])
    assert len(set(ids)) == NEW_TOKENS
    goes_on = params_of(max_tokens=9)
    with tight_engine(path, run, preemption, sharing=False) as engine:
        engine.sched.gives_way = "1"
        for num_tokens in range(1, NEW_TOKENS + 1):
            params = ENDS[how](ids[:num_tokens], text[: 3 * num_tokens])
            for at in range(2, num_tokens + 2):
                engine.kv.short = False

                def no_room(step, at=at, engine=engine):
                    engine.kv.short |= step == at

                other, output = serve(engine, [goes_on, params], no_room)
                assert output.token_ids == ids[:num_tokens]
                assert output.finish_reason == ("length" if how == "length" else "stop")
                assert output.metrics.num_preemptions == (at <= num_tokens), (num_tokens, at)
                assert output.metrics.num_output_tokens == num_tokens
                assert (len(other.token_ids), other.metrics.num_preemptions) == (9, 0)


@pytest.mark.parametrize("run", FARTHEST)
@pytest.mark.parametrize(("preemption", "sharing"), ROOM)
def test_an_abort_of_one_that_has_given_way(path, mixed, run, preemption, sharing):
    """On every step, while its keys are on the host or nowhere: it ends with what it has written,
    the others go on."""
    all_params, wanted = mixed
    with tight_engine(path, run, preemption, sharing) as engine:
        for victim in range(3):
            for at in range(2, 6):
                engine.kv.short, engine.sched.gives_way = False, str(victim)

                def no_room_then_abort(step, at=at, engine=engine, victim=victim):
                    engine.kv.short |= step == at
                    if step == at + 1:
                        seq = engine._requests[str(victim)].seq
                        assert seq.num_preemptions == 1 and seq.slot is None
                        assert (seq.saved is not None) == (preemption == "swap")
                        engine.abort(str(victim))

                outputs = serve(engine, all_params, no_room_then_abort)
                ended = outputs.pop(victim)
                assert ended.finish_reason == "abort"
                assert ended.token_ids == wanted[victim][0][: at - 1]
                assert ends(outputs) == wanted[:victim] + wanted[victim + 1 :]


@pytest.mark.parametrize(("preemption", "sharing"), ROOM)
def test_no_room_and_an_abort_while_no_seat_is_free(path, mixed, preemption, sharing):
    """On every step, each request in turn: what is launched ahead of events, and room that is taken
    ahead of a plan, belong to nobody who has given way or left."""
    all_params, wanted = mixed
    num_given_way = 0
    with tight_engine(path, AHEAD, preemption, sharing) as engine:
        for victim, at, wait in itertools.product(range(3), range(2, 8), range(4)):
            engine.kv.short, engine.sched.gives_way = False, str(victim)

            def no_room_then_abort(step, engine=engine, victim=victim, at=at, wait=wait):
                engine.kv.short |= step == at
                if step == at + wait:
                    engine.abort(str(victim))

            outputs = serve(engine, all_params, no_room_then_abort)
            ended = outputs.pop(victim)
            num_given_way += ended.metrics.num_preemptions
            assert ended.token_ids == wanted[victim][0][: len(ended.token_ids)]
            assert ends(outputs) == wanted[:victim] + wanted[victim + 1 :]
    assert num_given_way > 10


def test_keys_on_the_host_go_when_their_request_is_aborted(path):
    """They are as large as what is on the device, and the queue may stand still for long."""
    with tight_engine(path, "depth 1", "swap", sharing=False) as engine:
        engine.sched.gives_way = "1"
        for i in "01":
            engine.add_request(prompts()[int(i)], params_of(max_tokens=40), i)
        for step in range(3):
            engine.kv.short = step == 2
            engine.step()
        saved = weakref.ref(engine._requests["1"].seq.saved.data[0])
        engine.abort("1")
        engine.kv.short = True  # and nobody is admitted
        events = engine._event(next(iter(engine._news)))
        assert events.output.finish_reason == "abort"
        del events
        gc.collect()
        assert saved() is None


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_noise_is_the_same_after_giving_way(path, run, preemption):
    """Of requests without a seed of their own: theirs is that of the engine and their arrival, and
    not of the seat, of the step, or of who has come in between."""
    hot, found = params_of(temperature=1.0), {}
    for at in (None, 3, 5):
        with tight_engine(path, run, preemption, sharing=False, seed=7) as engine:
            engine.sched.gives_way = "1"

            def no_room(step, at=at, engine=engine):
                engine.kv.short |= step == at
                if step == (at or 3):
                    engine.add_request(prompts()[2], hot, "2")

            outputs = serve(engine, [hot, hot], no_room)
            assert outputs[1].metrics.num_preemptions == (at is not None)
            found[at] = [output.token_ids for output in outputs]
    assert found[None] == found[3] == found[5]
    assert len(found[None][0]) == NEW_TOKENS


@pytest.mark.parametrize("run", FARTHEST)
@pytest.mark.parametrize(("preemption", "sharing"), ROOM)
def test_no_room_in_any_step(path, mixed, run, preemption, sharing):
    """Somebody gives way in every step: it takes long, and it ends as ever."""
    all_params, wanted = mixed
    rng = random.Random(0)
    with tight_engine(path, run, preemption, sharing) as engine:
        for gives_way in (None, "at random"):

            def no_room(step, engine=engine, gives_way=gives_way):
                engine.kv.short, engine.sched.gives_way = True, gives_way and rng.choice("012")

            outputs = serve(engine, all_params, no_room)
            assert ends(outputs) == wanted
            assert sum(output.metrics.num_preemptions for output in outputs) >= 5


# -------- what a step in flight keeps


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("how", ["stop", "abort"])
def test_a_seat_that_changes_hands_gets_no_token_of_its_last_owner(path, greedy, run, how):
    """One seat: the step past a stop, or behind an abort, is in flight when the next one takes it.
    The last owner was penalised, and what it overran by is in nobody's history."""
    first = params_of(stop_token_ids=[greedy[0][2]], max_tokens=20)
    second = params_of(frequency_penalty=2.0, presence_penalty=1.0)
    with engine_of(path) as engine:
        wanted = ends(engine.generate(prompts()[1], second))
    first = dataclasses.replace(first, repetition_penalty=1.0 + 1e-6)
    with engine_of(path, run, max_num_seqs=1) as engine:

        def abort(step):
            if how == "abort" and step == 3:
                engine.abort("0")

        outputs = serve(engine, [first, second], abort)
    assert ends(outputs[1:]) == wanted
    assert outputs[0].finish_reason == how
    assert outputs[0].token_ids == greedy[0][: 3 if how == "stop" else 2 - RUNS[run][0]]


@pytest.mark.parametrize("run", ["depth 1", "late"])
def test_a_prompt_is_shared_from_its_launch_and_what_is_written_once_it_is_known(path, greedy, run):
    """The second prompt hits what is still in flight: in stream order its reader comes after."""
    settings = {"kv.block_size": 4}
    with engine_of(path, run, settings=settings) as engine:
        engine.add_request(prompts()[1], params_of(), "first")
        engine.step()
        assert not engine._requests["first"].seq.num_output, "its token is in flight"
        engine.add_request(prompts()[1], params_of(), "second")
        engine.add_request(prompts()[1] + greedy[1][:3], params_of(), "third")
        found = {}
        while engine.has_unfinished():
            found |= {e.request_id: e.output for e in engine.step() if e.output}
        cached = {name: output.metrics.num_cached_tokens for name, output in found.items()}
        assert cached == {"first": 0, "second": 8, "third": 8}  # of 12, but 3 are not known yet
        assert found["first"].token_ids == found["second"].token_ids == greedy[1]
        assert found["third"].token_ids[:4] == greedy[1][3:]
        again = engine.generate(prompts()[1] + greedy[1][:4], params_of(max_tokens=1))
        assert again[0].metrics.num_cached_tokens == 12


@pytest.mark.parametrize("run", RUNS)
def test_a_stop_in_flight_outlives_the_step_that_fails_after_it(path, greedy, run, monkeypatch):
    """With overlap the step behind the stop is launched before the stop is known. Where that launch
    fails, the request has ended all the same, and its neighbour fails with what it has written."""
    all_params = [params_of(stop_token_ids=[greedy[0][2]]), params_of()]
    with engine_of(path, run) as engine:
        launch = engine._executor.launch

        def fails(plan):
            if engine.counters.num_steps == 3:  # three tokens are known, or in flight
                engine.counters.num_steps += 1
                raise OSError("the fourth step fails")
            return launch(plan)

        monkeypatch.setattr(engine._executor, "launch", fails)
        stopped, failed = serve(engine, all_params)
    assert (stopped.token_ids, stopped.finish_reason) == (greedy[0][:3], "stop")
    assert (failed.token_ids, failed.finish_reason) == (greedy[1][:3], "error")
    assert "the fourth step fails" in failed.error


@pytest.mark.parametrize("run", ["depth 0", "depth 1"])
def test_a_device_that_fails_under_way_ends_the_requests_of_both_steps(path, run, monkeypatch):
    """The step in flight fails as it lands, and the launch of the next one too: an error that a
    device does not recover from. No exception leaves the engine, and no request stays."""
    with engine_of(path, run) as engine:
        launch = engine._executor.launch

        def lost():
            raise RuntimeError("the device is lost")

        def fails(plan):
            if engine.counters.num_steps > 2:
                lost()
            step = launch(plan)
            return step._replace(wait=lost) if engine.counters.num_steps > 1 else step

        monkeypatch.setattr(engine._executor, "launch", fails)
        outputs = serve(engine, [params_of(), params_of()])
    assert [output.finish_reason for output in outputs] == ["error", "error"]
    assert all("the device is lost" in output.error for output in outputs)


@pytest.mark.parametrize("run", RUNS)
def test_a_chunk_has_no_logits_and_samples_nothing(path, greedy, run):
    """9 tokens in chunks of 2: five steps, and the sampler runs in the last alone."""
    with engine_of(path, run, chunk_size=2) as engine:
        plans, launch = [], engine._executor.launch

        def watched(plan):
            in_flight = launch(plan)
            plans.append((int(plan.query_lens[0]), len(in_flight.slots)))
            return in_flight

        engine._executor.launch = watched
        (output,) = serve(engine, [params_of(max_tokens=3)], all_prompts=prompts()[1:])
    assert output.token_ids == greedy[1][:3]
    assert plans == [(2, 0)] * 4 + [(1, 1)] * 3
    assert engine.counters.num_eager_samplers == 3


# -------- staging


@pytest.mark.parametrize("marks", [True, False], ids=["launched", "given up"])
@pytest.mark.parametrize("num_host", [1, 2, 3])
def test_a_staging_buffer_is_written_again_only_after_its_copy(num_host, marks):
    """mini-sglang #103: two plans in flight that share one pinned buffer. Here no copy has run when
    the ring is through, and every step must still find what was staged for it, whether or not the
    steps before it have left an event behind them."""
    device = LateDevice()
    arrays = {"a": ((4,), "int32"), "b": ((3, 5), "float32"), "tokens": ((12,), "int32")}
    staging = device.staging(arrays, num_host)
    seen = []
    for step in range(10):
        host = staging.host()
        if marks:
            assert device.num_waits == max(0, step + 1 - num_host), "it waits for one copy alone"
        host["a"][:], host["b"][:], host["tokens"][:] = step, step / 2, step
        staging.send(num_tokens=4)
        if marks:
            staging.mark()
        device.enqueue(lambda: seen.append([x.tolist() for x in staging.device.values()]))
    device.run_until(device.num_queued)
    assert seen == [[[step] * 4, [[step / 2] * 5] * 3, [step] * 12] for step in range(10)]


def test_of_the_tokens_only_those_that_a_step_has_are_sent():
    limits = Limits(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=30)
    device = LateDevice()
    staging = device.staging({"mine": ((3,), "int64")} | core_sections(limits), num_host=2)
    for num_tokens, value in ((30, 1), (5, 2)):
        host = staging.host()
        for array in host.values():
            array[...] = value
        staging.send(num_tokens)
        device.run_until(device.num_queued)
    tokens = staging.device.pop("tokens")
    assert all((array == 2).all() for array in staging.device.values())
    rows = token_rows(tokens, 5)
    assert rows.shape == (3, 5) and (rows == 2).all()
    assert all(row.data_ptr() % 16 == rows.data_ptr() % 16 for row in rows)
    assert int((tokens == 2).sum()) == 3 * 8 and int((tokens == 1).sum()) == 3 * 32 - 3 * 8


@pytest.mark.parametrize("depth", [0, 1])
def test_steps_in_flight_share_no_staging_buffer(path, mixed, depth):
    """A buffer for each step in flight and one to plan the next in: planning waits for no copy."""
    all_params, wanted = mixed
    options = {"overlap": bool(depth), "settings": {"kv.block_size": 1}}
    options |= {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    with running_late() as late, Engine(model=str(path), device="cpu", **options) as engine:
        engine.tokenizer = Spelled()
        staging = engine._executor._staging
        assert len(staging._ring) == depth + 2  # while a step is landed, so many are in flight
        written, host = [], staging.host

        def watched():
            written.append(staging._turn)
            assert written[-1] not in written[-1 - len(engine._in_flight) : -1]
            return host()

        with mock.patch.object(staging, "host", watched):
            assert ends(serve(engine, all_params)) == wanted
        assert len(written) == engine.counters.num_steps > 7
        assert set(written) == set(range(depth + 2))
        # The table of a long prefix hit takes more than one copy before the step.
        first, again = (engine.generate([7] * 55, params_of())[0] for _ in range(2))
        assert first.token_ids == again.token_ids and again.metrics.num_cached_tokens == 54
        assert engine.counters.num_extra_plans > 0
        assert late.num_waits == 0
