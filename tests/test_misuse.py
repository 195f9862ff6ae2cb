"""Mistakes in Python and on the command line: one sentence, and nobody else is harmed."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from core import Engine, SamplingParams
from core.errors import RunError, UserError
from plugins.kv.contiguous import Contiguous
from plugins.sched.fifo import Fifo

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def engine():
    with Engine(model="random:tiny", device="cpu", max_model_len=128, sched="priority") as made:
        yield made


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ([[1.5]], None, "neither text nor token ids"),
        ([[True]], None, "neither text nor token ids"),
        ([["a"]], None, "neither text nor token ids"),
        ([[[1], [2]]], None, "neither text nor token ids"),
        (["\udcff"], None, "neither text nor token ids"),
        (["a"], {"max_tokens": 3}, "SamplingParams"),
        (["a"], [{"max_tokens": 3}], "SamplingParams"),
        (["a", "b"], [SamplingParams(stop_token_ids=[2**40]), SamplingParams()], "1099511627776"),
        (["a"], SamplingParams(stop_token_ids=[99999]), "99999 is outside"),
    ],
)
def test_generate_refuses_and_keeps_nothing(engine, prompts, params, words):
    with pytest.raises(UserError, match=words):
        engine.generate(prompts, params)
    assert not engine.has_unfinished()
    assert len(engine.generate("fine", SamplingParams(max_tokens=2))[0].token_ids) == 2


@pytest.mark.parametrize("wrong", [{"priority": "x"}, {"arrival": float("nan")}])
def test_a_request_that_cannot_be_ordered_is_refused(engine, wrong):
    with pytest.raises(UserError, match="give numbers"):
        engine.add_request("a", **wrong)
    assert engine.generate("fine", SamplingParams(max_tokens=1))[0].finish_reason == "length"


def test_a_request_whose_key_does_not_compare_harms_no_other():
    class ByMetadata(Fifo):
        def key(self, seq, clock):
            return seq.metadata["k"]

    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with Engine(model="random:tiny", device="cpu", max_model_len=64, sched=ByMetadata()) as engine:
        engine.add_request("a", params, metadata={"k": 1})
        with pytest.raises(RunError, match="keys of sched do not compare: TypeError"):
            engine.add_request("b", params, metadata={"k": "x"})
        events = [event for _ in range(4) for event in engine.step()]
        assert [e.output.finish_reason for e in events if e.output] == ["length"]
        assert not engine.has_unfinished()


def test_metadata_that_is_called_as_the_cores_own_is_refused():
    class Named(Contiguous):
        def metadata(self, limits):
            return {**super().metadata(limits), "tokens": ((3,), "int32")}

    kv = Named(Named.Config())
    with pytest.raises(UserError, match=r"metadata \['tokens'\], as the core's is"):
        Engine(model="random:tiny", device="cpu", max_model_len=64, kv=kv)


@pytest.mark.parametrize("max_tokens", [np.int8(100), np.uint8(98), np.int64(2**63 - 1)])
def test_numbers_of_numpy_do_not_overflow(engine, max_tokens):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    output = engine.generate([5] * 30, params)[0]
    assert (len(output.token_ids), output.finish_reason) == (98, "length")


def test_min_tokens_beyond_all_bounds(engine):
    params = SamplingParams(min_tokens=10**20, max_tokens=10**21)
    output = engine.generate([5] * 120, params)[0]
    assert (len(output.token_ids), output.finish_reason) == (8, "length")


@pytest.mark.parametrize("rows", [0, -1])
def test_score_in_slices_of_nothing(engine, rows):
    with pytest.raises(UserError, match=f"rows is {rows}"):
        engine.score([1, 2, 3], lambda *_: None, rows=rows)


@pytest.mark.parametrize(
    "options",
    [{"kv_cache_bytes": 900 << 40}, {"settings": {"kv.num_blocks": 10**14}}],
)
def test_a_cache_that_no_machine_holds(options):
    with pytest.raises((RunError, UserError), match="memory"):
        Engine(model="random:tiny", device="cpu", max_model_len=128, **options)


def test_a_seed_that_no_generator_takes():
    with pytest.raises(UserError, match="seed"):
        Engine(model="random:tiny", device="cpu", seed=2**65)


def test_fusion_spans_by_commas():
    from plugins.fusion.triton import TritonFusion

    assert TritonFusion.Config(only="add_norm,sample").only == ("add_norm", "sample")


def test_a_subclass_of_fifo_gives_way_by_its_own_key():
    class Newest(Fifo):
        def key(self, seq, clock):
            return -seq.order

    class Of:
        def __init__(self, order):
            self.order = order

    old, mid, new = map(Of, range(3))
    assert Newest().victim([old, new], mid) is old
    assert Newest().victim([new], mid) is None
    assert Fifo().victim([old, new], mid) is new


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("redirect", [">&-", ">/dev/full"])
def test_a_stdout_that_takes_nothing(redirect):
    command = f"{sys.executable} -m core.run --device cpu --max-tokens 2 Hi {redirect}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1)


def test_on_a_cpu_the_garbage_collector_is_left_alone(monkeypatch):
    called = []
    monkeypatch.setattr(gc, "freeze", lambda: called.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: called.append("unfreeze"))
    with Engine(model="random:tiny", device="cpu", max_model_len=32) as made:
        assert made.generate("a", SamplingParams(max_tokens=2))[0].error is None
    assert called == []


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_from_inside_a_step_harms_nobody_else(overlap):
    """By a scheduler, when it is told of a step that has landed."""

    class Aborts(Fifo):
        num_seen = 0

        def observe(self, num_tokens, num_seqs, seconds):
            self.num_seen += 1
            if self.num_seen == 3 and aborts:
                made.abort("1")

    texts = {}
    for aborts in (False, True):
        fields = {"model": "tiny", "device": "cpu", "max_model_len": 64, "max_num_seqs": 2}
        with Engine(**fields, overlap=overlap, sched=Aborts(), kv_cache_bytes=1 << 24) as made:
            for i, prompt in enumerate(("Hello there", "The captain")):
                made.add_request(prompt, SamplingParams(max_tokens=6, ignore_eos=True), str(i))
            events = []
            while made.has_unfinished():
                events += made.step()
        ends = {e.request_id: e.output for e in events if e.output is not None}
        assert ends["1"].finish_reason == ("abort" if aborts else "length")
        assert sum((e.token_ids for e in events if e.request_id == "0"), []) == ends["0"].token_ids
        texts[aborts] = ends["0"].text
    assert texts[True] == texts[False]
