"""The `run` of each span: from sites, batch and values of the chain to a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from plugins.fusion.kernels.act_mul import act_mul as _act_mul
from plugins.fusion.kernels.add_norm import (
    add_norm as _add_norm,
    add_parts_norm,
    embed_norm as _embed_norm,
    norm as _norm,
)
from plugins.fusion.kernels.few_rows import few_rows, few_rows_parts, one_row, suits_parts
from plugins.fusion.kernels.one_tile import one_tile, one_tile_parts
from plugins.fusion.kernels.qk_rope_write import qk_rope_write as _qk_rope_write
from plugins.fusion.kernels.qk_rope_write_int8 import qk_rope_write_int8 as _qk_rope_write_int8
from plugins.fusion.kernels.sample import sample as _sample

if TYPE_CHECKING:
    from torch import Tensor

    from core.batch import Batch
    from core.model import Site
    from core.seams import KVSink
    from plugins.kv.int8_storage import Int8Sink

Sites = tuple["Site", ...]


def _add_norm_in_place(site: Site, residual: Tensor, hidden: Tensor, gain: Tensor) -> None:
    _add_norm(residual, hidden, gain, site.facts.rms_norm_eps, hidden)


def embed_norm(sites: Sites, batch: Batch) -> tuple[Tensor, Tensor]:
    """embed · attn_norm of the first layer: (residual, hidden)."""
    ids, slots = batch.token_ids, batch.token_slots
    embed, gain = sites[0].model.embed, sites[1].weights.attn_norm
    return _embed_norm(ids, slots, batch.last_token, embed, gain, sites[0].facts.rms_norm_eps)


def add_mlp_norm(
    sites: Sites, batch: Batch, residual: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """attn_add · mlp_norm: (residual, hidden), both in place."""
    _add_norm_in_place(sites[1], residual, hidden, sites[1].weights.mlp_norm)
    return residual, hidden


def add_attn_norm(
    sites: Sites, batch: Batch, residual: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """mlp_add · attn_norm of the next layer: (residual, hidden), both in place."""
    _add_norm_in_place(sites[1], residual, hidden, sites[1].weights.attn_norm)
    return residual, hidden


def add_final_norm(sites: Sites, batch: Batch, residual: Tensor, hidden: Tensor) -> tuple[Tensor]:
    """mlp_add · final_norm: (hidden,), in place; nothing reads the residual after it."""
    _add_norm_in_place(sites[1], residual, hidden, sites[1].model.final_norm)
    return (hidden,)


def qk_rope_write(sites: Sites, batch: Batch, qkv: Tensor) -> tuple[Tensor]:
    """qk_norm · rope · kv_write: (q,); keys and values go straight to the sink."""
    site = sites[0]
    facts, w, sink = site.facts, site.weights, cast("KVSink", site.sink)
    gains = (w.q_norm, w.k_norm) if w.q_norm is not None and w.k_norm is not None else None
    given = (qkv, gains, site.cos, site.sin, batch.positions)
    fresh = sink.fresh if batch.shape.lone else None
    rest: dict[str, Any] = {"num_heads": facts.num_heads, "eps": facts.rms_norm_eps}
    if sink.kind == "int8_blocks":
        return (_qk_rope_write_int8(*given, cast("Int8Sink", sink), fresh, **rest),)
    caches, slot_map = (sink.k, sink.v), sink.slot_map
    return (_qk_rope_write(*given, caches, slot_map, fresh, block_size=sink.block_size, **rest),)


def act_mul(sites: Sites, batch: Batch, gate_up: Tensor) -> tuple[Tensor]:
    """act_mul: (act,)."""
    return (_act_mul(gate_up),)


def attn_norm(sites: Sites, batch: Batch, residual: Tensor) -> tuple[Tensor]:
    """attn_norm: (hidden,)."""
    return (_norm(residual, sites[0].weights.attn_norm, sites[0].facts.rms_norm_eps),)


def mlp_norm(sites: Sites, batch: Batch, residual: Tensor) -> tuple[Tensor]:
    """mlp_norm: (hidden,)."""
    return (_norm(residual, sites[0].weights.mlp_norm, sites[0].facts.rms_norm_eps),)


def final_norm(sites: Sites, batch: Batch, residual: Tensor) -> tuple[Tensor]:
    """final_norm: (hidden,)."""
    return (_norm(residual, sites[0].model.final_norm, sites[0].facts.rms_norm_eps),)


# -------- for one row of tokens


def norm_qkv(sites: Sites, batch: Batch, residual: Tensor) -> tuple[Tensor]:
    """attn_norm · qkv_proj: (qkv,)."""
    w, eps = sites[0].weights, sites[0].facts.rms_norm_eps
    return (one_row(residual, w.qkv, w.qkv_bias, gain_K=w.attn_norm, eps=eps),)


def norm_gate_up_act(sites: Sites, batch: Batch, residual: Tensor) -> tuple[Tensor]:
    """mlp_norm · gate_up · act_mul: (act,)."""
    w, eps = sites[0].weights, sites[0].facts.rms_norm_eps
    return (one_row(residual, w.gate_up, gain_K=w.mlp_norm, eps=eps, act=True),)


def o_add(sites: Sites, batch: Batch, residual: Tensor, ctx: Tensor) -> tuple[Tensor]:
    """o_proj · attn_add: (residual,), in place."""
    return (one_row(ctx, sites[0].weights.o, residual_N=residual, out_N=residual),)


def down_add(sites: Sites, batch: Batch, residual: Tensor, act: Tensor) -> tuple[Tensor]:
    """down · mlp_add: (residual,), in place."""
    return (one_row(act, sites[0].weights.down, residual_N=residual, out_N=residual),)


# -------- for few rows


def qkv_proj(sites: Sites, batch: Batch, hidden: Tensor) -> tuple[Tensor]:
    """qkv_proj: (qkv,)."""
    return (few_rows(hidden, sites[0].weights.qkv, sites[0].weights.qkv_bias),)


def o_proj(sites: Sites, batch: Batch, ctx: Tensor) -> tuple[Tensor]:
    """o_proj: (hidden,)."""
    return (few_rows(ctx, sites[0].weights.o),)


def gate_up_act(sites: Sites, batch: Batch, hidden: Tensor) -> tuple[Tensor]:
    """gate_up · act_mul: (act,)."""
    return (few_rows(hidden, sites[0].weights.gate_up, act=True),)


def down(sites: Sites, batch: Batch, act: Tensor) -> tuple[Tensor]:
    """down: (hidden,)."""
    return (few_rows(act, sites[0].weights.down),)


# -------- for the rows of one tile


def qkv_proj_tile(sites: Sites, batch: Batch, hidden: Tensor) -> tuple[Tensor]:
    """qkv_proj: (qkv,)."""
    return (one_tile(hidden, sites[0].weights.qkv, sites[0].weights.qkv_bias),)


def gate_up_act_tile(sites: Sites, batch: Batch, hidden: Tensor) -> tuple[Tensor]:
    """gate_up · act_mul: (act,)."""
    return (one_tile(hidden, sites[0].weights.gate_up, act=True),)


def _parts(x: Tensor, weight: Tensor) -> Tensor:
    """Of a product whose programs share K, by the kernel for so many rows."""
    is_few = suits_parts(*x.shape)
    return few_rows_parts(x, weight) if is_few else one_tile_parts(x, weight)


def o_add_mlp_norm(
    sites: Sites, batch: Batch, residual: Tensor, ctx: Tensor
) -> tuple[Tensor, Tensor]:
    """o_proj · attn_add · mlp_norm: (residual, hidden), the first in place."""
    parts = _parts(ctx, sites[0].weights.o)
    gain, eps = sites[2].weights.mlp_norm, sites[2].facts.rms_norm_eps
    return residual, add_parts_norm(residual, parts, gain, eps)


def down_add_attn_norm(
    sites: Sites, batch: Batch, residual: Tensor, act: Tensor
) -> tuple[Tensor, Tensor]:
    """down · mlp_add · attn_norm of the next layer: (residual, hidden), the first in place."""
    parts = _parts(act, sites[0].weights.down)
    gain, eps = sites[2].weights.attn_norm, sites[2].facts.rms_norm_eps
    return residual, add_parts_norm(residual, parts, gain, eps)


def down_add_final_norm(sites: Sites, batch: Batch, residual: Tensor, act: Tensor) -> tuple[Tensor]:
    """down · mlp_add · final_norm: (hidden,); nothing reads the residual after it."""
    parts = _parts(act, sites[0].weights.down)
    gain, eps = sites[2].model.final_norm, sites[2].facts.rms_norm_eps
    return (add_parts_norm(residual, parts, gain, eps),)


def sample(sites: Sites, batch: Batch, logits: Tensor) -> tuple[Tensor]:
    """sample: (sampled,), int32 [R]."""
    sampled = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    _sample(logits, batch.temperature, batch.sample_keys, sampled)
    return (sampled,)
