"""evals/speed/span_times.py and places.py: the two lists compute the same, and the loop counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from core.chain import interface
from core.facts import facts_from_config
from core.loading import RANDOM_SHAPES
from core.model import EMBED, FINAL_NORM, LAYER, LM_HEAD
from core.sampler import SAMPLE
from core.seams import Span
from core.testing.interpreter import triton
from core.testing.spans import difference
from core.weights import random_weights
from evals.speed import span_times
from evals.speed.places import Bench
from evals.speed.span_times import AGAIN, PLAIN, SPAN, main, timed

NODES = {node.name: node for node in (EMBED, *LAYER, FINAL_NORM, LM_HEAD, SAMPLE)}
CPU = torch.device("cpu")
SIZES = (1, 3, 12)  # with at most 4 rows, the last is a prompt

# What spans there may be: on both sides of a layer's edge, with products, the cache, the head.
RUNS = {
    "embed attn_norm": 1,
    "attn_norm qkv_proj": 2,
    "qkv_proj qk_norm rope kv_write": 2,
    "rope kv_write attention o_proj": 2,
    "o_proj attn_add": 2,
    "mlp_norm gate_up act_mul": 2,
    "down mlp_add attn_norm qkv_proj": 1,
    "mlp_add final_norm": 1,
    "final_norm lm_head": 1,
    "lm_head": 1,
    "sample": 1,
}


def made_span(text, spoil=0.0, offered=True):
    """A span that runs its nodes one by one and adds `spoil` to what they leave."""
    nodes = tuple(text.split())

    def run(sites, batch, *values):
        reads, _ = interface([NODES[name] for name in nodes], [])
        live = dict(zip(reads, values, strict=True))
        for name, site in zip(nodes, sites, strict=True):
            node = NODES[name]
            out = node.run(site, batch, *[live[read] for read in node.reads])
            live.update(zip(node.writes, out, strict=True))
        return tuple(live[name] + spoil if spoil else live[name] for name in writes(nodes))

    return Span("made", nodes, run, lambda num_tokens, facts, sink: offered)


def writes(nodes):
    """What is live behind each of the runs above."""
    last = {
        "attn_norm": ("residual", "hidden") if nodes[0] == "embed" else ("hidden",),
        "qkv_proj": ("residual", "qkv") if "mlp_add" in nodes else ("qkv",),
        "kv_write": ("q",),
        "o_proj": ("hidden",),
        "attn_add": ("residual",),
        "act_mul": ("act",),
        "down": ("hidden",),
        "final_norm": ("hidden",),
        "lm_head": ("logits",),
        "sample": ("sampled",),
    }
    return last[nodes[-1]]


@pytest.fixture(scope="module")
def bench():
    facts = facts_from_config(RANDOM_SHAPES["random:tiny"], torch.float32)
    weights = random_weights(facts, "cpu", 0)
    return Bench(facts, weights, CPU, SIZES, context=20, max_rows=4)


def arguments(**fields):
    given = {"samples": 3, "replays": 2, "device": "cpu", "tolerance": 1e-4, "bandwidth": 1.0}
    return SimpleNamespace(**given | fields)


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("text", RUNS)
@torch.inference_mode()
def test_both_lists_compute_the_same(bench, text, num_tokens):
    with bench.step(num_tokens) as batch:
        case = bench.case(made_span(text), batch)
        assert len(case.places) == RUNS[text]
        assert case.deviations(1e-4) == []
        pairs = zip(case.copy().plain(), case.copy().fused(), strict=True)
        for plain, fused in pairs:
            assert plain.keys() == fused.keys() == set(writes(tuple(text.split())))
            for name, want in plain.items():
                assert want.isfinite().all()
                assert difference(fused[name], want, 1e-5) == ""


@torch.inference_mode()
def test_each_place_reads_its_own_weights(bench):
    with bench.step(3) as batch:
        first, second = bench.case(made_span("o_proj attn_add"), batch).plain()
        assert not torch.allclose(first["residual"], second["residual"])


@torch.inference_mode()
def test_values_are_those_of_the_chain_with_their_strides(bench):
    with bench.step(12) as batch:
        case = bench.case(made_span("rope kv_write attention o_proj"), batch)
        copy = case.copy()
        assert case.values.keys() == {"q", "k", "v"}
        assert not case.values["v"].is_contiguous(), "a view of qkv"
        for name, value in case.values.items():
            assert len(value) == 12
            assert copy.values[name].stride() == value.stride()
            assert copy.values[name].equal(value)
            assert copy.values[name].data_ptr() != value.data_ptr()


@torch.inference_mode()
def test_a_span_with_one_place_runs_as_often_as_there_are_layers(bench):
    with bench.step(3) as batch:
        case = bench.case(made_span("mlp_add final_norm"), batch)
        assert len(case.places) == 1
        assert len(list(case.repeated(2).fused())) == 2
        assert len(bench.case(made_span("act_mul"), batch).repeated(2).places) == 2


@torch.inference_mode()
def test_least_bytes_are_weights_and_what_is_read_and_written(bench):
    # random:tiny: hidden 64, inner 128, 4 query heads of 32 on 2, 320 tokens of vocabulary.
    with bench.step(3) as batch:
        found = {
            text: bench.case(made_span(text), batch).least_bytes()
            for text in ("o_proj attn_add", "mlp_norm gate_up act_mul", "lm_head", "sample")
        }
        write = bench.case(made_span("qkv_proj qk_norm rope kv_write"), batch).least_bytes()
        reads_cache = bench.case(made_span("rope kv_write attention o_proj"), batch)
        assert reads_cache.least_bytes() is None
    assert found["o_proj attn_add"] == 4 * (64 * 128 + 3 * (128 + 64 + 64))
    assert found["mlp_norm gate_up act_mul"] == 4 * (64 + 256 * 64 + 3 * (64 + 128))
    assert found["lm_head"] == 4 * (320 * 64 + 3 * (64 + 320))
    assert found["sample"] == 4 * 3 * (320 + 1)
    # One position, a row of cos and one of sin; keys and values of 2 heads.
    own = 256 * 64 + 32 + 32 + 16 + 16
    assert write == 4 * (own + 3 * (64 + 128 + 2 * 64))


@torch.inference_mode()
def test_the_head_of_a_prompt_reads_one_row(bench):
    with bench.step(12) as batch:
        assert bench.case(made_span("lm_head"), batch).least_bytes() == 4 * (320 * 64 + 64 + 320)


def test_the_loop_counts_what_it_says(monkeypatch):
    now, log = [0.0], []
    monkeypatch.setattr(span_times.time, "perf_counter", lambda: now[0])

    def runs(name, seconds):
        def run():
            log.append(name)
            now[0] += seconds

        return run

    found = timed({"a": runs("a", 1.0), "b": runs("b", 0.25)}, arguments(samples=4, replays=3))
    assert found == {"a": [1.0] * 4, "b": [0.25] * 4}
    # A round to warm up, then four; in each, one run in front of the three that count.
    assert log == [*"aaaabbbb", *"bbbbaaaa", *"aaaabbbb", *"bbbbaaaa", *"aaaabbbb"]


@torch.inference_mode()
def test_figures_are_microseconds_a_place(bench, monkeypatch):
    seconds = {PLAIN: [4e-6, 8e-6, 6e-6], AGAIN: [4e-6, 8e-6, 6e-6], SPAN: [2e-6, 2e-6, 8e-6]}
    monkeypatch.setattr(span_times, "timed", lambda runs, args: seconds)
    with bench.step(3) as batch:
        case = bench.case(made_span("act_mul"), batch)
        row = span_times.time_case(case, 2, arguments(bandwidth=2.0))
    assert row["num_places"] == 2
    assert row["p50_us"] == {PLAIN: 3.0, AGAIN: 3.0, SPAN: 1.0}
    assert row["min_us"][SPAN] == 1.0
    assert row["ratio"] == pytest.approx(1 / 3) and row["verdict"] == "faster"
    assert row["floor_us"] == pytest.approx(case.least_bytes() / 2e12 * 1e6)


@torch.inference_mode()
def test_a_span_may_write_what_it_reads(bench):
    """Over and over, on values that no other list has."""

    def run(sites, batch, residual, hidden):
        return (residual.add_(hidden),)

    span = Span("add", ("attn_add",), run, lambda *_: True)
    with bench.step(3) as batch:
        case = bench.case(span, batch)
        before = {name: value.clone() for name, value in case.values.items()}
        assert span_times.time_case(case, 2, arguments())["status"] == "timed"
        assert all(case.values[name].equal(value) for name, value in before.items())


@torch.inference_mode()
def test_a_span_that_deviates_is_not_timed(bench):
    with bench.step(3) as batch:
        row = span_times.time_case(bench.case(made_span("down", 0.1), batch), 2, arguments())
    assert row.keys() == {"status"}
    assert "span 'made' (down) of layer 0: hidden is off by" in row["status"]


@torch.inference_mode()
def test_what_is_not_offered_or_has_no_place_is_said(bench):
    with bench.step(3) as batch:
        look = (bench, made_span("down", offered=False), batch, 2, arguments(), True)
        assert span_times._look(*look)["status"] == "not offered"
        look = (bench, made_span("down down"), batch, 2, arguments(), True)
        assert span_times._look(*look)["status"] == "no place in the decoder"


SMALL = "--model random:tiny --device cpu --max-rows 4 --context 20 --samples 2 --replays 1"


def test_a_run_times_every_span_at_every_size(tmp_path, capsys):
    argv = f"{SMALL} --fusion onednn --tokens 1 8 --json {tmp_path}/x.json"
    assert main(argv.split()) == 0
    assert "onednn: gate_up" in capsys.readouterr().out
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    names = ["down", "gate_up", "lm_head", "o_proj", "qkv_proj"]
    found = sorted((row["span"], row["tokens"]) for row in rows)
    assert found == [(name, n) for name in names for n in (1, 8)]
    for row in rows:
        assert row["status"] == "timed" and row["num_places"] == 2
        assert {len(times) for times in row["samples_us"].values()} == {2}
        assert min(row["min_us"].values()) > 0


@pytest.mark.skipif(triton is None, reason="triton is not on this system")
def test_kernels_are_timed_where_they_are_right(tmp_path):
    """In Triton's interpreter, whose times say nothing."""
    argv = f"{SMALL} --fusion triton --tokens 1 5 --json {tmp_path}/x.json --samples 1"
    done = subprocess.run(
        [sys.executable, "-m", "evals.speed.span_times", *argv.split()],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    names = {row["span"] for row in rows}
    assert {"add_norm", "embed_norm", "qk_rope_write", "act_mul", "sample"} <= names
    assert {row["status"] for row in rows} <= {"timed", "not offered"}


def test_a_step_beyond_the_model_is_a_sentence(capsys):
    assert main(f"{SMALL} --fusion onednn --tokens 5000".split()) == 2
    assert "5000 tokens was asked for and the model has 4096" in capsys.readouterr().err
    assert main(f"{SMALL} --fusion triton --tokens 1".split()) == 2
    assert "fusion 'triton' runs its kernels on CUDA" in capsys.readouterr().err


@pytest.mark.gpu
@torch.inference_mode()
def test_on_cuda_a_list_is_a_graph_that_runs_all_places():
    facts = facts_from_config(RANDOM_SHAPES["random:tiny"], torch.float32)
    device = torch.device("cuda")
    bench = Bench(facts, random_weights(facts, device, 0), device, SIZES, context=20, max_rows=4)

    def run(sites, batch, residual, hidden):
        return (residual.add_(1.0),)

    with bench.step(3) as batch:
        case = bench.case(Span("count", ("attn_add",), run, lambda *_: True), batch).copy()
        case.values["residual"].zero_()
        replay = span_times.runner(case.fused, "cuda")
        for num_runs in (1, 2, 3):  # the eager one first
            torch.cuda.synchronize()
            assert case.values["residual"].eq(2.0 * num_runs).all(), "a run is both layers"
            replay()


@pytest.mark.gpu
def test_on_cuda_kernels_are_right_and_timed(tmp_path):
    argv = SMALL.replace("--device cpu", "--device cuda")
    argv += f" --fusion triton --tokens 1 4 40 --json {tmp_path}/x.json"
    assert main(argv.split()) == 0
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert {row["status"] for row in rows} <= {"timed", "not offered"}
    assert all(min(row["min_us"].values()) > 0 for row in rows if row["status"] == "timed")
