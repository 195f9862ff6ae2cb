"""`fusion.verify`: right spans pass and are counted, a wrong one is named in its place, and fuel
isolates it. The planted ones come from a third party, as a file given by -p."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core import Engine, SamplingParams, run as cli
from core.batch import Limits
from core.chain import Decoder
from core.config import RunConfig
from core.errors import RunError, UserError
from core.facts import facts_from_config
from core.loading import RANDOM_SHAPES
from core.memory import _activation_bytes
from core.model import EMBED, FINAL_NORM, LAYER, LM_HEAD, VALUES
from core.plan import resolve
from core.registry import Registry
from core.rope import rope_tables
from core.sampler import SAMPLE
from core.seams import Span
from core.testing.interpreter import HERE, INTERPRETING, run_in_the_interpreter
from core.weights import random_weights
from plugins.fusion.options import SpanOptions
from plugins.fusion.triton import NAMES
from plugins.kv.paged import Paged
from plugins.kv.paged_int8 import PagedInt8

ROOT = Path(__file__).parents[2]
PLANTED = '''
"""A norm whose sum of squares is kept in bfloat16, in layer 1 only: alone, and among Triton's."""

import torch

from core import hookimpl
from core.seams import Span
from plugins.fusion.options import SpanOptions
from plugins.fusion.triton import NAMES, TritonFusion


def half_norm(sites, batch, residual):
    (site,) = sites
    squares = residual.float().square()
    total = squares.sum(-1)
    if site.layer == 1:
        half = squares.to(torch.bfloat16)
        total = half[:, 0]
        for column in half[:, 1:].unbind(-1):
            total = total + column
    scale = torch.rsqrt(total.float() / residual.shape[1] + site.facts.rms_norm_eps)
    return (site.weights.mlp_norm * (residual.float() * scale[:, None]).to(residual.dtype),)


SPAN = Span("half_norm", ("mlp_norm",), half_norm, lambda *_: True, priority=3)


class HalfNorm:
    api, lossless = 1, True

    class Config(SpanOptions):
        names = ("half_norm",)

    def __init__(self, config=None):
        self.config = config or self.Config()

    def spans(self, facts, device):
        return self.config.chosen([SPAN])


class HalfNormAndTriton(TritonFusion):
    class Config(SpanOptions):
        names = (*NAMES, "half_norm")

    def spans(self, facts, device):
        return (*super().spans(facts, device), *self.config.chosen([SPAN]))


@hookimpl
def outweigh_register_fusion(register):
    register("half_norm", HalfNorm)
    register("half_norm_and_triton", HalfNormAndTriton)
