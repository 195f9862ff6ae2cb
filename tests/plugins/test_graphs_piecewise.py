"""`piecewise` through the conformance suite, and its replays on a CPU, where a "graph" is the
function that would be captured."""

from __future__ import annotations

import numpy as np
import pytest

from core import Engine, SamplingParams
from core.batch import Limits
from core.errors import UserError
from core.model import FINAL_NORM, LAYER
from core.testing.graphs import GraphSuite
from core.testing.graphs_gpu import GraphGpuSuite, Watch
from core.testing.reruns import RerunPool
from core.testing.tiny import save_tiny
from plugins.graphs.ladder import rungs
from plugins.graphs.piecewise import PiecewiseGraphs
from plugins.kv.paged import Paged


class TestPiecewise(GraphSuite):
    plugin = "piecewise"


class TestPiecewiseShort(GraphSuite):
    """A step longer than the longest graph runs eagerly."""

    plugin = "piecewise"
    config = {"max_tokens": 70, "fine_tokens": 7, "fine": 3}


class TestPiecewiseOnGpu(GraphGpuSuite):
    plugin = "piecewise"


class WithoutCuda(PiecewiseGraphs):
    """Off CUDA the core refuses who captures, so this one does not say that it does."""

    captures = False


@pytest.fixture(autouse=True)
def _reruns(monkeypatch):
    monkeypatch.setattr("core.executor.GraphPool", RerunPool)


def engine(**options):
    defaults = {
        "model": "random:tiny",
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 160,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 48,
        "kv_cache_bytes": 1 << 24,
    }
    return Engine(**{**defaults, **options})


def rerun(graphs, **options):
    made = engine(graphs=graphs, **options)
    made._executor.capture(lambda *_: None)
    return made


