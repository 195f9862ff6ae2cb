"""Attention by cuDNN, with the sums that let two parts of one context be merged.

cuDNN builds a plan for every new pair of lengths, some tens of milliseconds on an H200, and keeps
it. So only lengths that recur may come here: multiples of `CHUNK`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from core.batch import BatchShape, Limits
    from core.facts import ModelFacts

CHUNK = 1024  # tokens that prefix and chunk are multiples of: few pairs of lengths, so few plans


def is_whole(shape: BatchShape) -> bool:
    """Whether a step is a chunk behind a prefix whose lengths, both, recur."""
    start = shape.start or 0
    return start > 0 and start % CHUNK == 0 and shape.num_tokens % CHUNK == 0


def prefix_tokens(facts: ModelFacts, limits: Limits) -> int:
    """The longest prefix that a whole chunk may have within `limits`; 0 where there is none, or
    where cuDNN does not serve the model."""
    serves = facts.dtype in (torch.bfloat16, torch.float16)
    serves = serves and facts.head_dim % 8 == 0 and facts.head_dim <= 128
    if not serves or limits.max_num_batched_tokens < CHUNK:
        return 0
    return max(0, limits.max_model_len // CHUNK - 1) * CHUNK


def attention(
    q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of q over k and v, [T, H, D] in their dtype, and the logarithm of each row's sum of
    exponentials, float32 [H, T]. `is_causal`: query t sees keys 0..t, else all."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_SKD, v_SKD))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal, False, scale=scale
    )
    return out[0].transpose(0, 1), lse[0, :, :, 0]
