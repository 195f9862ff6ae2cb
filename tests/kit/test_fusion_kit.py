"""`verify`, beside the suite: which span it names, and what it leaves behind."""

from __future__ import annotations

import pytest
import torch

from core.chain import cover, execute
from core.testing.decoder import DecoderRig
from core.testing.fusion import memory_filled_with, verify
from core.testing.spans import compare
from tests.kit.bugs.fusion import PairsNeighbours, Sound


class SwapsInTheSecondLayer(Sound):
    """So that a first span deviates which is not the first span."""

    def add_mlp_norm(self, sites, batch, residual, hidden):
        found = super().add_mlp_norm(sites, batch, residual, hidden)
        return found[::-1] if sites[0].layer == 1 else found


@pytest.fixture
def decoder():
    return DecoderRig("qwen3", "paged", torch.float32, "cpu")


def verified(decoder, offer, num_tokens=7, **options):
    """Names of the spans that `verify` compared in the decode step of `decoder`, or its error."""
    spans, found = offer().spans(decoder.facts, torch.device("cpu")), []

    def check(chain, batch):
        found.append(verify(cover(chain, spans), chain, batch, tolerance=1e-5, **options))

    decoder.steps(num_tokens, check)
    return found


def test_verify_compares_every_span_in_place(decoder):
    layers = ["qk_rope_write", "add_norm", "act_mul", "add_norm"] * 2
    wanted = [layers, [*layers, "head"], [*layers, "head"]]
    assert verified(decoder, Sound) == verified(decoder, Sound, strided=True) == wanted


def test_verify_names_the_first_span_that_deviates(decoder):
    with pytest.raises(AssertionError) as caught:
        verified(decoder, SwapsInTheSecondLayer)
    message = str(caught.value)
    assert message.startswith(
        "span 'add_norm' (attn_add · mlp_norm) of layer 1: residual is off by"
    )
    assert message.endswith("where 1e-05 is allowed")


def test_verify_leaves_what_the_plain_chain_leaves(decoder):
    """Values, logits and cache: it can go on in the middle of a run, whatever the span did."""
    spans = PairsNeighbours().spans(decoder.facts, torch.device("cpu"))
    storage = decoder.rig.storage()

    def check(chain, batch):
        (result,) = chain[-1].node.writes
        live = {}
        with torch.inference_mode():
            wanted = execute(cover(chain, []), batch, {})[result].clone()
        stored = [tensor.clone() for tensor in storage]
        compared = compare(cover(chain, spans), chain, batch, tolerance=1e-5, live=live)
        assert any(deviations for _, deviations in compared)
        assert live[result].equal(wanted)
        assert all(a.equal(b) for a, b in zip(storage, stored, strict=True))

    decoder.steps(7, check)


def test_unfilled_memory_is_filled_for_a_while():
    makers = (torch.empty, torch.empty_like, torch.Tensor.new_empty)
    with memory_filled_with(torch.nan):
        x = torch.empty(3)
        assert (
            x.isnan().all() and torch.empty_like(x).isnan().all() and x.new_empty(2).isnan().all()
        )
        assert torch.empty(3, dtype=torch.int32).dtype == torch.int32
    assert (torch.empty, torch.empty_like, torch.Tensor.new_empty) == makers
