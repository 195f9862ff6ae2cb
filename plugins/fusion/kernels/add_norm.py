"""Residual addition and RMSNorm in one pass, RMSNorm alone, and for the first layer embedding and
RMSNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from core.model import rms_norm
from plugins.early_launch import early, let_next_start, wait_for_previous

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _normed(x, gain, eps, N: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm of float32 x [M] (zero beyond N), rounded to dtype before the gain and after it."""
    unit = (x * tl.rsqrt(tl.sum(x * x, 0) / N + eps)).to(dtype).to(tl.float32)
    return (gain.to(tl.float32) * unit).to(dtype)


@triton.jit
def _add_norm_kernel(
    residual_ptr, hidden_ptr, gain_ptr, out_ptr, eps, stride_residual, stride_hidden, stride_out,
    stride_part, N: tl.constexpr, N_PADDED: tl.constexpr, NUM_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # hidden is the sum of its parts, rounded; without one there is nothing to add.
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N_PADDED)
    mask = i < N
    dtype = residual_ptr.dtype.element_ty
    residual_at = residual_ptr + token * stride_residual + i
    gain = tl.load(gain_ptr + i, mask=mask, other=0.0)
    wait_for_previous(PDL)
    added = tl.load(residual_at, mask=mask, other=0.0)
    if NUM_PARTS > 0:
        hidden_at = hidden_ptr + token * stride_hidden + i
        hidden = tl.load(hidden_at, mask=mask, other=0.0).to(tl.float32)
        for part in tl.static_range(1, NUM_PARTS):
            hidden += tl.load(hidden_at + part * stride_part, mask=mask, other=0.0)
        added = (added.to(tl.float32) + hidden.to(dtype).to(tl.float32)).to(dtype)
        tl.store(residual_at, added, mask=mask)
    normed = _normed(added.to(tl.float32), gain, eps, N, dtype)
    tl.store(out_ptr + token * stride_out + i, normed, mask=mask)


@triton.jit
def _embed_norm_kernel(
    token_ids_ptr, token_slots_ptr, last_token_ptr, embed_ptr, gain_ptr, residual_ptr, out_ptr, eps,
    stride_embed, N: tl.constexpr, N_PADDED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N_PADDED)
    mask = i < N
    gain = tl.load(gain_ptr + i, mask=mask, other=0.0)
    token_id = tl.load(token_ids_ptr + token)
    if token_id < 0:
        token_id = tl.load(last_token_ptr + tl.load(token_slots_ptr + token))
    row = tl.load(embed_ptr + token_id.to(tl.int64) * stride_embed + i, mask=mask, other=0.0)
    tl.store(residual_ptr + token * N + i, row, mask=mask)
    normed = _normed(row.to(tl.float32), gain, eps, N, row.dtype)
    tl.store(out_ptr + token * N + i, normed, mask=mask)


def _width(num_columns: int) -> tuple[int, int]:
    """Padded row width and warps: at first eight elements (16 bytes of bf16) a thread."""
    padded = triton.next_power_of_2(num_columns)
    return padded, max(1, min(8, padded // 256))


def add_norm(
    residual_TN: Tensor, hidden_TN: Tensor, gain_N: Tensor, eps: float, out_TN: Tensor
) -> None:
    """residual += hidden, in place; out = rms_norm(residual) * gain. `out` may be `hidden` itself.

    All of one dtype, rows of unit stride. The sum is rounded to dtype first, and what is normed is
    that.
    """
    num_tokens, n = residual_TN.shape
    padded, num_warps = _width(n)
    _add_norm_kernel[(num_tokens,)](
        residual_TN, hidden_TN, gain_N, out_TN, eps,
        residual_TN.stride(0), hidden_TN.stride(0), out_TN.stride(0), 0,
        N=n, N_PADDED=padded, NUM_PARTS=1, num_warps=num_warps, **early(out_TN.device),
    )  # fmt: skip


def add_parts_norm(residual_TN: Tensor, parts_PTN: Tensor, gain_N: Tensor, eps: float) -> Tensor:
    """residual += the sum of parts, in place; rms_norm(residual) * gain, [T, N].

    Parts are float32, contiguous, added up in their order, and their sum is rounded to the dtype of
    the residual.
    """
    num_parts, num_tokens, n = parts_PTN.shape
    out = residual_TN.new_empty(num_tokens, n)
    padded, num_warps = _width(n)
    _add_norm_kernel[(num_tokens,)](
        residual_TN, parts_PTN, gain_N, out, eps, residual_TN.stride(0), n, n, num_tokens * n,
        N=n, N_PADDED=padded, NUM_PARTS=num_parts, num_warps=num_warps, **early(out.device),
    )  # fmt: skip
    return out


def norm(x_TN: Tensor, gain_N: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * gain, [T, N], of rows of unit stride."""
    num_tokens, n = x_TN.shape
    out = x_TN.new_empty(num_tokens, n)
    padded, num_warps = _width(n)
    _add_norm_kernel[(num_tokens,)](
        x_TN, x_TN, gain_N, out, eps, x_TN.stride(0), x_TN.stride(0), n, 0,
        N=n, N_PADDED=padded, NUM_PARTS=0, num_warps=num_warps, **early(out.device),
    )  # fmt: skip
    return out


def add_norm_reference(
    residual_TN: Tensor, hidden_TN: Tensor, gain_N: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(residual, out) of `add_norm`, as the plain nodes compute them."""
    added = residual_TN + hidden_TN
    return added, rms_norm(added, gain_N, eps)


def embed_norm(
    token_ids_T: Tensor,
    token_slots_T: Tensor,
    last_token: Tensor,
    embed_VN: Tensor,
    gain_N: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(residual, hidden), both [T, N]: the embedding of every token, and its norm.

    A token id of -1 stands for `last_token[token_slots[t]]`, int32 [S + 1].
    """
    num_tokens, n = token_ids_T.numel(), embed_VN.shape[1]
    residual, hidden = embed_VN.new_empty(num_tokens, n), embed_VN.new_empty(num_tokens, n)
    padded, num_warps = _width(n)
    _embed_norm_kernel[(num_tokens,)](
        token_ids_T, token_slots_T, last_token, embed_VN, gain_N, residual, hidden, eps,
        embed_VN.stride(0), N=n, N_PADDED=padded, num_warps=num_warps,
    )  # fmt: skip
    return residual, hidden


def embed_norm_reference(
    token_ids_T: Tensor,
    token_slots_T: Tensor,
    last_token: Tensor,
    embed_VN: Tensor,
    gain_N: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """What `embed_norm` returns, as the plain nodes compute it."""
    ids = torch.where(token_ids_T < 0, last_token[token_slots_T.long()], token_ids_T)
    residual = F.embedding(ids, embed_VN)
    return residual, rms_norm(residual, gain_N, eps)
