"""What the engine and the plugins need to know of a model: shapes, constants, what sets K apart."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from core.errors import UserError

if TYPE_CHECKING:
    import torch

MODEL_TYPES = ("qwen2", "qwen3", "llama", "mistral")
_YARN_OPTIONS = "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate".split()


@dataclass(frozen=True)
class ModelFacts:
    """Shapes and constants of one dense decoder (Qwen2, Qwen2.5, Qwen3, Llama, Mistral).

    `max_position` is the longest context in tokens, YaRN's extension included. `rope_scaling` is
    empty for default RoPE, else the parameters of YaRN under their names in transformers 5,
    `factor` and `original_max_position_embeddings` set. RoPE's pairs are (i, i + head_dim/2).
    `softmax_scale` multiplies q·k.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    dtype: torch.dtype = None  # type: ignore[assignment]  # set once the run's dtype is resolved
    eos_token_ids: tuple[int, ...] = ()

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Widths of q, k and v in the packed projection."""
        kv = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv, kv

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers, stored in `dtype`."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def facts_from_config(
    config: Mapping[str, Any], dtype: torch.dtype, generation: Mapping[str, Any] | None = None
) -> ModelFacts:
    """Facts from the content of config.json, in the spelling of transformers 4 or 5.

    End-of-sequence ids come from `generation`, the content of generation_config.json, where it
    names any, else from the config:
    the rule of transformers' `generate`. Raises UserError, naming field and value, for what the
    decoder cannot compute.
    """
    _refuse_unsupported(config)
    kind = config["model_type"]
    hidden, num_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    num_kv_heads = _count(config, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        _refuse("num_key_value_heads", num_kv_heads, f"it must divide the {num_heads} query heads")
    theta, rope_scaling, max_position = _rope(config)
    eos = (generation or {}).get("eos_token_id")
    eos = config.get("eos_token_id") if eos is None else eos
    return ModelFacts(
        num_layers=_count(config, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=_count(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_count(config, "head_dim", 128 if kind == "qwen3" else hidden // num_heads),
        vocab_size=_count(config, "vocab_size"),
        max_position=max_position,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=rope_scaling,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=dtype,
        eos_token_ids=_ids(eos),
    )


def _refuse(name: str, value: object, why: str) -> NoReturn:
    what = f"The config field {name} is {reprlib.repr(value)}, but {why}"
    advice = "Qwen2, Qwen2.5, Qwen3, Llama or Mistral checkpoint with full attention."
    raise UserError(f"{what}; choose a published, dense {advice}")


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        _refuse("model_type", kind, f"the supported ones are {', '.join(MODEL_TYPES)}")
    if (quantization := config.get("quantization_config")) is not None:
        _refuse("quantization_config", quantization, "only unquantised weights are supported")
    if config.get("hidden_act", "silu") != "silu":
        _refuse("hidden_act", config["hidden_act"], "the decoder computes silu")
    for name in ("attention_bias", "mlp_bias"):
        if kind != "qwen2" and config.get(name):
            _refuse(name, config[name], "the decoder has no bias there")
    # Qwen's windows are mostly off; Mistral's is on unless it is null.
    window = config.get("sliding_window", 4096)
    used = kind == "mistral" or (kind != "llama" and config.get("use_sliding_window"))
    all_full = set(config.get("layer_types") or ()) == {"full_attention"}
    if used and window is not None and not all_full:
        _refuse("sliding_window", window, "sliding-window attention is not supported")


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive number; `default` stands in where the field is missing or null."""
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int) or value < 1:
        _refuse(name, value, "it must be a positive number")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value] * (value is not None)
    if not all(isinstance(i, int) for i in ids):
        _refuse("eos_token_id", value, "it is a token id or a list of them")
    return tuple(ids)


def _rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any], int]:
    """Base, YaRN parameters (empty for default RoPE) and the longest context in tokens.

    transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 both in `rope_parameters`;
    where a file has more than one, precedence is that of transformers 5.
    """
    where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(where) or {}
    if not isinstance(given, dict):
        _refuse(where, given, "it is an object")
    max_position = _count(config, "max_position_embeddings")
    theta = float(given.get("rope_theta", config.get("rope_theta", 10000.0)))
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        _refuse("partial_rotary_factor", partial, "the decoder rotates whole heads")
    if any(isinstance(value, dict) for value in given.values()):
        _refuse(where, given, "one RoPE must serve all layers")
    rope_type = given.get("rope_type", given.get("type", "default"))
    if rope_type == "default":
        return theta, {}, max_position
    if rope_type != "yarn":
        _refuse(f"{where}.rope_type", rope_type, "the supported RoPE types are default and yarn")
    length = "original_max_position_embeddings"
    original = config.get(length) or given.get(length) or max_position
    factor = float(given.get("factor") or max_position / original)
    options = {name: given[name] for name in _YARN_OPTIONS if name in given}
    yarn = {"rope_type": "yarn", "factor": factor, length: original, **options}
    # Qwen2.5 keeps max_position_embeddings at the original length and means factor times that.
    return theta, yarn, max(max_position, int(factor * original))
