"""Seeded bugs: what the graphs suite is for. Each is a shipped strategy with one fault.

BUGS names the clauses that must fail; all others must hold. What the GPU half says of replays is
tried on a CPU, where a "graph" is the function that would be captured.
"""

from __future__ import annotations

import pytest

from core import Engine, SamplingParams
from core.batch import BatchShape
from core.testing.graphs import GraphSuite
from core.testing.graphs_gpu import GraphGpuSuite
from core.testing.reruns import RerunPool
from plugins.graphs.decode import DecodeGraphs
from plugins.graphs.full import FullGraphs
from plugins.graphs.none import NoGraphs
from plugins.graphs.piecewise import PiecewiseGraphs


class EndsAtAMultiple(FullGraphs):
    """1, 2, 4, 8, and then multiples of 16: 17 of 20 rows find no graph."""

    def shapes(self, limits):
        super().shapes(limits)
        self._rows = tuple(n for n in (1, 2, 4, 8, *range(16, 512, 16)) if n <= limits.max_num_seqs)
        return _all(self)


class EndsBelowTheBudget(FullGraphs):
    """The ladder of mixed steps stops at its last but one rung, if it has one."""

    def shapes(self, limits):
        super().shapes(limits)
        self._mixed = self._mixed[:-1] or self._mixed
        return _all(self)


class ExceedsTheLimits(FullGraphs):
    """The last rung is the next power of two, for which no buffer is large enough."""

    def shapes(self, limits):
        super().shapes(limits)
        self._rows = (*self._rows[:-1], 1 << self._rows[-1].bit_length())
        return _all(self)


class RepeatsTheLast(FullGraphs):
    """The limit is appended to a ladder that ends there anyway."""

    def shapes(self, limits):
        super().shapes(limits)
        self._rows += (limits.max_num_seqs,)
        return _all(self)


class CapturesNothing(FullGraphs):
    """It says that it captures."""

    def shapes(self, limits):
        return []

    def select(self, num_tokens, num_seqs, max_query, max_kv, start):
        return None


class SelectsWhatIsNotCaptured(FullGraphs):
    """A decode step as it is, without padding."""

    def select(self, num_tokens, num_seqs, max_query, max_kv, start):
        if max_query == 1:
            return self._decode(num_seqs)
        return super().select(num_tokens, num_seqs, max_query, max_kv, start)


class RoundsDown(FullGraphs):
    """To the largest rung that is not above the step."""

    def select(self, num_tokens, num_seqs, max_query, max_kv, start):
        if max_query == 1:
            return self._decode(max(n for n in self._rows if n <= num_seqs))
        return super().select(num_tokens, num_seqs, max_query, max_kv, start)