def test_replay_equals_eager_bit_for_bit_at_every_rung():
    """The clause of the GPU half."""

    class Rerun(GraphGpuSuite):
        def make(self):
            return WithoutCuda(WithoutCuda.Config(fine=16, fine_tokens=48))

        def engine(self, **options):
            made = super().engine(device="cpu", dtype="float32", **options)
            made._executor.capture(lambda *_: None)
            return made

    Rerun().test_replay_equals_eager_bit_for_bit()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Weights that keep greedy text moving."""
    return str(save_tiny("qwen3", tmp_path_factory.mktemp("tiny") / "qwen3"))


def prompts(*lengths, seed=3):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 250, n).tolist() for n in lengths]


# Lone tokens, prompts of a step, prompts in chunks of which all but the last sample no row.
LENGTHS = (15, 1, 2, 16, 17, 40, 48, 49, 100, 130)


def params(i=0, **given):
    return SamplingParams(max_tokens=12, ignore_eos=True, seed=i, **given)


def mix(made, lengths=LENGTHS):
    """Token ids of prompts that come while others run: decode, mixed, chunked and fresh steps."""
    for i, prompt in enumerate(prompts(*lengths)):
        made.add_request(prompt, params(i, temperature=float(i % 2)), str(i))
        made.step()
    found = {}
    while made.has_unfinished():
        found |= {e.request_id: e.output for e in made.step() if e.output}
    assert [o.error for o in found.values() if o.error] == []
    return [found[str(i)].token_ids for i in range(len(lengths))]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fusion", ["none", "onednn"])
@pytest.mark.parametrize("kv", ["contiguous", "paged", "paged_int8"])
def test_tokens_are_those_of_eager_steps(checkpoint, kv, fusion, overlap):
    parts = {"model": checkpoint, "kv": kv, "fusion": fusion, "overlap": overlap}
    with engine(graphs="none", **parts) as made:
        wanted = mix(made)
    with rerun(WithoutCuda(), **parts) as made:
        watch = Watch(made)
        assert mix(made) == wanted
        counters = made.counters
    assert watch.differing == []
    assert {shape.fresh for shape in watch.replayed} == {True, False}
    assert (counters.num_eager_steps, counters.num_eager_samplers) == (0, 0)
    assert counters.num_graph_steps == counters.num_steps > 0


def test_prefix_hits_change_no_token(checkpoint):
    """A prompt that goes on behind a shared prefix is not fresh, whatever its length."""
    (prompt,) = prompts(100)
    with engine(model=checkpoint, graphs="none") as made:
        (wanted,) = made.generate([prompt], params())
    with rerun(WithoutCuda(), model=checkpoint) as made:
        first, again = (made.generate([prompt], params())[0] for _ in range(2))
    assert first.token_ids == again.token_ids == wanted.token_ids
    assert again.metrics.num_cached_tokens == 96


def test_what_is_longer_than_the_ladder_runs_eagerly(checkpoint):
    with engine(model=checkpoint, graphs="none") as made:
        wanted = mix(made)
    with rerun(WithoutCuda(WithoutCuda.Config(max_tokens=16)), model=checkpoint) as made:
        assert mix(made) == wanted
        assert made.counters.num_eager_steps > 0 and made.counters.num_graph_steps > 0


NODES = [node.name for node in (*LAYER, FINAL_NORM)]


@pytest.mark.parametrize("names", [*([name] for name in NODES), ["embed"], [], NODES], ids=str)
def test_any_node_may_be_cut_out(checkpoint, names):
    class Cut(WithoutCuda):
        def cut(self):
            return names

    with rerun(Cut(), model=checkpoint, fusion="onednn") as made:
        watch = Watch(made)
        mix(made, (3, 40, 60))
    assert watch.differing == [] and {shape.fresh for shape in watch.replayed} == {True, False}


def test_what_depends_on_rows_is_never_in_a_piece():
    class Cut(WithoutCuda):
        def cut(self):
            return ["down"]

    with engine(graphs=Cut()) as made:
        assert made._executor._eager == {"begin_step", "attention", "lm_head", "down"}
    with engine(graphs="none") as made:
        assert made._executor._eager == frozenset()


def test_a_name_of_no_node_is_refused():
    class Misspelt(WithoutCuda):
        def cut(self):
            return ("attention", "attn_nrom")

    with pytest.raises(UserError, match="cut out 'attn_nrom', no node of the decoder; did you"):
        engine(graphs=Misspelt())


class Recorder(Paged):
    """Notes what `write` and `attend` of the first layer are told of a step."""

    def __init__(self, config):
        super().__init__(config)
        self.written, self.attended = [], []

    def write(self, layer, k, v, batch):
        if layer == 0:
            self.written.append(batch.shape)
        super().write(layer, k, v, batch)

    def attend(self, layer, q, batch):
        if layer == 0:
            host = batch.host
            lens = np.diff(host.query_start)
            self.attended.append((batch.shape, host.num_tokens, lens, host.seq_lens.copy()))
        return super().attend(layer, q, batch)


def test_attention_sees_the_step_itself_and_a_graph_its_tokens(checkpoint):
    kv = Recorder(Recorder.Config())
    with rerun(WithoutCuda(), model=checkpoint, kv=kv) as made:
        kv.written, kv.attended = [], []
        mix(made)
        num_steps = made.counters.num_steps
    assert len(kv.written) == len(kv.attended) == num_steps
    fewer = 0
    for captured, (shape, num_tokens, lens, kv_lens) in zip(kv.written, kv.attended, strict=True):
        # The scratch of a fresh prompt is written if and only if attention reads it.
        assert (captured.num_tokens, captured.fresh) == (shape.num_tokens, shape.fresh)
        assert shape.max_query == lens.max() and shape.max_kv == kv_lens.max()
        assert shape.num_tokens >= num_tokens and shape.num_seqs >= len(lens)
        assert shape.num_seqs in (1, 2, 4, 6) and shape.num_seqs < 2 * len(lens)
        assert shape.fresh == (len(lens) == 1 and 1 < lens[0] == kv_lens[0])
        assert shape.decode_only == (lens == 1).all()
        fewer += shape.num_seqs < captured.num_seqs
    assert fewer > 0


def test_the_ladder_is_fine_where_steps_are_of_decodes():
    strategy = PiecewiseGraphs()
    shapes = strategy.shapes(Limits(2048, 64, 1024))
    tokens = [shape.num_tokens for shape in shapes if not shape.fresh]
    assert tokens == sorted({*rungs(64, 8), *rungs(1024, 32)})
    assert strategy.cut() == ("attention",)
    for rows in range(1, 65):
        decode = strategy.select(rows, rows, 1, 2048, None)
        assert decode.num_tokens < rows + 8
        assert decode == strategy.select(rows, 1, rows, 2048, None)  # a chunk of as many tokens
