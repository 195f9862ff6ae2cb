"""Fusion sets with one fault each. Each is `Sound`, spans in plain torch."""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F

from core import OfferConfig, hookimpl
from core.model import rms_norm, rotate
from core.sampler import gumbel_scores
from core.seams import Span


def always(num_tokens, facts, sink):
    return True


class Sound:
    """A fusion set without a fault."""

    api = 1
    lossless = True
    held_to = {"kinds": ("qwen3",), "caches": ("paged",), "token_counts": (1, 2, 100)}

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
        return rotate(site.cos[batch.positions], site.sin[batch.positions], x)[0]

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


@hookimpl
def outweigh_register_fusion(register):
    for name, found in globals().items():
        if inspect.isclass(found) and found.__module__ == __name__:
            register(name, found)
