"""Strategies with one fault each. Each is a shipped one."""

from __future__ import annotations

import inspect

from core import hookimpl
from core.batch import BatchShape
from plugins.graphs.decode import DecodeGraphs
from plugins.graphs.full import FullGraphs
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


@hookimpl
def outweigh_register_graphs(register):
    register("SoundDecode", DecodeGraphs)
    register("SoundFull", FullGraphs)
    register("SoundPiecewise", PiecewiseGraphs)
    for name, found in globals().items():
        if inspect.isclass(found) and found.__module__ == __name__:
            register(name, found)
