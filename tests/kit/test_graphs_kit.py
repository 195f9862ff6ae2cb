"""What the GPU half of the graphs suite says of replays, and what the core refuses, on a CPU: a
"graph" is the function that would be captured.
"""

from __future__ import annotations

import pytest

from core import Engine, SamplingParams
from core.testing.graphs_gpu import GraphGpuSuite
from core.testing.reruns import RerunPool
from plugins.graphs.decode import DecodeGraphs
from plugins.graphs.full import FullGraphs
from plugins.graphs.none import NoGraphs
from tests.kit.bugs.graphs import PadsAChunk, TakesAChunkForFresh


class Pool(RerunPool):
    """`stale` rows keep their old logits."""

    stale = slice(0, 0)

    def capture_model(self, batch, step):
        super().capture_model(batch, step)
        steps = self.models[batch.shape]

        def replay(batch):
            before = batch.logits.clone()
            for step in steps:
                step(batch)
            batch.logits[self.stale] = before[self.stale]

        self.models[batch.shape] = [replay]


class WithoutCuda(DecodeGraphs):
    """Off CUDA the core refuses who captures, so this one does not say that it does."""

    captures = False


class NeverSelectsTheLargest(WithoutCuda):
    """Each capture costs memory and time, this one for nothing."""

    def select(self, num_tokens, num_seqs, max_query, max_kv, start):
        shape = super().select(num_tokens, num_seqs, max_query, max_kv, start)
        return None if shape and shape.num_seqs == self._ladder[-1] else shape


def replayed(offer):
    """Run the replay clause of the GPU half for `offer`."""

    class Suite(GraphGpuSuite):
        def engine(self, **options):
            engine = super().engine(device="cpu", dtype="float32", **options)
            engine._executor.capture(lambda *_: None)
            return engine

    suite = Suite()
    suite.make = lambda: offer(offer.Config(fine=16))
    suite.test_replay_equals_eager_bit_for_bit()


def test_the_replay_clause_holds_where_replays_are_right(monkeypatch):
    monkeypatch.setattr("core.executor.GraphPool", Pool)
    replayed(WithoutCuda)


def test_the_replay_clause_sees_a_stale_row(monkeypatch):
    monkeypatch.setattr("core.executor.GraphPool", Pool)
    monkeypatch.setattr(Pool, "stale", slice(4, 5))
    with pytest.raises(AssertionError, match="differ"):
        replayed(WithoutCuda)


def test_the_replay_clause_sees_a_shape_that_nothing_is_padded_to(monkeypatch):
    monkeypatch.setattr("core.executor.GraphPool", Pool)
    with pytest.raises(AssertionError, match="captured and never replayed"):
        replayed(NeverSelectsTheLargest)


def in_chunks(offer):
    """A prompt of a chunk, a whole one behind it and a shorter one: output, eager steps."""
    strategy = type("OffCuda", (offer,), {"captures": False})()
    limits = {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 32}
    with Engine(model="random:tiny", device="cpu", graphs=strategy, fusion="none", **limits) as e:
        e._executor.capture(lambda *_: None)
        ids = [5 + i % 90 for i in range(75)]
        (output,) = e.generate([ids], SamplingParams(max_tokens=4, ignore_eos=True))
        return output, e.counters.num_eager_steps


def test_a_prompt_in_chunks_is_replayed_whole_chunk_by_whole_chunk(monkeypatch):
    monkeypatch.setattr("core.executor.GraphPool", Pool)
    wanted, num_eager = in_chunks(NoGraphs)
    assert num_eager == 6
    found, num_eager = in_chunks(FullGraphs)
    assert found.error is None and num_eager == 0
    assert found.token_ids == wanted.token_ids


@pytest.mark.parametrize("offer", [PadsAChunk, TakesAChunkForFresh])
def test_the_core_refuses_a_shape_that_is_of_another_prefix(monkeypatch, offer):
    monkeypatch.setattr("core.executor.GraphPool", Pool)
    output, _ = in_chunks(offer)
    assert "graphs selected BatchShape(num_tokens=32, num_seqs=1" in output.error
    assert "which it does not hold" in output.error
