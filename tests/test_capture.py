"""Cutting a step into pieces: what is captured, what runs between, and what passes from one to the
next."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from core.capture import Piece, pieces
from core.chain import Placed, cover, decoder_chain, execute
from core.model import BEGIN_STEP, LAYER
from core.seams import Span
from core.testing.reruns import RerunPool

OUT = frozenset({"begin_step", "attention", "lm_head"})
# The spans of `triton`, without their kernels.
FUSED = (
    ("embed", "attn_norm"),
    ("attn_add", "mlp_norm"),
    ("mlp_add", "attn_norm"),
    ("mlp_add", "final_norm"),
    ("qk_norm", "rope", "kv_write"),
    ("act_mul",),
)


def chain(num_layers=2):
    sites = [SimpleNamespace(layer=i) for i in range(-1, num_layers)]
    return [Placed(BEGIN_STEP, sites[0]), *decoder_chain(sites[0], sites[1:])]


def covered(*fused, num_layers=2):
    spans = [Span("+".join(nodes), nodes, None, lambda *_: True) for nodes in fused]
    return cover(chain(num_layers), spans)


def cut(operations, eager=OUT):
    """Each piece as (eager, names of its first and last operation, reads, writes)."""
    return [
        (p.eager, p.operations[0].name, p.operations[-1].name, p.reads, p.writes)
        for p in pieces(operations, eager)
    ]


def test_without_a_cut_a_step_is_one_piece():
    assert cut(covered(), frozenset()) == [(False, "begin_step", "lm_head", (), ())]


def test_attention_stays_out_of_a_plain_chain():
    between = ("residual", "ctx"), ("residual", "q")
    assert cut(covered(num_layers=3)) == [
        (True, "begin_step", "begin_step", (), ()),
        (False, "embed", "kv_write", (), ("residual", "q")),
        (True, "attention", "attention", ("q",), ("ctx",)),
        (False, "o_proj", "kv_write", *between),
        (True, "attention", "attention", ("q",), ("ctx",)),
        (False, "o_proj", "kv_write", *between),
        (True, "attention", "attention", ("q",), ("ctx",)),
        (False, "o_proj", "final_norm", ("residual", "ctx"), ("hidden",)),
        (True, "lm_head", "lm_head", ("hidden",), ()),
    ]


def test_spans_are_cut_at_the_same_places():
    plain, fused = cut(covered()), cut(covered(*FUSED))
    assert [piece[3:] for piece in plain] == [piece[3:] for piece in fused]
    assert fused[1][:3] == (False, "embed+attn_norm", "qk_norm+rope+kv_write")
    assert fused[-2][:3] == (False, "o_proj", "mlp_add+final_norm")


def test_a_span_that_holds_what_is_cut_out_runs_eagerly_as_a_whole():
    found = cut(covered(("kv_write", "attention", "o_proj"), ("final_norm", "lm_head")))
    span = "kv_write+attention+o_proj"
    assert [name for eager, name, *_ in found if eager] == [
        "begin_step", span, span, "final_norm+lm_head"
    ]  # fmt: skip
    assert found[2] == (True, span, span, ("q", "k", "v"), ("hidden",))


def test_neighbours_that_are_cut_out_are_one_piece():
    found = cut(covered(num_layers=1), OUT | {"kv_write", "o_proj"})
    assert found[2] == (True, "kv_write", "o_proj", ("q", "k", "v"), ("hidden",))
    everything = OUT | {node.name for node in LAYER} | {"embed", "final_norm"}
    assert cut(covered(), everything) == [(True, "begin_step", "lm_head", (), ())]


def test_a_value_that_no_later_piece_reads_is_not_kept():
    """`hidden`, which the norm writes and the projection reads, dies within its piece, and so does
    what the first layer left of its MLP."""
    for piece in pieces(covered(), OUT)[:-2]:
        assert "hidden" not in piece.writes and "gate_up" not in piece.writes


# -------- replays, over a chain that computes something


def toy(num_tokens, in_place):
    """Operations of a plain chain over tensors [T, 4]; a value is a mix of what it is made of. With
    `in_place` those that may write into what they read do so."""

    def run_of(op, i):
        def run(sites, batch, *values):
            source = batch.inputs[:num_tokens] if not values else sum(values)
            made = tuple(torch.sin(source + i + 0.1 * j) for j in range(len(op.writes)))
            shared = [name for name in op.writes if name in op.reads] if in_place else []
            for name in shared:
                at = op.writes.index(name)
                values[op.reads.index(name)].copy_(made[at])
            return tuple(
                values[op.reads.index(name)] if name in shared else value
                for name, value in zip(op.writes, made, strict=True)
            )

        return run

    # The last leaves its result in a static buffer, as lm_head does.
    def last(sites, batch, hidden):
        return (batch.logits.copy_(hidden * 2),)

    operations = [op for op in covered(num_layers=3) if op.name != "begin_step"]
    made = [op._replace(run=run_of(op, i)) for i, op in enumerate(operations)]
    return [*made[:-1], made[-1]._replace(run=last)]


def batch_of(num_tokens, seed=0):
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    return SimpleNamespace(shape=num_tokens, inputs=inputs, logits=torch.zeros(num_tokens, 4))


CUTS = [OUT, OUT | {"o_proj"}, OUT | {"embed"}, OUT | {"mlp_add", "attn_norm"}, {"attn_add"},
        {"qkv_proj", "qk_norm"}, {"kv_write"}, {"down", "lm_head"}, frozenset()]  # fmt: skip


@pytest.mark.parametrize("eager", CUTS, ids=lambda cut: "+".join(sorted(cut)) or "nothing")
@pytest.mark.parametrize("in_place", [False, True])
def test_replays_compute_what_the_chain_does(eager, in_place):
    """For two shapes that share static tensors, in any order, with new inputs each time."""
    pool, captured = RerunPool(torch.device("cpu")), {}
    for num_tokens in (8, 5):
        captured[num_tokens] = batch_of(num_tokens)
        pool.capture_model(captured[num_tokens], pieces(toy(num_tokens, in_place), eager))
    for seed, num_tokens in enumerate((5, 8, 8, 5, 5, 8), 1):
        batch, wanted = captured[num_tokens], batch_of(num_tokens, seed)
        batch.inputs.copy_(wanted.inputs)  # what a graph reads lies where it was
        execute(toy(num_tokens, in_place), wanted, {})
        batch.logits.fill_(torch.nan)
        for step in pool.models[num_tokens]:
            step(batch)
        assert torch.equal(batch.logits, wanted.logits), (seed, num_tokens)


def test_a_piece_reads_only_what_it_names():
    (op,) = [op for op in toy(2, False) if op.name == "attn_add"][:1]
    piece = Piece([op], True, ("residual", "hidden"), ("residual",))
    ones, place = torch.ones(2, 4), torch.zeros(2, 4)
    live = {"residual": ones, "hidden": ones, "q": ones}
    found = piece.run(None, live, {"residual": place, "q": ones})
    assert list(found) == ["residual"] and found["residual"] is place and bool(place.any())
