"""Covering the chain with spans: who claims what, what is read and live, fuel, named overlaps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from core.chain import check_spans, cover, decoder_chain, execute
from core.errors import UserError
from core.seams import Span


def always(num_tokens, facts, sink):
    return True


def span(name, *nodes, priority=0, run=lambda sites, batch, *values: values):
    return Span(name, nodes, run, always, priority)


def chain(num_layers=3):
    return decoder_chain(
        SimpleNamespace(layer=-1), [SimpleNamespace(layer=i) for i in range(num_layers)]
    )


def names(operations):
    return [operation.name for operation in operations]


def test_without_spans_the_chain_is_itself():
    operations = cover(chain(2), [])
    assert len(operations) == 1 + 2 * 13 + 2
    assert names(operations)[:4] == ["embed", "attn_norm", "qkv_proj", "qk_norm"]
    assert names(operations)[-2:] == ["final_norm", "lm_head"]
    assert operations[-1].writes == ("logits",)


def test_a_span_may_cross_the_edge_of_a_layer_and_gets_a_site_a_node():
    operations = cover(chain(3), [span("add_norm", "mlp_add", "attn_norm")])
    found = [op for op in operations if op.name == "add_norm"]
    assert [[site.layer for site in op.sites] for op in found] == [[0, 1], [1, 2]]
    assert found[0].reads == ("residual", "hidden")
    assert found[0].writes == ("residual", "hidden")
    assert names(operations).count("mlp_add") == 1  # the last layer's, which meets final_norm


def test_what_is_read_and_what_is_live():
    operations = cover(
        chain(1),
        [span("qk", "qk_norm", "rope", "kv_write"), span("mlp", "gate_up", "act_mul", "down")],
    )
    by_name = {op.name: op for op in operations}
    assert (by_name["qk"].reads, by_name["qk"].writes) == (("qkv",), ("q",))
    assert (by_name["mlp"].reads, by_name["mlp"].writes) == (("hidden",), ("hidden",))


def test_priority_then_length_then_name_decide():
    long = span("long", "attn_add", "mlp_norm", "gate_up")
    short = span("short", "attn_add", "mlp_norm")
    assert "short" not in names(cover(chain(), [short, long]))
    urgent = span("short", "attn_add", "mlp_norm", priority=1)
    assert "long" not in names(cover(chain(), [urgent, long]))
    twins = [span("b", "act_mul"), span("a", "act_mul")]
    assert names(cover(chain(), twins)).count("a") == 3


@pytest.mark.parametrize(
    "nodes",
    [(), ("mlp_norm", "qkv_proj"), ("begin_step", "embed"), ("no_node",), "mlp_norm", ["mlp_norm"]],
)
def test_a_span_over_no_run_of_nodes_is_refused(nodes):
    with pytest.raises(UserError, match="span 'it' is over .*: give nodes in their order"):
        check_spans([Span("it", nodes, tuple, always)])


def test_a_span_over_nothing_claims_nothing():
    """It would else stand at every place, and the chain would have no end."""
    assert names(cover(chain(1), [Span("it", (), tuple, always)])) == names(cover(chain(1), []))


def test_any_run_of_nodes_is_a_span():
    """Over the edges of layers too, however many, and the sampler's."""
    layer = [placed.node.name for placed in chain(1)][1:-2]
    check_spans([span("it", *layer[-1:], *layer * 3, *layer[:2]), span("it", "sample")])


def test_two_spans_asked_for_by_name_that_overlap_are_an_error_naming_both():
    overlapping = [span("one", "attn_add", "mlp_norm"), span("two", "mlp_norm", "gate_up")]
    cover(chain(), overlapping)
    with pytest.raises(UserError) as caught:
        cover(chain(), overlapping, strict=True)
    assert all(word in str(caught.value) for word in ("'one'", "'two'", "'mlp_norm'"))
    urgent = [overlapping[0], span("two", "mlp_norm", "gate_up", priority=1)]
    assert "one" not in names(cover(chain(), urgent, strict=True)), "a priority is an answer"


@pytest.mark.parametrize("fuel", range(5))
def test_fuel_counts_places_from_the_start(fuel):
    operations = cover(chain(3), [span("act", "act_mul")], fuel=fuel)
    fused = [i for i, name in enumerate(names(operations)) if name == "act"]
    plain = [i for i, name in enumerate(names(operations)) if name == "act_mul"]
    assert len(fused) == min(fuel, 3)
    assert len(fused) + len(plain) == 3
    assert not fused or not plain or max(fused) < min(plain)


def test_execute_checks_how_many_values_come_back():
    wrong = span("wrong", "act_mul", run=lambda sites, batch, gate_up: (gate_up, gate_up))
    operations = [op for op in cover(chain(1), [wrong]) if op.name == "wrong"]
    with pytest.raises(ValueError, match="zip"):
        execute(operations, None, {"gate_up": torch.ones(1)})