'''
PROMPTS = [[7] * 3, [11, 40, 5] * 9]
NEW_TOKENS = 2 if INTERPRETING else 4
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
HOT = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=1.0)
REAL_GPU = [pytest.param("cuda", "bfloat16", marks=pytest.mark.gpu)]
# Triton's kernels run in the interpreter here; its bfloat16 is wrong.
PLACES = [("cpu", "float16")] if INTERPRETING else REAL_GPU
MODEL = "random:tiny" if INTERPRETING else "tiny"


@pytest.fixture
def planted(tmp_path):
    path = tmp_path / "planted.py"
    path.write_text(PLANTED)
    return str(path)


def engine(model="random:tiny", settings=None, **given):
    """Of random:tiny in float32 on a CPU, with `verify` unless `settings` say otherwise."""
    fields = {"model": model, "device": "cpu", "dtype": "float32", "graphs": "none"}
    fields |= {"max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 16}
    fields |= {"kv_cache_bytes": 1 << 22, **given}
    if isinstance(fields["fusion"], str):
        fields["settings"] = {"fusion.verify": True, **(settings or {})}
    return Engine(**fields)


def run(made, params=(GREEDY, HOT)):
    """Tokens and errors of both prompts."""
    outputs = made.generate(PROMPTS, list(params))
    return [o.token_ids for o in outputs], [o.error for o in outputs]


def counts(made):
    return made.report()["counters"]["verified_spans"]


# ---------------------------------------------------------------------------- what is right passes

# inductor compiles for half a minute each time.
SHIPPED = [("inductor", "bfloat16", "paged"), ("inductor", "float32", "contiguous")]
SHIPPED += [
    ("triton", dtype, kv)
    for dtype in ("bfloat16", "float16", "float32")
    for kv in ("paged", "paged_int8", "contiguous")
]
ONEDNN = ("qkv_proj", "o_proj", "gate_up", "down", "lm_head")


@pytest.mark.skipif(INTERPRETING, reason=HERE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv", ["paged", "paged_int8", "contiguous"])
def test_right_spans_are_counted_and_change_nothing(kv, dtype):
    given = {"fusion": "onednn", "kv": kv, "dtype": dtype}
    with engine(**given) as watched, engine(settings={"fusion.verify": False}, **given) as free:
        if dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            pytest.skip("this CPU does not multiply in bfloat16")
        tokens, errors = run(watched)
        assert (tokens, errors) == run(free) and errors == [None, None]
        assert set(counts(watched)) == set(ONEDNN)
        num_steps = watched.counters.num_steps
        for name, of_span in counts(watched).items():
            places = 1 if name == "lm_head" else 2
            assert of_span["num_places"] == places and of_span["num_deviating"] == 0
            assert of_span["num_right"] <= places * num_steps
        assert counts(watched)["down"]["num_right"] == 2 * num_steps
        assert "verified_spans" not in free.report()["counters"]


if INTERPRETING:

    @pytest.mark.parametrize(
        ("kv", "dtype"),
        [("paged", "float16"), ("paged_int8", "float16"), ("contiguous", "float32")],
    )
    def test_the_kernels_are_right(kv, dtype):
        """In a step of 30 tokens, then of two rows, and of one."""
        with engine(fusion="triton", kv=kv, dtype=dtype, max_num_batched_tokens=32) as made:
            assert run(made)[1] == [None, None]
            assert made.generate(PROMPTS[:1], GREEDY)[0].error is None
            assert all(c["num_right"] and not c["num_deviating"] for c in counts(made).values())
            absent = {"last_layer"} | ({"qk_rope_write"} if kv == "paged_int8" else set())
            if dtype == "float32":
                absent |= {"linear", "linear_act", "linear_add", "linear_add_norm"}
                absent |= {"norm_linear", "norm"}
            else:
                absent |= {"act_mul"}  # of more rows than one tile has
            assert set(counts(made)) == set(NAMES) - absent

    def on_the_route_of_cuda(offer):
        """A cache on the CPU whose attention to a lone prompt reads the step's own scratch."""

        class Routed(offer):
            def bind(self, facts, limits, kv_cache_bytes, device):
                from plugins.kv.cuda_path import CudaPath
                from plugins.kv.int8_cuda_path import Int8CudaPath

                super().bind(facts, limits, kv_cache_bytes, device)
                shape = limits.max_num_batched_tokens, facts.num_kv_heads, facts.head_dim
                scratch = torch.zeros(2, *shape, dtype=facts.dtype)
                self.storage.fresh = scratch[0], scratch[1]
                path = CudaPath
                if offer is PagedInt8:
                    path, v = Int8CudaPath, self.storage.v.transpose(-1, -2).contiguous()
                    self.storage.v = v.transpose(-1, -2)
                    self.storage.k_shift.uniform_(-0.5, 0.5)
                self.path = path(facts, self.storage)

        return Routed(offer.Config())

    @pytest.mark.parametrize("forgets", [False, True])
    @pytest.mark.parametrize("offer", [Paged, PagedInt8])
    def test_the_scratch_of_a_lone_prompt_is_compared(offer, forgets, monkeypatch):
        from plugins.fusion.kernels import runs

        names = ("_qk_rope_write", "_qk_rope_write_int8")
        for name, position in zip(names, (7, 6), strict=True):
            write = getattr(runs, name)

            def forgetful(*given, write=write, position=position, **rest):
                given = [*given]
                if forgets:
                    given[position] = None
                return write(*given, **rest)

            monkeypatch.setattr(runs, name, forgetful)
        params = replace(GREEDY, max_tokens=1)
        given = {"kv": on_the_route_of_cuda(offer), "fusion": "triton", "dtype": "float16"}
        settings = {"fusion.only": ["qk_rope_write"]}
        with engine(settings=settings, max_num_batched_tokens=32, **given) as made:
            (output,) = made.generate([PROMPTS[1]], params)
            assert set(counts(made)) == {"qk_rope_write"}
        if not forgets:
            assert output.error is None
        else:
            assert "leaves fresh keys of layer 0 with a relative error of" in output.error

else:

    def test_in_the_interpreter():
        pytest.importorskip("triton", reason="needs triton, which is not installed here")
        run_in_the_interpreter(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize(("fusion", "dtype", "kv"), SHIPPED)
def test_shipped_sets_are_right_on_a_gpu(fusion, dtype, kv):
    given = {"device": "cuda", "fusion": fusion, "dtype": dtype, "kv": kv}
    with engine("tiny", max_num_batched_tokens=256, **given) as made:
        assert run(made)[1] == [None, None]
        assert all(c["num_right"] and not c["num_deviating"] for c in counts(made).values())
        assert {"embed_norm", "add_norm"} < set(counts(made))
        has_products = fusion == "triton" and dtype != "float32"
        products = {"linear", "linear_act", "linear_add_norm"} if has_products else {"act_mul"}
        assert products < set(counts(made))


@pytest.mark.skipif(INTERPRETING, reason=HERE)
def test_the_dry_pass_of_a_largest_step_is_not_compared(monkeypatch):
    """It runs over zeros and a cache that stores nothing, to see what memory a step takes."""
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    facts = facts_from_config(RANDOM_SHAPES["random:tiny"], torch.bfloat16)
    rope = rope_tables(facts, 64, torch.device("cpu"))
    decoder = Decoder(facts, random_weights(facts, "cpu", 0), rope, torch.device("cpu"))
    fusion = OneSpan("qk_norm rope kv_write attention", lambda s, b, live, x: (live["ctx"] * 2,))
    spans = fusion.spans(facts, decoder.device)
    assert _activation_bytes(decoder, spans, Limits(64, 3, 16)) == 0
    assert fusion.config.verification.counts == {}


@pytest.mark.gpu
def test_the_cache_is_sized_with_verify_on_a_gpu():
    """The dry pass runs watched spans over a cache that stores nothing."""
    given = {"kv_cache_bytes": None, "gpu_memory_utilization": 0.3}
    with engine("tiny", device="cuda", dtype="bfloat16", fusion="triton", **given) as made:
        assert run(made)[1] == [None, None]


# ------------------------------------------------------------- a planted one, and its place


def first_that_deviates(planted, fusion, **given):
    """Of the fuels, by bisection: the least with which anything is other than without fuel."""

    def scores(fuel):
        settings = {"fusion.verify": False, "fusion.fuel": fuel}
        with engine("tiny", settings, fusion=fusion, plugins=(planted,), **given) as made:
            return torch.cat(made.score(PROMPTS[1], lambda _, logits, __: logits.clone()))

    plain, low, high = scores(0), 0, 64
    noise = 0.2 * (scores(high) - plain).abs().max()
    while high - low > 1:
        middle = (low + high) // 2
        wrong = (scores(middle) - plain).abs().max() > noise
        low, high = (low, middle) if wrong else (middle, high)
    return high


def advised(error):
    return int(re.search(r"--set fusion\.fuel=(\d+) leaves it out", error)[1])


@pytest.mark.skipif(INTERPRETING, reason=HERE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fuel_isolates_the_planted_span(planted, dtype):
    given = {"fusion": "half_norm", "plugins": (planted,), "dtype": dtype}
    with engine("tiny", **given) as made:
        error, _ = run(made)[1]
    assert "span 'half_norm' (mlp_norm) of layer 1, in a step of 16 tokens, leaves hidden" in error
    num_right = advised(error)
    assert num_right == 1  # layer 0
    assert first_that_deviates(planted, "half_norm", dtype=dtype) == num_right + 1
    for fuel in (num_right, num_right + 1):
        with engine("tiny", {"fusion.fuel": fuel}, **given) as made:
            errors = run(made)[1]
        assert errors == [None] * 2 if fuel == num_right else errors[0] == error


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_among_the_kernels_too(planted, device, dtype):
    pytest.importorskip("triton", reason="needs triton, which is not installed here")
    fusion = "half_norm_and_triton"
    given = {"device": device, "dtype": dtype, "plugins": (planted,), "fusion": fusion}
    given["max_num_batched_tokens"] = 32  # a step for all of both prompts
    only = {"fusion.only": "embed_norm,qk_rope_write,half_norm,act_mul,add_norm"}
    with engine(MODEL, only, **given) as made:
        error, _ = run(made)[1]
        right = {name: c["num_right"] for name, c in counts(made).items()}
    assert "span 'half_norm' (mlp_norm) of layer 1" in error and "leaves hidden" in error
    # embed_norm · qk_rope_write · half_norm · act_mul · add_norm · qk_rope_write
    wanted = {"embed_norm": 1, "qk_rope_write": 2, "half_norm": 1, "act_mul": 1, "add_norm": 1}
    assert {name: right[name] // right["embed_norm"] for name in wanted} == wanted
    num_right = advised(error)
    assert num_right == 6
    for fuel in (num_right, num_right + 1):
        with engine(MODEL, {**only, "fusion.fuel": fuel}, **given) as made:
            failed = [e for e in run(made)[1] if e]
        assert bool(failed) == (fuel > num_right)


@pytest.mark.gpu
def test_fuel_isolates_it_among_the_kernels_on_a_gpu(planted):
    given = {"device": "cuda", "dtype": "float32"}  # rounding elsewhere would blur the bisection
    assert first_that_deviates(planted, "half_norm_and_triton", **given) == 7


def words(planted, *options):
    """The arguments of a run of `tiny` with the planted span, watched."""
    given = ["-p", planted, "--device", "cpu", "--max-tokens", "3", "--fusion", "half_norm"]
    return [*given, "--set", "fusion.verify=true", *options, "The old lighthouse"]


@pytest.mark.skipif(INTERPRETING, reason=HERE)
def test_the_command_line_says_it_in_one_sentence(planted):
    argv = [sys.executable, "-m", "core.run", *words(planted, "--dtype", "bfloat16")]
    given = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=given, capture_output=True, text=True, check=False)
    said = done.stderr
    assert done.returncode == 1 and "Traceback" not in said
    (error,) = [line for line in said.splitlines() if line.startswith("outweigh: error:")]
    assert re.search(
        r"fusion\.verify: span 'half_norm' \(mlp_norm\) of layer 1, in a step of \d+ tokens, "
        r"leaves hidden with a relative error of \d\S* over all rows, where that of the plain "
        r"nodes is \d\S* and \d\S* is allowed: "
        r"--set fusion\.fuel=1 leaves it out, and all behind it$",
        error,
    )
    assert "note: fusion.verify compared spans (half_norm) 2 times, at 2 places; 1 deviated" in said


@pytest.mark.skipif(INTERPRETING, reason=HERE)
@pytest.mark.parametrize(
    ("fuel", "note"),
    [
        (1, "note: fusion.verify compared spans (half_norm) 3 times, at 1 places; none deviated"),
        (0, "note: fusion.verify saw no span run"),
    ],
)
def test_a_run_says_what_was_compared(planted, fuel, note, capsys):
    assert cli.main(["run", *words(planted, "--set", f"fusion.fuel={fuel}")]) == 0
    text, said = capsys.readouterr()
    assert text.strip() and note in said


# ---------------------------------------------------------------------------------- other mistakes

NODES = {node.name: node for node in (EMBED, *LAYER, FINAL_NORM, LM_HEAD, SAMPLE)}


def plainly(nodes, sites, batch, *values):
    """What the nodes of a span read and leave, by name."""
    reads, written = set(), set()
    for name in nodes:
        reads |= set(NODES[name].reads) - written
        written |= set(NODES[name].writes)
    live = dict(zip((name for name in VALUES if name in reads), values, strict=True))
    for name, site in zip(nodes, sites, strict=True):
        node = NODES[name]
        made = node.run(site, batch, *[live[read] for read in node.reads])
        live |= zip(node.writes, made, strict=True)
    return live


class OneSpan:
    """A fusion set of the span `nodes`, which `run(sites, batch, live, *values)` computes."""

    api, lossless = 1, True

    class Config(SpanOptions):
        names = ("it",)

    def __init__(self, nodes, run):
        self.config, self.nodes, self.run = self.Config(verify=True), tuple(nodes.split()), run

    def spans(self, facts, device):
        def whole(sites, batch, *values):
            return self.run(sites, batch, plainly(self.nodes, sites, batch, *values), *values)

        return self.config.chosen([Span("it", self.nodes, whole, lambda *_: True)])


def deviation(nodes, wrong, dtype="bfloat16", params=(GREEDY, HOT), **given):
    """The error of the first prompt to have one."""
    with engine(fusion=OneSpan(nodes, wrong), dtype=dtype, **given) as made:
        return next(filter(None, run(made, params)[1]), None)


def spoiled(value, *where):
    value = value.clone()
    value[where] *= 1.1
    return value


def no_store(sites, batch, live, *values):
    """As if nothing had been stored: what was there is there again."""
    sites[-1].kv.write(sites[-1].layer, *(torch.zeros_like(live[n]) for n in "kv"), batch)
    return ()


def one_key(sites, batch, live, *values):
    k, v = spoiled(live["k"], -1, 0, 3), live["v"]
    sites[-1].kv.write(sites[-1].layer, k, v, batch)
    return ()


def bad_value(sites, batch, live, *values):
    sites[-1].kv.write(sites[-1].layer, live["k"], live["v"].flip(0), batch)
    return ()


def half_product(sites, batch, live, act):
    """Partial sums of 8 products, added up in bfloat16."""
    weight = sites[0].weights.down
    parts = zip(act.split(8, 1), weight.split(8, 1), strict=True)
    total = torch.zeros_like(live["hidden"], dtype=torch.bfloat16)
    for a, w in parts:
        total = total + (a @ w.T).to(torch.bfloat16)
    return (total.to(act.dtype),)


def elsewhere(sites, batch, live, hidden):
    return (live["logits"].clone(),)


def tramples(sites, batch, live, residual):
    residual.mul_(3)
    return (live["hidden"],)


def raises(sites, batch, live, *values):
    raise IndexError("there is no such row")


WRONG = {
    "one element of one row": (
        "act_mul", lambda s, b, live, x: (spoiled(live["act"], 2, 5),), "leaves act with"),
    "a sum in half precision": ("down", half_product, "leaves hidden with"),
    "nothing stored": ("kv_write", no_store, "leaves stored keys of layer 0 with"),
    "one stored key": ("kv_write", one_key, "leaves stored keys of layer 0 with"),
    "values in other rows": ("kv_write", bad_value, "leaves stored values of layer 0 with"),
    "too few values": ("qk_norm", lambda s, b, live, x: (live["q"],),
                       r"returns 1 values and not \(q, k, v\)"),
    "no tuple": ("act_mul", lambda s, b, live, x: live["act"], r"returns Tensor and not \(act\)"),
    "another dtype": ("act_mul", lambda s, b, live, x: (live["act"].float(),),
                      "returns act as torch.float32"),
    "a number missing": ("act_mul", lambda s, b, live, x: (live["act"] * torch.nan,),
                         "a relative error of inf"),
    "logits elsewhere": ("lm_head", elsewhere, "leaves its logits outside batch.logits"),
    "the least likely": ("sample", lambda s, b, live, x: (x.argmin(-1).int(),), "samples id"),
    "an id beyond the vocabulary": (
        "sample", lambda s, b, live, x: (live["sampled"] + 320,), "samples id"),
    "attention to other keys": ("attention", lambda s, b, live, q: (live["ctx"].flip(0),),
                                "leaves ctx with"),
    "no tensor": ("act_mul", lambda s, b, live, x: (None,), "returns act as NoneType"),
    "nothing but a shape": ("act_mul", lambda s, b, live, x: (live["act"].to("meta"),),
                            "returns act as .* on meta"),
    "over what others read": ("mlp_norm", tramples, "writes over residual, which is read after it"),
    "an exception": ("o_proj", raises, "raised: IndexError: there is no such row"),
}  # fmt: skip


@pytest.mark.skipif(INTERPRETING, reason=HERE)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_mistake_is_named(wrong):
    nodes, how, message = WRONG[wrong]
    error = deviation(nodes, how)
    assert error is not None and re.search(message, error), error
    assert f"span 'it' ({nodes})" in error
    advice = r"fusion\.fuel=\d+ leaves it out, and all behind it"
    if nodes == "sample":
        advice = "a fusion.only that does not name it leaves it out"
    assert re.search(f"{advice}$", error)


RIGHT = {
    "embed attn_norm": "residual hidden",
    "qkv_proj": "qkv",
    "qk_norm rope": "q k v",
    "qk_norm rope kv_write": "q",
    "kv_write": "",
    "kv_write attention": "ctx",
    "attention": "ctx",
    "gate_up act_mul down mlp_add": "residual",
    "mlp_add attn_norm": "residual hidden",
    "mlp_add final_norm": "hidden",
    "lm_head": "logits",
    "sample": "sampled",
}


@pytest.mark.skipif(INTERPRETING, reason=HERE)
@pytest.mark.parametrize("nodes", RIGHT)
@pytest.mark.parametrize(
    ("kv", "dtype"), [("paged", "float32"), ("paged_int8", "bfloat16"), ("contiguous", "bfloat16")]
)
def test_nodes_in_the_place_of_themselves_are_right(nodes, kv, dtype):
    """Any run of them: over layers, with attention and the cache, back into what they have read."""

    def same(sites, batch, live, *values):
        return tuple(live[name] for name in RIGHT[nodes].split())

    assert deviation(nodes, same, dtype, kv=kv) is None


@pytest.mark.skipif(INTERPRETING, reason=HERE)
def test_ties_may_fall_either_way():
    """Greedily between equal logits, and no further."""

    def last_of_the_best(sites, batch, live, logits):
        return (logits.shape[1] - 1 - logits.flip(1).argmax(-1).int(),)

    def all_equal(sites, batch, live, hidden):
        return (batch.logits.fill_(1.5),)

    class Both(OneSpan):
        def spans(self, facts, device):
            head = Span("head", ("lm_head",), lambda s, b, x: all_equal(s, b, {}, x), when)
            return (head, *super().spans(facts, device))

    def when(*_):
        return True

    with engine(fusion=Both("sample", last_of_the_best), dtype="bfloat16") as made:
        tokens, errors = run(made, (GREEDY, GREEDY))
    assert errors == [None, None] and set(sum(tokens, [])) == {319}
    with engine(fusion=Both("sample", lambda s, b, live, x: (x.argmin(-1).int(),))) as made:
        assert run(made, (GREEDY, GREEDY))[1] == [None, None]  # all are the best


@pytest.mark.skipif(INTERPRETING, reason=HERE)
def test_scoring_raises_it_and_other_requests_go_on():
    def wrong_in_long_steps(sites, batch, live, x):
        return (live["act"] * (1.5 if len(x) > 8 else 1.0),)

    with engine(fusion=OneSpan("act_mul", wrong_in_long_steps)) as made:
        with pytest.raises(RunError, match="in a step of 16 tokens, leaves act"):
            made.score(PROMPTS[1] * 2, lambda *_: None)
        long = made.add_request(PROMPTS[1], GREEDY)
        ended = {}
        while made.has_unfinished():
            ended |= {e.request_id: e.output for e in made.step() if e.output}
        short = made.generate(PROMPTS[0], GREEDY)[0]
    assert "leaves act" in ended[long].error and short.error is None


# ----------------------------------------------------------------------------------- what it needs


@pytest.mark.skipif(INTERPRETING, reason=HERE)
def test_captured_graphs_are_refused():
    given = {"device": "cpu", "fusion": "onednn", "settings": {"fusion.verify": True}}
    refusal = "no captured graph can, and graphs 'decode' captures: choose --graphs none"
    with pytest.raises(UserError, match=refusal):
        resolve(RunConfig.of(graphs="decode", **given), Registry())
    assert resolve(RunConfig.of(graphs="none", **given), Registry()).fusion.config.verify
    given["settings"] = {}
    with pytest.raises(UserError) as caught:
        resolve(RunConfig.of(graphs="decode", **given), Registry())
    assert "fusion.verify" not in str(caught.value)


@pytest.mark.gpu
def test_captured_graphs_are_refused_on_a_gpu():
    """Those that are chosen where nobody chooses, too."""
    with pytest.raises(UserError, match="graphs 'full' captures: choose --graphs none"):
        engine(fusion="triton", device="cuda", graphs="auto")


@pytest.mark.skipif(INTERPRETING, reason=HERE)
def test_engines_of_one_set_count_their_places_apart():
    """Two that run in turn, step by step: the advice is that of each."""

    def wrong_in_layer_1(sites, batch, live, x):
        return (live["act"] * (1 + sites[0].layer),)

    fusion = OneSpan("act_mul", wrong_in_layer_1)
    with engine(fusion=fusion) as one, engine(fusion=fusion) as other:
        for made in (one, other):
            made.add_request(PROMPTS[0], replace(GREEDY, max_tokens=1))
        errors = [event.output.error for made in (one, other) for event in made.step()]
    assert [advised(error) for error in errors] == [1, 1]
