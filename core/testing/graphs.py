"""The conformance suite of the graphs seam. Subclass it, name the offer, and run pytest:

    class TestPowersOfTwo(GraphSuite):
        plugin = "powers_of_two"              # by registered name, or `offer = PowersOfTwo`
        config = {"max_tokens": 1024}
        expected_failures = {"test_…": "why"}  # strict: a pass is a failure

Every test states one clause of the contract in `core.seams.GraphStrategy`. A strategy is policy
only, so these need no GPU; `core.testing.graphs_gpu` replays what it captures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence as Seq
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest

from core.batch import BatchShape, Limits
from core.model import FINAL_NORM, LAYER, LM_HEAD
from core.seams import offered
from core.testing.suite import Suite

if TYPE_CHECKING:
    from core.seams import GraphStrategy

MAX_LEN = 200  # tokens of the longest sequence here
# Sizes that no spacing of a ladder divides; 16, 17 and 20 rows are where ladders have ended early.
_NUM_SEQS = (1, 3, 17, 20, 97)
_NUM_TOKENS = (97, 300)


class GraphSuite(Suite):
    """What every GraphStrategy keeps. Class attributes say which one."""

    seam: ClassVar[str] = "graphs"
    limits: ClassVar[tuple[Limits, ...]] = tuple(
        Limits(MAX_LEN, num_seqs, num_tokens)
        for num_seqs in _NUM_SEQS
        for num_tokens in sorted({num_seqs + 1, *_NUM_TOKENS})
    )

    # ------------------------------------------------------------------------------- helpers

    def make(self) -> GraphStrategy:
        """A fresh strategy."""
        return cast("GraphStrategy", self.made())

    def captured(self) -> Iterator[tuple[Limits, GraphStrategy, list[BatchShape]]]:
        """For each of the limits a strategy that has been asked for its shapes, and the shapes."""
        if not self.make().captures:
            pytest.skip("captures is False: there is no shape")
        for limits in self.limits:
            strategy = self.make()
            yield limits, strategy, list(strategy.shapes(limits))

    def selected(self) -> Iterator[tuple[BatchShape, BatchShape, list[BatchShape]]]:
        """Every step that is padded to a shape, the shape, and the shapes that were captured."""
        for limits, strategy, shapes in self.captured():
            for step in steps(limits):
                shape = strategy.select(*step)
                if shape is not None:
                    yield step, shape, shapes

    def cut(self) -> Seq[str]:
        """What a strategy that captures pieces leaves out of them."""
        cut = offered(self.make(), "cut")
        if cut is None:
            pytest.skip("it has no method cut: a graph is a whole step")
        return cast("Seq[str]", cut())

    # --------------------------------------------------------------------------------- shapes

    def test_captures_is_as_declared(self) -> None:
        """Who captures has a shape for all limits; who does not has none, and selects none."""
        for limits in self.limits:
            strategy = self.make()
            shapes = list(strategy.shapes(limits))
            assert bool(shapes) == strategy.captures, f"{len(shapes)} shapes for {limits}"
            if not strategy.captures:
                assert {strategy.select(*step) for step in steps(limits)} == {None}

    def test_shapes_are_within_the_limits(self) -> None:
        """No more rows, tokens or context than an engine has buffers for; a row that decodes is a
        token."""
        for limits, _, shapes in self.captured():
            for shape in shapes:
                assert 1 <= shape.num_seqs <= limits.max_num_seqs, f"{shape} for {limits}"
                assert 1 <= shape.num_tokens <= limits.max_num_batched_tokens, f"{shape}, {limits}"
                assert 1 <= shape.max_query <= shape.num_tokens, f"{shape}"
                if shape.decode_only:
                    assert shape.num_tokens == shape.num_seqs, f"{shape}"
                if shape.lone:
                    assert shape.num_seqs == 1 and not shape.decode_only, f"{shape}"
                if not shape.fresh:
                    assert shape.max_kv <= limits.max_model_len, f"{shape} for {limits}"

    def test_shapes_are_whole_numbers(self) -> None:
        """And `shapes` gives them at once, in a sequence: the core looks at them more than once."""
        for limits, strategy, _ in self.captured():
            shapes = strategy.shapes(limits)
            assert isinstance(shapes, Seq), f"shapes is a {type(shapes).__name__}, no sequence"
            for shape in shapes:
                assert all(type(n) is int for n in shape[:4]), f"{shape}"

    def test_a_chunk_ends_where_its_tokens_do(self) -> None:
        """The longest context of a shape with a start is its start and its tokens."""
        for _, _, shapes in self.captured():
            for shape in shapes:
                if shape.start is not None:
                    assert shape.max_kv == shape.start + shape.num_tokens, f"{shape}"

    def test_no_shape_is_there_twice(self) -> None:
        for limits, _, shapes in self.captured():
            twice = [shape for shape, count in Counter(shapes).items() if count > 1]
            assert not twice, f"{twice} for {limits}"

    def test_ladders_end_at_the_maximum(self) -> None:
        """Rows at max_num_seqs, tokens at min(max_num_batched_tokens, max_tokens), exactly; a lone
        prompt may end at max_model_len."""
        for limits, strategy, shapes in self.captured():
            options: Any = getattr(strategy, "config", None)
            top = min(limits.max_num_batched_tokens, getattr(options, "max_tokens", 1 << 40))
            one = offered(strategy, "cut") is not None  # decode steps have no ladder of their own
            rows = [shape.num_seqs for shape in shapes if shape.decode_only and not one]
            fresh = [shape.num_tokens for shape in shapes if shape.fresh]
            mixed = [s.num_tokens for s in shapes if not s.lone and (one or not s.decode_only)]
            assert max(rows, default=limits.max_num_seqs) == limits.max_num_seqs, f"{limits}"
            assert max(mixed, default=top) == top, f"{limits}"
            assert max(fresh, default=top) in (top, min(top, limits.max_model_len)), f"{limits}"

    def test_what_is_cut_out_is_a_node(self) -> None:
        """A span that holds it goes with it; spans themselves have no say here."""
        known = {"begin_step", "embed", *(n.name for n in (*LAYER, FINAL_NORM, LM_HEAD))}
        unknown = set(self.cut()) - known
        assert not unknown, f"{sorted(unknown)} are no nodes"

    def test_the_cut_is_always_the_same(self) -> None:
        """Pieces are captured by one answer and replayed by it."""
        first = list(self.cut())
        strategy = self.make()
        cut: Any = offered(strategy, "cut")
        for limits in self.limits:
            strategy.shapes(limits)
            assert list(cut()) == first, f"{list(cut())} for {limits}, and {first} before"

    def test_pieces_are_captured_once(self) -> None:
        """They depend on tokens and start alone: shapes that differ in the rest only would be
        the same graphs twice."""
        self.cut()
        for limits, _, shapes in self.captured():
            twice = Counter((s.num_tokens, s.start) for s in set(shapes)).most_common(1)
            assert twice[0][1] == 1, f"(tokens, start) {twice} for {limits}"

    # --------------------------------------------------------------------------------- select

    def test_select_names_captured_shapes(self) -> None:
        """Or None: then the step runs eagerly, and is counted."""
        known: set[BatchShape] = set()
        last: list[BatchShape] = []
        for step, shape, shapes in self.selected():
            if shapes is not last:
                known, last = set(shapes), shapes
            assert shape in known, f"{shape} for {step} was not captured"

    def test_the_selected_shape_holds_the_step(self) -> None:
        """In tokens, rows, longest query and longest context."""
        for step, shape, _ in self.selected():
            holds = all(has >= needs for has, needs in zip(shape[:4], step[:4], strict=True))
            assert holds, f"{shape} does not hold {step}"

    def test_a_shape_with_a_start_is_for_steps_that_start_there(self) -> None:
        """How many cached keys a step reads is baked into such a shape: none, if it is fresh."""
        for step, shape, _ in self.selected():
            assert shape.start in (None, step.start), f"{shape} for {step}"

    def test_a_shape_behind_a_prefix_is_not_padded_to(self) -> None:
        """Every one of its rows is a token of the chunk."""
        for step, shape, _ in self.selected():
            exact = not shape.start or shape.num_tokens == step.num_tokens
            assert exact, f"{shape} for {step}"

    def test_select_depends_on_the_step_alone(self) -> None:
        """Not on what was asked before."""
        for limits, strategy, _ in self.captured():
            asked = list(steps(limits))
            first = [strategy.select(*step) for step in asked]
            again = [strategy.select(*step) for step in reversed(asked)][::-1]
            assert again == first, f"{limits}"

    def test_there_is_no_state_beyond_shapes(self) -> None:
        """What `shapes` says hangs on its limits alone, `select` on the last of them, and two
        strategies side by side do not know each other."""
        alone = {
            limits: (shapes, [strategy.select(*step) for step in steps(limits)])
            for limits, strategy, shapes in self.captured()
        }
        beside = {limits: self.make() for limits in self.limits}
        for limits, strategy in beside.items():
            assert list(strategy.shapes(limits)) == alone[limits][0], f"{limits}"
        for limits, strategy in beside.items():
            selected = [strategy.select(*step) for step in steps(limits)]
            assert selected == alone[limits][1], f"{limits}, with others beside it"
        reused = self.make()
        for limits, (shapes, wanted) in alone.items():
            assert list(reused.shapes(limits)) == shapes, f"{limits}, after others"
            assert [reused.select(*step) for step in steps(limits)] == wanted, f"{limits}"


def steps(limits: Limits) -> Iterator[BatchShape]:
    """Steps within `limits`: every number of decode rows; every number of tokens as a lone prompt,
    a chunk behind a short prefix, a long one and one or two whole chunks, and a mix of few and of
    many rows."""
    longest, budget = limits.max_model_len, limits.max_num_batched_tokens
    for rows in range(1, limits.max_num_seqs + 1):
        for max_kv in (1, longest // 2, longest):
            yield BatchShape(rows, rows, 1, max_kv, None)
    for tokens in range(2, budget + 1):
        for start in sorted({0, 1, budget, 2 * budget, longest - tokens}):
            if 0 <= start <= longest - tokens:
                yield BatchShape(tokens, 1, tokens, start + tokens, start)
        for rows in sorted({2, limits.max_num_seqs // 2, limits.max_num_seqs}):
            query = min(tokens - rows + 1, longest)
            if 2 <= rows <= limits.max_num_seqs and query > 1:
                yield BatchShape(tokens, rows, query, query, None)
                yield BatchShape(tokens, rows, query, longest, None)
