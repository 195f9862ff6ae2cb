"""Ladders cover every size up to the limit, and `select` names only what was captured."""

from __future__ import annotations

import pytest

from core.batch import Limits
from plugins.graphs.decode import DecodeGraphs
from plugins.graphs.full import FullGraphs
from plugins.graphs.ladder import at_least, rungs
from plugins.graphs.none import NoGraphs

LIMITS = [1, 2, 3, 4, 5, 8, 17, 20, 97, 100, 256, 512]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("fine", [1, 8, 32])
def test_every_size_finds_a_rung_and_the_last_is_the_limit(limit, fine):
    ladder = rungs(limit, fine)
    assert ladder[-1] == limit
    assert list(ladder) == sorted(set(ladder))
    for size in range(1, limit + 1):
        rung = at_least(ladder, size)
        assert rung is not None and rung >= size
        assert rung <= max(size * 1.25, size + fine), "too much padding"
    assert at_least(ladder, limit + 1) is None


@pytest.mark.parametrize("max_num_seqs", LIMITS)
def test_decode_selects_captured_shapes_only(max_num_seqs):
    graphs = DecodeGraphs()
    shapes = set(graphs.shapes(Limits(64, max_num_seqs, 512)))
    for rows in range(1, max_num_seqs + 1):
        shape = graphs.select(rows, rows, 1, 40, False)
        assert shape in shapes and shape.num_seqs >= rows
    assert graphs.select(8, 1, 8, 8, True) is None


@pytest.mark.parametrize("max_num_seqs", [1, 3, 20])
@pytest.mark.parametrize("max_tokens", [1, 40, 4096])
@pytest.mark.parametrize("mixed", [False, True])
def test_full_selects_captured_shapes_only(max_num_seqs, max_tokens, mixed):
    graphs = FullGraphs(FullGraphs.Config(max_tokens=max_tokens, mixed=mixed))
    limits = Limits(2048, max_num_seqs, 300)
    shapes = set(graphs.shapes(limits))
    top = min(max_tokens, limits.max_num_batched_tokens)
    for tokens in range(2, limits.max_num_batched_tokens + 1):
        prompt = graphs.select(tokens, 1, tokens, tokens, True)
        assert (prompt is not None) == (tokens <= top)
        assert prompt is None or (prompt in shapes and prompt.num_tokens >= tokens and prompt.fresh)
        mix = graphs.select(tokens, min(2, max_num_seqs), tokens - 1 or 1, tokens, False)
        if tokens == 2:
            continue  # two rows of one token: a decode step
        assert (mix is not None) == (mixed and tokens <= top)
        assert mix is None or (mix in shapes and mix.num_tokens >= tokens and not mix.fresh)
    for rows in range(1, max_num_seqs + 1):
        assert graphs.select(rows, rows, 1, 9, False) in shapes


def test_none_captures_nothing():
    assert NoGraphs().shapes(Limits(64, 8, 64)) == []
    assert NoGraphs().select(1, 1, 1, 1, False) is None