class ForgetsTheRows(FullGraphs):
    """Mixed steps are captured for half of the rows that may come."""

    def _mix(self, tokens):
        shape = super()._mix(tokens)
        return shape._replace(num_seqs=-(-shape.num_seqs // 2))


class TakesAChunkForFresh(FullGraphs):
    """A lone prompt is a lone prompt, wherever it goes on from."""

    def select(self, num_tokens, num_seqs, max_query, max_kv, start):
        lone = num_seqs == 1 and max_query > 1
        return super().select(num_tokens, num_seqs, max_query, max_kv, 0 if lone else start)

    def _prompt(self, tokens):
        return BatchShape(tokens, 1, tokens, self._longest, 0)


class TakesAChunkForALaterOne(FullGraphs):
    """A whole chunk is a whole chunk: the prefix that is read may well be longer than its own."""

    def select(self, num_tokens, num_seqs, max_query, max_kv, start):
        if start and num_tokens == self._whole:
            start = next((at for at in self._starts if at >= start), start)
        return super().select(num_tokens, num_seqs, max_query, max_kv, start)


class PadsAChunk(FullGraphs):
    """The last chunk of a prompt, which is shorter than those before it, as if it were whole."""

    def select(self, num_tokens, num_seqs, max_query, max_kv, start):
        if max_query > 1 and start in self._starts:
            return self._chunk(start)
        return super().select(num_tokens, num_seqs, max_query, max_kv, start)


class RemembersTheLast(FullGraphs):
    """The same rung again, if it holds this step too: fewer changes of graph."""

    _last = None

    def select(self, num_tokens, num_seqs, max_query, max_kv, start):
        if max_query == 1 and self._last and self._last.num_seqs >= num_seqs:
            return self._last
        shape = super().select(num_tokens, num_seqs, max_query, max_kv, start)
        if shape and shape.decode_only:
            self._last = shape
        return shape

    def shapes(self, limits):
        self._last = None
        return super().shapes(limits)


class SharesItsLadder(FullGraphs):
    """Two engines in one process have one ladder, that of the second."""

    ladders: list = [()]

    def shapes(self, limits):
        found = super().shapes(limits)
        self.ladders[0] = self._rows
        return found

    def select(self, num_tokens, num_seqs, max_query, max_kv, start):
        self._rows = self.ladders[0]
        return super().select(num_tokens, num_seqs, max_query, max_kv, start)


class HasALadderOfRowsToo(PiecewiseGraphs):
    """Steps that decode get pieces of their own, which are those of other steps of their size."""

    def shapes(self, limits):
        found, longest = super().shapes(limits), limits.max_model_len
        rows = [n for n in self._ladder if 1 < n <= limits.max_num_seqs]
        return found + [BatchShape(n, n, 1, longest, None) for n in rows]


class CutsOutWhatIsNoNode(PiecewiseGraphs):
    """The name of a span."""

    def cut(self):
        return ("attention", "qk_rope_write")


class PiecesEndEarly(PiecewiseGraphs):
    """The ladder of tokens stops at its last but one rung, if it has one."""

    def shapes(self, limits):
        super().shapes(limits)
        self._ladder = self._ladder[:-1] or self._ladder
        return [*map(self._prompt, self._fresh), *map(self._any, self._ladder)]


class CutsByTurns(PiecewiseGraphs):
    """Attention, and the next time more."""

    def cut(self):
        self.num_cuts = getattr(self, "num_cuts", 0) + 1
        return ("attention", "o_proj")[: 1 + self.num_cuts % 2]


class HasHalvesOfTokens(FullGraphs):
    """The numbers of numpy, or of a division, which no tensor takes as its length."""

    def shapes(self, limits):
        return [shape._replace(num_tokens=shape.num_tokens / 1) for shape in super().shapes(limits)]


class GivesItsShapesOnce(FullGraphs):
    """An iterator: whoever looks again finds none."""

    def shapes(self, limits):
        return iter(super().shapes(limits))


class LeavesRoomBehindAChunk(FullGraphs):
    """A context longer than what a prompt has, by one token."""

    def _prompt(self, tokens):
        shape = super()._prompt(tokens)
        return shape._replace(max_kv=shape.max_kv + 1)


def _all(strategy):
    """The shapes of the ladders as they are now."""
    return [
        *(strategy._decode(n) for n in strategy._rows),
        *(strategy._prompt(n) for n in strategy._fresh),
        *(strategy._chunk(start) for start in strategy._starts),
        *(strategy._mix(n) for n in strategy._mixed),
    ]


BUGS = {
    EndsAtAMultiple: {"ladders_end_at_the_maximum"},
    EndsBelowTheBudget: {"ladders_end_at_the_maximum"},
    ExceedsTheLimits: {"shapes_are_within_the_limits", "ladders_end_at_the_maximum"},
    RepeatsTheLast: {"no_shape_is_there_twice"},
    CapturesNothing: {"captures_is_as_declared"},
    SelectsWhatIsNotCaptured: {"select_names_captured_shapes"},
    RoundsDown: {"the_selected_shape_holds_the_step"},
    ForgetsTheRows: {"the_selected_shape_holds_the_step"},
    TakesAChunkForFresh: {
        "a_shape_with_a_start_is_for_steps_that_start_there",
        "a_chunk_ends_where_its_tokens_do",
    },
    TakesAChunkForALaterOne: {"a_shape_with_a_start_is_for_steps_that_start_there"},
    PadsAChunk: {"a_shape_behind_a_prefix_is_not_padded_to"},
    RemembersTheLast: {"select_depends_on_the_step_alone"},
    SharesItsLadder: {"there_is_no_state_beyond_shapes"},
    HasALadderOfRowsToo: {"pieces_are_captured_once"},
    CutsOutWhatIsNoNode: {"what_is_cut_out_is_a_node"},
    PiecesEndEarly: {"ladders_end_at_the_maximum"},
    CutsByTurns: {"the_cut_is_always_the_same"},
    HasHalvesOfTokens: {"shapes_are_whole_numbers"},
    GivesItsShapesOnce: {"shapes_are_whole_numbers"},
    LeavesRoomBehindAChunk: {"a_chunk_ends_where_its_tokens_do"},
}
CLAUSES = [name for name in vars(GraphSuite) if name.startswith("test_")]


def failing(offer):
    """The clauses that do not hold for `offer`, by name."""
    suite, failed = type("S", (GraphSuite,), {"offer": offer})(), set()
    for clause in CLAUSES:
        try:
            getattr(suite, clause)()
        except pytest.skip.Exception:
            continue
        except AssertionError:
            failed.add(clause.removeprefix("test_"))
    return failed


@pytest.mark.parametrize("offer", [DecodeGraphs, FullGraphs, PiecewiseGraphs])
def test_a_strategy_without_a_fault_passes(offer):
    assert failing(offer) == set()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_the_named_clauses_catch_it_and_no_others(bug):
    assert failing(bug) == BUGS[bug]


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
