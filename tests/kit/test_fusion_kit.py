"""Seeded bugs: what the fusion suite is for. Each is `Sound`, spans in plain torch, with one fault.

BUGS names the clauses that must fail; all others must hold.
"""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F

from core.chain import cover, execute
from core.config import OfferConfig
from core.model import rms_norm, rotate
from core.sampler import gumbel_scores
from core.seams import Span
from core.testing.decoder import DecoderRig
from core.testing.fusion import FusionSuite, memory_filled_with, verify
from core.testing.spans import compare


def always(num_tokens, facts, sink):
    return True


class Sound:
    """A fusion set without a fault."""

    api = 1
    lossless = True

    class Config(OfferConfig):
        """No options."""

    def __init__(self, config=None):
        self.config = config or self.Config()

    def spans(self, facts, device):
        return [
            Span("add_norm", ("attn_add", "mlp_norm"), self.add_mlp_norm, always),
            Span("add_norm", ("mlp_add", "attn_norm"), self.add_attn_norm, always),
            Span("add_norm", ("mlp_add", "final_norm"), self.add_final_norm, always),
            Span("qk_rope_write", ("qk_norm", "rope", "kv_write"), self.qk_rope_write, self.writes),
            Span("act_mul", ("act_mul",), self.act_mul, always),
            Span("head", ("lm_head",), self.head, always),
            Span("sample", ("sample",), self.sample, always),
        ]

    def writes(self, num_tokens, facts, sink):
        return sink is not None and sink.kind == "blocks"

    def add_norm(self, residual, hidden, gain, eps):
        residual += hidden
        return residual, rms_norm(residual, gain, eps)

    def add_mlp_norm(self, sites, batch, residual, hidden):
        w = sites[1].weights
        return self.add_norm(residual, hidden, w.mlp_norm, sites[1].facts.rms_norm_eps)

    def add_attn_norm(self, sites, batch, residual, hidden):
        w = sites[1].weights
        return self.add_norm(residual, hidden, w.attn_norm, sites[1].facts.rms_norm_eps)

    def add_final_norm(self, sites, batch, residual, hidden):
        site = sites[1]
        return self.add_norm(residual, hidden, site.model.final_norm, site.facts.rms_norm_eps)[1:]

    def normed(self, k, gain, eps):
        return k if gain is None else rms_norm(k, gain, eps)

    def rotated(self, x, site, batch):
        return rotate(x, site.cos[batch.positions], site.sin[batch.positions])

    rotated_k = rotated

    def qk_rope_write(self, sites, batch, qkv):
        site = sites[0]
        sizes, eps = site.facts.qkv_sizes, site.facts.rms_norm_eps
        q, k, v = (x.unflatten(-1, (-1, site.facts.head_dim)) for x in qkv.split(sizes, -1))
        q = self.rotated(self.normed(q, site.weights.q_norm, eps), site, batch)
        k = self.rotated_k(self.normed(k, self.k_gain(site.weights), eps), site, batch)
        self.write(site.sink, batch, k, v)
        return (q,)

    def k_gain(self, w):
        return w.k_norm

    def write(self, sink, batch, k, v):
        places = sink.slot_map[: len(k)].long()
        for cache, values in ((sink.k, k), (sink.v, v)):
            cache[places // sink.block_size, :, places % sink.block_size] = values

    def act_mul(self, sites, batch, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) * up,)

    def head(self, sites, batch, hidden):
        rows = hidden[batch.logit_rows]
        return (torch.mm(rows, sites[0].model.lm_head.t(), out=batch.logits),)

    def sample(self, sites, batch, logits):
        scores = gumbel_scores(logits, batch.temperature, batch.sample_keys)
        return (scores.argmax(-1).to(torch.int32),)


class AddsAfterTheNorm(Sound):
    """The norm sees what comes out of attention alone."""

    def add_norm(self, residual, hidden, gain, eps):
        normed = rms_norm(hidden, gain, eps)
        return residual + hidden, normed


class SwapsWhatItReturns(Sound):
    def add_mlp_norm(self, sites, batch, residual, hidden):
        return super().add_mlp_norm(sites, batch, residual, hidden)[::-1]


class ReturnsWhatIsDead(Sound):
    """The residual too, which nobody reads after the last norm."""

    def add_final_norm(self, sites, batch, residual, hidden):
        return residual, *super().add_final_norm(sites, batch, residual, hidden)


class ForgetsTheKGain(Sound):
    """Both QK-norms use q's gain."""

    def k_gain(self, w):
        return w.q_norm


class PairsNeighbours(Sound):
    """RoPE turns (2i, 2i + 1), as GPT-J's does, and not (i, i + D/2)."""

    def rotated(self, x, site, batch):
        halves = torch.cat((x[..., ::2], x[..., 1::2]), -1)
        return super().rotated(halves, site, batch).unflatten(-1, (2, -1)).mT.flatten(-2)

    rotated_k = rotated


class StoresKWithoutRope(Sound):
    def rotated_k(self, x, site, batch):
        return x


