"""`piecewise` over the CUDA route and the spans of `triton`, without a GPU: kernels in Triton's
interpreter, in a process of its own, and as "graphs" the functions that would be captured.

What a plain CPU run cannot show: whether a piece writes the scratch of a fresh prompt when
attention reads it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed here")

from core import Engine, SamplingParams  # noqa: E402
from core.testing.graphs_gpu import Watch  # noqa: E402
from core.testing.interpreter import (  # noqa: E402
    HERE,
    INTERPRETING,
    needs_loops,
    run_in_the_interpreter,
)
from core.testing.reruns import RerunPool  # noqa: E402
from plugins.graphs.none import NoGraphs  # noqa: E402
from plugins.graphs.piecewise import PiecewiseGraphs  # noqa: E402
from plugins.kv.paged import Paged  # noqa: E402
from plugins.kv.paged_int8 import PagedInt8  # noqa: E402


@pytest.mark.skipif(INTERPRETING, reason=HERE)
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)


class Piecewise(PiecewiseGraphs):
    """Off CUDA the core refuses who captures, so this one does not say that it does."""

    captures = False


def _route(offer):
    """`offer` on the CPU, by the route that it has on CUDA. Its scratch is gone with each step."""

    class Interpreted(offer):
        def bind(self, facts, limits, kv_cache_bytes, device):
            from plugins.kv.cuda_path import CudaPath
            from plugins.kv.int8_cuda_path import Int8CudaPath

            super().bind(facts, limits, kv_cache_bytes, device)
            s, shape = self.storage, (limits.max_num_batched_tokens, facts.num_kv_heads)
            s.fresh = torch.zeros(*shape, facts.head_dim), torch.zeros(*shape, facts.head_dim)
            if offer is PagedInt8:
                s.v = s.v.transpose(-1, -2).contiguous().transpose(-1, -2)
            self.path = (Int8CudaPath if offer is PagedInt8 else CudaPath)(facts, s)

        def begin_step(self, batch):
            for scratch in self.storage.fresh:
                scratch.fill_(torch.nan)
            super().begin_step(batch)

    return Interpreted


@pytest.mark.skipif(not INTERPRETING, reason="runs in the interpreter's process")
@needs_loops
@pytest.mark.parametrize("offer", [Paged, PagedInt8], ids=lambda offer: offer.__name__)
def test_steps_of_every_kind_are_those_of_eager_ones(monkeypatch, offer):
    """A fresh prompt, decodes, a prefix hit beside a chunk, a decode beside one, a longer hit."""
    from plugins.kv.kernels import decode, decode_int8

    for module in (decode, decode_int8):  # not the dozens that would fill a GPU
        monkeypatch.setattr(module, "choose_num_splits", lambda *_, **__: 2)
    monkeypatch.setattr("core.executor.GraphPool", RerunPool)
    options = {
        "model": "random:tiny",
        "device": "cpu",
        "dtype": "float32",
        "fusion": "triton",
        "kv": _route(offer),
        "settings": {"kv.block_size": 4},
        "max_model_len": 24,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 8,
        "kv_cache_bytes": 1 << 20,
    }
    rng = np.random.default_rng(5)
    first, second = (rng.integers(3, 250, n).tolist() for n in (5, 11))
    found = []
    for graphs in (NoGraphs(), Piecewise(Piecewise.Config(fine_tokens=8))):
        with Engine(**options, graphs=graphs) as engine:
            if isinstance(graphs, Piecewise):
                engine._executor.capture(lambda *_: None)
                watch = Watch(engine)
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            batches = [first], [first, second], [second]
            outputs = [o for batch in batches for o in engine.generate(batch, params)]
            found.append([output.token_ids for output in outputs])
            assert [output.error for output in outputs] == [None] * 4
            assert outputs[-1].metrics.num_cached_tokens == 8
    assert found[0] == found[1] and watch.differing == []
    assert {shape.fresh for shape in watch.replayed} == {True, False}
