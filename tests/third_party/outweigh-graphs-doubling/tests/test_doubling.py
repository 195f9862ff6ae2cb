"""`doubling` is held to the contract of its seam, and to a gate of its own."""

from __future__ import annotations

import pytest
from outweigh_graphs_doubling import Doubling, ladder

from core.batch import Limits
from core.testing.graphs import GraphSuite
from core.testing.graphs_gpu import GraphGpuSuite

LIMITS = Limits(max_model_len=4096, max_num_seqs=200, max_num_batched_tokens=8192)


class TestDoubling(GraphSuite):
    plugin = "doubling"


class TestDoublingOnGpu(GraphGpuSuite):
    plugin = "doubling"


@pytest.mark.parametrize(
    ("limit", "rungs"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])]
)
def test_ladder(limit: int, rungs: list[int]) -> None:
    assert ladder(limit) == rungs


def test_gate() -> None:
    """18 graphs, and less than half of any step is padding."""
    strategy = Doubling(Doubling.Config())
    assert len(strategy.shapes(LIMITS)) == 9 + 9
    for rows in range(1, LIMITS.max_num_seqs + 1):
        shape = strategy.select(rows, rows, 1, 100, None)
        assert shape is not None and rows <= shape.num_seqs < 2 * rows
    for tokens in range(2, 513):
        shape = strategy.select(tokens, 1, tokens, tokens, 0)
        assert shape is not None and tokens <= shape.num_tokens < 2 * tokens
    assert strategy.select(513, 1, 513, 513, 0) is None
