"""Ladders cover every size up to the limit, and `select` names only what was captured."""

from __future__ import annotations

import pytest

from core.batch import Limits
from plugins.graphs.decode import DecodeGraphs
from plugins.graphs.full import FullGraphs
from plugins.graphs.ladder import at_least, prompt_rungs, rungs
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


@pytest.mark.parametrize("limit", [*LIMITS, 2048, 8192])
@pytest.mark.parametrize("fine", [1, 7, 32])
def test_rungs_of_prompts_pad_by_15_percent_at_most(limit, fine):
    """From four times the spacing on: 128 tokens, as `full` is configured."""
    ladder = prompt_rungs(limit, fine)
    assert ladder[-1] == limit and list(ladder) == sorted(set(ladder))
    for size in range(1, limit + 1):
        rung = at_least(ladder, size)
        assert size <= rung <= (1.15 * size if size >= 4 * fine else size + fine)
    octaves = {4 * fine << i for i in range(20)}
    assert set(ladder) >= {n for n in octaves if n < limit}, "powers of two are not padded"


@pytest.mark.parametrize("limit", [2, 100, 128, 4000, 8192])
def test_no_prompt_is_padded_by_a_tile_of_its_products(limit):
    few, many = prompt_rungs(limit, 32), prompt_rungs(limit, 32, 128)
    assert set(few) <= set(many) and many[-1] == limit
    assert all(at_least(many, size) - size < 128 for size in range(1, limit + 1))
    assert {n for n in many if n not in few} == set(range(128, limit, 128)) - set(few)


@pytest.mark.parametrize("num_tokens", [150, 1100, 3000, 4400, 8065, 8192])
def test_a_lone_prompt_up_to_a_usual_step_is_replayed_with_little_padding(num_tokens):
    graphs = FullGraphs()
    shapes = graphs.shapes(Limits(40960, 256, 8192))
    shape = graphs.select(num_tokens, 1, num_tokens, num_tokens, 0)
    assert shape in shapes and shape.fresh
    assert num_tokens <= shape.num_tokens <= min(1.15 * num_tokens, num_tokens + 127)


def test_whole_chunks_of_a_longer_prompt_are_captured():
    """Up to the last that a prompt can fill and leave room for a token; none for another length."""
    graphs = FullGraphs()
    shapes = graphs.shapes(Limits(3 * 1024, 8, 1024))
    assert [shape for shape in shapes if shape.start] == [(1024, 1, 1024, 2048, 1024)]
    shapes = graphs.shapes(Limits(3 * 1024 + 1, 8, 1024))
    chunks = [(1024, 1, 1024, 1024 + start, start) for start in (1024, 2048)]
    assert [shape for shape in shapes if shape.start] == chunks
    for chunk in chunks:
        assert graphs.select(*chunk) == chunk
    for step in ((1000, 1, 1000, 2024, 1024), (1024, 1, 1024, 2040, 1016)):
        assert graphs.select(*step) == (1024, 8, 1024, 3 * 1024 + 1, None)
    for few in (FullGraphs(FullGraphs.Config(max_tokens=1023)), DecodeGraphs()):
        assert not [s for s in few.shapes(Limits(4096, 8, 1024)) if s.start]
        assert few.select(1024, 1, 1024, 2048, 1024) is None


@pytest.mark.parametrize("max_num_seqs", LIMITS)
def test_decode_selects_captured_shapes_only(max_num_seqs):
    graphs = DecodeGraphs()
    shapes = set(graphs.shapes(Limits(64, max_num_seqs, 512)))
    for rows in range(1, max_num_seqs + 1):
        shape = graphs.select(rows, rows, 1, 40, None)
        assert shape in shapes and shape.num_seqs >= rows
    assert graphs.select(8, 1, 8, 8, 0) is None


@pytest.mark.parametrize("max_num_seqs", [1, 3, 20])
@pytest.mark.parametrize("max_tokens", [1, 40, 4096])
@pytest.mark.parametrize("mixed", [False, True])
def test_full_selects_captured_shapes_only(max_num_seqs, max_tokens, mixed):
    graphs = FullGraphs(FullGraphs.Config(max_tokens=max_tokens, mixed=mixed))
    limits = Limits(2048, max_num_seqs, 300)
    shapes = set(graphs.shapes(limits))
    top = min(max_tokens, limits.max_num_batched_tokens)
    for tokens in range(2, limits.max_num_batched_tokens + 1):
        prompt = graphs.select(tokens, 1, tokens, tokens, 0)
        assert (prompt is not None) == (tokens <= top)
        assert prompt is None or (prompt in shapes and prompt.num_tokens >= tokens and prompt.fresh)
        mix = graphs.select(tokens, min(2, max_num_seqs), tokens - 1 or 1, tokens, None)
        if tokens == 2:
            continue  # two rows of one token: a decode step
        assert (mix is not None) == (mixed and tokens <= top)
        assert mix is None or (mix in shapes and mix.num_tokens >= tokens and not mix.lone)
    for rows in range(1, max_num_seqs + 1):
        assert graphs.select(rows, rows, 1, 9, None) in shapes


def test_none_captures_nothing():
    assert NoGraphs().shapes(Limits(64, 8, 64)) == []
    assert NoGraphs().select(1, 1, 1, 1, None) is None