class PadsIntoTheLastBlock(Sound):
    """Padding has place -1, which an indexed write takes for the last one."""

    def write(self, sink, batch, k, v):
        super().write(sink, batch, k, v)
        if len(k) > batch.host.num_tokens:
            sink.k[-1, :, -1] = k[-1]


class IgnoresTheKind(Sound):
    """Whatever has a sink is taken for blocks."""

    def writes(self, num_tokens, facts, sink):
        return sink is not None


class StopsAt64Tokens(Sound):
    """The grid is one block of 64 rows."""

    def act_mul(self, sites, batch, gate_up):
        (act,) = super().act_mul(sites, batch, gate_up)
        act[64:] = 0
        return (act,)


class TakesRowsForPacked(Sound):
    """Rows are found by their width and not by their stride."""

    def act_mul(self, sites, batch, gate_up):
        packed = gate_up.as_strided(gate_up.shape, (gate_up.shape[1], 1))
        return super().act_mul(sites, batch, packed)


class ReadsUnfilledMemory(Sound):
    """It adds to a sum that nobody has set to 0."""

    def act_mul(self, sites, batch, gate_up):
        (act,) = super().act_mul(sites, batch, gate_up)
        return (torch.empty_like(act).mul_(0) + act,)


class ScalesAWeightAndBack(Sound):
    """What is left is rounding, which no result shows."""

    def add_mlp_norm(self, sites, batch, residual, hidden):
        sites[1].weights.down.div_(3).mul_(3)
        return super().add_mlp_norm(sites, batch, residual, hidden)


class ClaimsScatteredNodes(Sound):
    """Nodes that do not follow each other: an engine refuses them."""

    def spans(self, facts, device):
        return [*super().spans(facts, device), Span("mlp", ("gate_up", "down"), print, always)]


class LeavesTheStaticBuffer(Sound):
    """The sampler's graph goes on reading the logits of another step."""

    def head(self, sites, batch, hidden):
        return (F.linear(hidden[batch.logit_rows], sites[0].model.lm_head),)


class SamplesGreedily(Sound):
    """Whatever the temperature is."""

    def sample(self, sites, batch, logits):
        return (logits.argmax(-1).to(torch.int32),)


COMPUTE, STORE = "spans_compute_what_the_plain_nodes_do", "spans_store_what_kv_write_would"
FUEL, GREEDY = "any_fuel_computes_the_same", "greedy_tokens_are_those_of_the_plain_chain"
BUGS = {
    AddsAfterTheNorm: {COMPUTE, FUEL, GREEDY},
    SwapsWhatItReturns: {COMPUTE, FUEL, GREEDY},
    ReturnsWhatIsDead: {"spans_return_what_is_live_after_them", FUEL, GREEDY},
    ForgetsTheKGain: {STORE, FUEL, GREEDY},
    PairsNeighbours: {COMPUTE, STORE, FUEL, GREEDY},
    StoresKWithoutRope: {STORE, FUEL, GREEDY},
    PadsIntoTheLastBlock: {STORE},
    IgnoresTheKind: {"unknown_sinks_are_left_alone"},
    StopsAt64Tokens: {COMPUTE},
    TakesRowsForPacked: {"strided_values_are_read_right"},
    ReadsUnfilledMemory: {"unfilled_memory_is_not_read"},
    ScalesAWeightAndBack: {"weights_are_unchanged"},
    ClaimsScatteredNodes: {"spans_are_runs_of_the_chain", GREEDY},
    LeavesTheStaticBuffer: {COMPUTE, GREEDY},
    SamplesGreedily: {COMPUTE},
}
# These two take memory as it comes, and it may hold NaN of its own.
PERHAPS = {ReadsUnfilledMemory: {FUEL, GREEDY}}
CLAUSES = [name for name in vars(FusionSuite) if name.startswith("test_")]


def failing(offer, tmp_path):
    """The clauses that do not hold for `offer`, by name."""
    fields = {"kinds": ("qwen3",), "caches": ("paged",), "token_counts": (1, 2, 100)}
    suite = type("S", (FusionSuite,), {"offer": offer, **fields})()
    known = {"kind": suite.kinds, "cache": suite.caches, "tmp_path": [tmp_path]}
    failed = set()
    for clause in CLAUSES:
        test = getattr(suite, clause)
        for values in itertools.product(
            *(known[name] for name in inspect.signature(test).parameters)
        ):
            try:
                test(*values)
            except (AssertionError, ValueError):
                failed.add(clause.removeprefix("test_"))
    return failed


def test_spans_without_a_fault_pass(tmp_path):
    assert failing(Sound, tmp_path) == set()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_the_named_clauses_catch_it_and_no_others(bug, tmp_path):
    assert failing(bug, tmp_path) - PERHAPS.get(bug, set()) == BUGS[bug]


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
    layer = ["qk_rope_write", "add_norm", "act_mul", "add_norm"]
    assert verified(decoder, Sound) == [layer * 2, [*layer * 2, "head"]]
    assert verified(decoder, Sound, strided=True) == [layer * 2, [*layer * 2, "head"]]


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
