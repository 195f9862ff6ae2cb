"""RoPE tables, default and YaRN (arXiv:2309.00071), computed bit for bit as transformers does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from core.facts import ModelFacts


def rope_tables(
    facts: ModelFacts, max_model_len: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """cos and sin of the positions below `max_model_len`, float32 [max_model_len, head_dim / 2].

    YaRN's attention factor is multiplied into both, so q·k carries its square.
    """
    inv_freq_E, attention_factor = _inverse_frequencies(facts)
    positions_T = torch.arange(max_model_len, dtype=torch.float32, device=device)
    angles_TE = positions_T[:, None] * inv_freq_E.to(device)
    return angles_TE.cos() * attention_factor, angles_TE.sin() * attention_factor


def _inverse_frequencies(facts: ModelFacts) -> tuple[Tensor, float]:
    """Radians a position, float32 [head_dim / 2], on the CPU as transformers computes them."""
    dim = facts.head_dim
    periods_E = facts.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if not facts.rope_scaling:
        return 1.0 / periods_E, 1.0
    yarn = facts.rope_scaling
    # 1 where a pair keeps its frequency, as it turns often in the original context; 0 if stretched.
    keep_E = 1 - _ramp(*_correction_range(yarn, facts.rope_theta, dim), dim // 2)
    stretched_E, kept_E = 1.0 / (yarn["factor"] * periods_E), 1.0 / periods_E
    return stretched_E * (1 - keep_E) + kept_E * keep_E, _attention_factor(yarn)


def _correction_range(yarn: dict[str, Any], theta: float, dim: int) -> tuple[float, float]:
    """The pairs between which frequencies go from kept to stretched."""

    def pair_that_turns(num_turns: float) -> float:
        length = yarn["original_max_position_embeddings"]
        return (dim * math.log(length / (num_turns * 2 * math.pi))) / (2 * math.log(theta))

    low = pair_that_turns(yarn.get("beta_fast") or 32)
    high = pair_that_turns(yarn.get("beta_slow") or 1)
    if yarn.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, dim - 1)


def _ramp(low: float, high: float, num_pairs: int) -> Tensor:
    if low == high:
        high += 0.001  # a step instead of a division by zero
    return ((torch.arange(num_pairs, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def _attention_factor(yarn: dict[str, Any]) -> float:
    def magnitude(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(yarn["factor"]) + 1.0 if yarn["factor"] > 1 else 1.0

    if yarn.get("attention_factor") is not None:
        return float(yarn["attention_factor"])
    if yarn.get("mscale") and yarn.get("mscale_all_dim"):
        return magnitude(yarn["mscale"]) / magnitude(yarn["mscale_all_dim"])
    return magnitude()
