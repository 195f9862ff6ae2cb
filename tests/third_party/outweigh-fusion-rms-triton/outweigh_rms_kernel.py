"""RMSNorm of rows: the kernel, and its oracle in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _rms_norm_kernel(x_ptr, gain_ptr, out_ptr, stride, eps, N: tl.constexpr, WIDTH: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + token * stride + i, mask=i < N, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / N + eps)
    dtype = out_ptr.dtype.element_ty
    gain = tl.load(gain_ptr + i, mask=i < N, other=0.0).to(tl.float32)
    normalised = (x * scale).to(dtype).to(tl.float32)
    tl.store(out_ptr + token * N + i, (gain * normalised).to(dtype), mask=i < N)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [T, N], whose rows have unit stride, times gain [N]: [T, N] in x's dtype."""
    num_tokens, n = x.shape
    out = x.new_empty(num_tokens, n)
    width = triton.next_power_of_2(n)
    _rms_norm_kernel[(num_tokens,)](x, gain, out, x.stride(0), eps, N=n, WIDTH=width)
    return out


def rms_norm_reference(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """What `rms_norm` returns, in plain torch: the oracle."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return gain * wide.to(x.dtype)
