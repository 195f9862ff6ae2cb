"""What is taken off the keys before they are rounded: a constant shift, and a factor a channel.

A few key channels of Qwen2.5 carry a constant hundreds of times larger than anything else in them:
the bias of the projection, in pairs of channels that RoPE hardly turns. With one scale a token and
head, few bits are left for the rest. So K is stored as (K - shift) / factor, and attention reads
(Q · factor) · ((K - shift) / factor)ᵀ:

- The *shift* is the mean of what the bias adds to a key over all positions. It moves all scores of
  a query by the same Q · shift, which softmax cancels, so that nobody ever adds it back (the move
  of SageAttention, arXiv:2410.02367, there with the mean of the keys of a call).
- The *factor* gives all channels one size (SmoothQuant, arXiv:2211.10438, on K as in QServe,
  arXiv:2405.04532). A pair of channels that RoPE mixes has one factor, so it commutes with it.

No weight is rewritten. Mean KL against full precision, Qwen2.5-Coder-0.5B, 6,144 positions of three
texts: neither 2.4e-2, factors alone 5.8e-4, both 2.4e-4, and 3.2e-4 with the factors taken from 512
tokens of data.

Shapes: L layers, K key/value heads, D head_dim, E = D / 2 pairs (i, i + E).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from core.errors import UserError
from core.rope import rope_tables
from plugins.kv.paged import Paged

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq
    from pathlib import Path

    from torch import Tensor

    from core.batch import Batch, Limits
    from core.facts import ModelFacts
    from core.seams import KVSink
    from core.weights import LayerWeights

# Standard deviations between the mean and the largest of some 100 normal numbers. 2.1 in place of 3
# makes no difference that 2,304 positions of other texts could show (mean KL 2.21e-4, 2.16e-4).
_REACH = 3.0
_RANGE = "key_range"


class KeyMoments(NamedTuple):
    """Mean and standard deviation of each key channel before RoPE, float32 [K * D]."""

    mean: Tensor
    deviation: Tensor


def key_moments(layer: LayerWeights) -> KeyMoments:
    """What the weights alone say of the keys of a layer.

    The input of the projection is a normalised vector times `attn_norm`; were its entries
    independent, a channel had its bias as mean and the norm of its row as deviation. A key norm
    divides by the root mean square over a head and multiplies by its gain.
    """
    q_size = layer.o.shape[1]
    keys = slice(q_size, (q_size + len(layer.qkv)) // 2)
    deviation = (layer.qkv[keys].float() * layer.attn_norm.float()).norm(dim=1)
    mean = torch.zeros_like(deviation)
    if layer.qkv_bias is not None:
        mean = layer.qkv_bias[keys].float().clone()
    if layer.k_norm is None:
        return KeyMoments(mean, deviation)
    gain = layer.k_norm.float()
    power = (mean.square() + deviation.square()).unflatten(0, (-1, len(gain)))
    ratio = (gain * power.mean(-1, keepdim=True).rsqrt()).flatten()
    return KeyMoments(mean * ratio, deviation * ratio.abs())


class MeanTurn(NamedTuple):
    """RoPE averaged over positions, float32 [E] each.

    A pair that turns often has cos = sin = 0 and rest = 1; one that stands still cos = 1, rest = 0.
    """

    cos: Tensor
    sin: Tensor
    rest: Tensor  # root mean square of what the mean leaves
    size: Tensor  # factor of length: 1, but for YaRN


def mean_turn(facts: ModelFacts, num_positions: int) -> MeanTurn:
    """The mean over positions 0..num_positions-1. In float64: the rest is a small difference."""
    cos, sin = (table.double() for table in rope_tables(facts, num_positions, "cpu"))
    size, mean_cos, mean_sin = cos[0], cos.mean(0), sin.mean(0)
    rest = (size.square() - mean_cos.square() - mean_sin.square()).clamp(min=0).sqrt()
    return MeanTurn(*(x.float() for x in (mean_cos, mean_sin, rest, size)))


def no_turn(turn: MeanTurn) -> MeanTurn:
    """The turn that shifts nothing: all of the mean is left to the factor."""
    zero = torch.zeros_like(turn.cos)
    return MeanTurn(zero, zero, turn.size, turn.size)


def from_weights(moments: KeyMoments, turn: MeanTurn, num_heads: int) -> tuple[Tensor, Tensor]:
    """Shift and factor, float32 [K, D] each, on the CPU."""
    mean, deviation = (x.cpu().view(num_heads, -1) for x in moments)
    a, b = mean.chunk(2, -1)
    shift = torch.cat((a * turn.cos - b * turn.sin, b * turn.cos + a * turn.sin), -1)
    pairs = _lengths(mean) * turn.rest + _REACH * _lengths(deviation) * turn.size
    return shift, _factor(pairs)


def from_range(key_range: Tensor, shift: Tensor) -> Tensor:
    """Factor [..., D] of the smallest and largest keys seen after RoPE, [2, ..., D]."""
    smallest, largest = key_range
    radius = torch.maximum(largest - shift, shift - smallest)
    return _factor(radius.unflatten(-1, (2, -1)).amax(-2))


def _lengths(x: Tensor) -> Tensor:
    """[..., D] to [..., E]."""
    return x.unflatten(-1, (2, -1)).square().sum(-2).sqrt()


def _factor(pairs: Tensor) -> Tensor:
    """[..., E] to [..., D], at most 1 in each head, so that Q · factor overflows nowhere.

    Only the ratios matter. A pair without size keeps factor 1.
    """
    factors = torch.where(pairs > 0, pairs / pairs.amax(-1, keepdim=True), 1.0)
    return torch.cat((factors, factors), -1)


class KeyRecorder(Paged):
    """`paged` that notes the smallest and largest key of every channel, [2, L, K, D] float32."""

    graph_safe: ClassVar[bool] = False
    key_range: Tensor

    def bind(
        self, facts: ModelFacts, limits: Limits, kv_cache_bytes: int, device: torch.device
    ) -> None:
        super().bind(facts, limits, kv_cache_bytes, device)
        shape = (facts.num_layers, facts.num_kv_heads, facts.head_dim)
        nothing = torch.full(shape, float("inf"), device=device)
        self.key_range = torch.stack((nothing, -nothing))

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        assert batch.host is not None
        smallest, largest = torch.aminmax(k[: batch.host.num_tokens].float(), dim=0)
        seen = self.key_range[:, layer]
        seen[0], seen[1] = torch.minimum(seen[0], smallest), torch.maximum(seen[1], largest)
        super().write(layer, k, v, batch)

    def sink(self, layer: int) -> KVSink | None:
        """None: what a span writes by itself would not be seen."""
        return None


def record_keys(path: str | Path, texts: Seq[str | Seq[int]], **config: Any) -> None:
    """Write what k_smoothing "calibrated" reads: the range of all keys over `texts`, safetensors.

    `config` are the fields of `core.config.RunConfig` beside kv and graphs; a text may be given as
    token ids. Some hundreds of tokens like those to be served are enough.
    """
    from safetensors.torch import save_file

    from core import Engine

    kv = KeyRecorder(KeyRecorder.Config())
    with Engine(kv=kv, graphs="none", **config) as engine:
        for text in texts:
            ids = engine.tokenizer.encode(text) if isinstance(text, str) else text
            engine.score(ids, lambda first, logits, targets: None)
    save_file({_RANGE: kv.key_range.cpu()}, path)


def read_range(path: str, facts: ModelFacts) -> Tensor:
    """The [2, L, K, D] that `record_keys` wrote. Raises UserError if it is not of this model."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    wanted = (2, facts.num_layers, facts.num_kv_heads, facts.head_dim)
    action = "record this model's keys with plugins.kv.smoothing.record_keys"
    try:
        key_range = load_file(path)[_RANGE]
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(
            f"kv.key_range={path} holds no tensor {_RANGE} ({type(error).__name__}: {error}); "
            f"{action}"
        ) from error
    if tuple(key_range.shape) != wanted:
        raise UserError(
            f"kv.key_range={path} is of shape {list(key_range.shape)} where the model has "
            f"{list(wanted)}; {action}"
        )
    return key_range
