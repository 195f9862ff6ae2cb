"""Smoothing of keys: which factor of each channel goes from K to Q before K is rounded.

A few key channels of Qwen2.5 carry a constant hundreds of times larger than the rest (the bias of
the projection). One scale a token and head then leaves some bits to every other channel: mean KL
1.3e-2 against the same cache in full precision. Stored as K / smoothing, with Q · smoothing in
attention, all channels are of one size and the scores are the same (the move of SmoothQuant,
arXiv:2211.10438, on K as in QServe, arXiv:2405.04532, but with no weight rewritten).

RoPE mixes channels i and i + D/2, so a pair has one factor and smoothing commutes with it.

Shapes: L layers, K key/value heads, D head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from core.errors import UserError
from plugins.kv.paged import Paged

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq
    from pathlib import Path

    from torch import Tensor

    from core.batch import Batch, Limits
    from core.facts import ModelFacts
    from core.seams import KVSink
    from core.weights import LayerWeights

# How far a channel strays from its mean, in standard deviations: the largest of 64 to 128 normal
# numbers is about that far out.
_REACH = 3.0
_STATS = "key_absmax"


def expected_keys(layer: LayerWeights) -> Tensor:
    """About the largest |k| of every key channel before RoPE, float32 [K * D], from weights alone.

    The input of the projection is a normalised vector times `attn_norm`. If its entries are
    independent, channel c has mean bias_c and the deviation of a row norm. A key norm divides by
    the root mean square over its head and multiplies by its gain.
    """
    q_size = layer.o.shape[1]
    keys = slice(q_size, (q_size + len(layer.qkv)) // 2)
    deviation = (layer.qkv[keys].float() * layer.attn_norm.float()).norm(dim=1)
    mean = torch.zeros_like(deviation)
    if layer.qkv_bias is not None:
        mean = layer.qkv_bias[keys].float().abs()
    largest = mean + _REACH * deviation
    if layer.k_norm is None:
        return largest
    gain = layer.k_norm.float().abs()
    power = (mean.square() + deviation.square()).unflatten(0, (-1, len(gain)))
    return (largest.view_as(power) * gain * power.mean(-1, keepdim=True).rsqrt()).flatten()


def from_weights(expected: Tensor) -> Tensor:
    """Smoothing [..., D] of `expected_keys` [..., D]: a pair turns, so its length counts."""
    halves = expected.unflatten(-1, (2, -1))
    return _normalized(halves.square().sum(-2).sqrt())


def from_stats(key_absmax: Tensor) -> Tensor:
    """Smoothing [..., D] of the largest |k| seen after RoPE, [..., D]."""
    return _normalized(key_absmax.float().unflatten(-1, (2, -1)).amax(-2))


def _normalized(pairs: Tensor) -> Tensor:
    """[..., D / 2] to [..., D], at most 1 in each head, so that Q · smoothing overflows nowhere.

    A pair that is always 0 is left as it is.
    """
    largest = pairs.amax(-1, keepdim=True)
    factors = torch.where(pairs > 0, pairs / largest, 1.0)
    return torch.cat((factors, factors), -1)


class KeyRecorder(Paged):
    """`paged` that notes the largest |k| of every channel, float32 [L, K, D], in `key_absmax`."""

    graph_safe: ClassVar[bool] = False

    def bind(
        self, facts: ModelFacts, limits: Limits, kv_cache_bytes: int, device: torch.device
    ) -> None:
        super().bind(facts, limits, kv_cache_bytes, device)
        shape = (facts.num_layers, facts.num_kv_heads, facts.head_dim)
        self.key_absmax = torch.zeros(shape, device=device)

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        assert batch.host is not None
        seen = k[: batch.host.num_tokens].abs().amax(0).float()
        self.key_absmax[layer] = torch.maximum(self.key_absmax[layer], seen)
        super().write(layer, k, v, batch)

    def sink(self, layer: int) -> KVSink | None:
        """None: a span that writes by itself would not be seen."""
        return None


def record_keys(path: str | Path, texts: Seq[str | Seq[int]], **config: Any) -> None:
    """Write what k_smoothing "calibrated" reads: the largest keys over `texts`, a safetensors file.

    `config` are the fields of `core.config.RunConfig` beside kv and graphs; texts may be given as
    token ids. Some hundreds of tokens like those to be served are enough.
    """
    from safetensors.torch import save_file

    from core import Engine

    kv = KeyRecorder(KeyRecorder.Config())
    with Engine(kv=kv, graphs="none", **config) as engine:
        for text in texts:
            ids = engine.tokenizer.encode(text) if isinstance(text, str) else text
            engine.score(ids, lambda first, logits, targets: None)
    save_file({_STATS: kv.key_absmax.cpu()}, path)


def read_stats(path: str, facts: ModelFacts) -> Tensor:
    """The [L, K, D] that `record_keys` wrote. Raises UserError if it is not of this model."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    wanted = (facts.num_layers, facts.num_kv_heads, facts.head_dim)
    action = "record this model's keys with plugins.kv.smoothing.record_keys"
    try:
        stats = load_file(path)[_STATS]
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(
            f"kv.key_stats={path} holds no '{_STATS}' ({type(error).__name__}: {error}): {action}"
        ) from error
    if tuple(stats.shape) != wanted:
        raise UserError(
            f"kv.key_stats={path} holds keys of {list(stats.shape)} layers, heads and channels and "
            f"the model has {list(wanted)}: {action}"
        )
    return stats
