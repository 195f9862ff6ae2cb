"""The decoder, written once in plain torch, as one flat chain of atomic nodes.

    embed · (attn_norm · qkv_proj · qk_norm · rope · kv_write · attention · o_proj · attn_add ·
             mlp_norm · gate_up · act_mul · down · mlp_add)* · final_norm · lm_head

A node reads and writes named values. A fused span replaces a run of nodes; `core.chain.cover` picks
the spans for a token bucket and gives the list of operations that a step runs. The plain nodes are
the oracle of every span: they round where transformers rounds, in bf16 too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from core.batch import Batch
    from core.facts import ModelFacts
    from core.seams import KVManager, KVSink
    from core.weights import ModelWeights

VALUES = ("residual", "hidden", "qkv", "q", "k", "v", "ctx", "gate_up", "act", "logits", "sampled")


@dataclass(frozen=True)
class Site:
    """Where a node stands: its layer and all that a node or a span may use there.

    `weights` are LayerWeights; for embed, final_norm and lm_head they are None and `layer` -1.
    `cos` and `sin` are float32 [max_model_len, head_dim / 2], scaled as the RoPE type asks. `sink`
    is the layer's KV sink.
    """

    layer: int
    facts: ModelFacts
    model: ModelWeights
    weights: Any
    cos: Tensor
    sin: Tensor
    kv: KVManager
    sink: KVSink | None


class Node(NamedTuple):
    """An atomic step. `run(site, batch, *reads)` returns what it writes, as a tuple."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    run: Callable[..., tuple[Tensor, ...]]


class Operation(NamedTuple):
    """A node or a span, placed. `writes` are the values that are live after it, `nodes` what it
    computes."""

    name: str
    sites: Site | tuple[Site, ...]
    run: Callable[..., tuple[Tensor, ...]]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    nodes: tuple[str, ...]


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension in float32 or wider, rounded to x.dtype before the gain."""
    return gain * F.rms_norm(x, x.shape[-1:], eps=eps)


def rotate(cos_TE: Tensor, sin_TE: Tensor, *xs_TND: Tensor) -> tuple[Tensor, ...]:
    """RoPE of each x in the half-split pairing, computed in x's dtype. cos, sin are [T, D / 2]."""
    cos, sin = (half[:, None].to(xs_TND[0].dtype) for half in (cos_TE, sin_TE))
    own, other = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    partners = (torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1) for x in xs_TND)
    return tuple(x * own + y * other for x, y in zip(xs_TND, partners, strict=True))


def _begin_step(site: Site, batch: Batch) -> tuple[Tensor, ...]:
    site.kv.begin_step(batch)
    return ()


def _embed(site: Site, batch: Batch) -> tuple[Tensor, ...]:
    ids = torch.where(batch.token_ids < 0, batch.last_token[batch.token_slots], batch.token_ids)
    return (F.embedding(ids, site.model.embed),)


def _norm(gain: str, site: Site, batch: Batch, residual: Tensor) -> tuple[Tensor, ...]:
    return (rms_norm(residual, getattr(site.weights, gain), site.facts.rms_norm_eps),)


def _linear(field: str, site: Site, batch: Batch, x: Tensor) -> tuple[Tensor, ...]:
    w = site.weights
    return (F.linear(x, getattr(w, field), getattr(w, f"{field}_bias", None)),)


def _qk_norm(site: Site, batch: Batch, qkv: Tensor) -> tuple[Tensor, ...]:
    facts, w = site.facts, site.weights
    parts = qkv.split_with_sizes(facts.qkv_sizes, -1)
    q, k, v = (part.unflatten(-1, (-1, facts.head_dim)) for part in parts)
    if w.q_norm is not None and w.k_norm is not None:
        q = rms_norm(q, w.q_norm, facts.rms_norm_eps)
        k = rms_norm(k, w.k_norm, facts.rms_norm_eps)
    return q, k, v


def _rope(site: Site, batch: Batch, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    return rotate(site.cos[batch.positions], site.sin[batch.positions], q, k)


def _kv_write(site: Site, batch: Batch, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    site.kv.write(site.layer, k, v, batch)
    return ()


def _attention(site: Site, batch: Batch, q: Tensor) -> tuple[Tensor, ...]:
    return (site.kv.attend(site.layer, q, batch),)


def _add(site: Site, batch: Batch, residual: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
    return (residual + hidden,)


def _act_mul(site: Site, batch: Batch, gate_up: Tensor) -> tuple[Tensor, ...]:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) * up,)


def _final_norm(site: Site, batch: Batch, residual: Tensor) -> tuple[Tensor, ...]:
    return (rms_norm(residual, site.model.final_norm, site.facts.rms_norm_eps),)


def _lm_head(site: Site, batch: Batch, hidden: Tensor) -> tuple[Tensor, ...]:
    rows = hidden.index_select(0, batch.logit_rows)
    if batch.logits is None:
        return (F.linear(rows, site.model.lm_head),)
    # The static buffer: a graph of its own, the sampler's, reads it.
    return (torch.mm(rows, site.model.lm_head.t(), out=batch.logits),)


BEGIN_STEP = Node("begin_step", (), (), _begin_step)  # in front of the chain in a step of an engine
EMBED = Node("embed", (), ("residual",), _embed)
LAYER = (
    Node("attn_norm", ("residual",), ("hidden",), partial(_norm, "attn_norm")),
    Node("qkv_proj", ("hidden",), ("qkv",), partial(_linear, "qkv")),
    Node("qk_norm", ("qkv",), ("q", "k", "v"), _qk_norm),
    Node("rope", ("q", "k"), ("q", "k"), _rope),
    Node("kv_write", ("k", "v"), (), _kv_write),
    Node("attention", ("q",), ("ctx",), _attention),
    Node("o_proj", ("ctx",), ("hidden",), partial(_linear, "o")),
    Node("attn_add", ("residual", "hidden"), ("residual",), _add),
    Node("mlp_norm", ("residual",), ("hidden",), partial(_norm, "mlp_norm")),
    Node("gate_up", ("hidden",), ("gate_up",), partial(_linear, "gate_up")),
    Node("act_mul", ("gate_up",), ("act",), _act_mul),
    Node("down", ("act",), ("hidden",), partial(_linear, "down")),
    Node("mlp_add", ("residual", "hidden"), ("residual",), _add),
)
FINAL_NORM = Node("final_norm", ("residual",), ("hidden",), _final_norm)
LM_HEAD = Node("lm_head", ("hidden",), ("logits",), _lm_head)
