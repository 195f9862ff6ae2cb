"""silu(gate) * up of a packed gate and up projection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
import triton
import triton.language as tl

from plugins.early_launch import after_previous, early

if TYPE_CHECKING:
    from torch import Tensor

_ELEMENTS = 1024  # of the output a program


@triton.jit
def _act_mul_kernel(
    gate_up_ptr, out_ptr, stride_token,
    N: tl.constexpr, ELEMENTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = i < N
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + token * stride_token + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * stride_token + N + i, mask=mask, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + token * N + i, (silu * up).to(dtype), mask=mask)


def act_mul(gate_up_T2I: Tensor) -> Tensor:
    """silu(gate) * up, [T, I], of gate_up [T, 2 I]; silu is rounded before the product.

    Rows have unit stride.
    """
    num_tokens, two_n = gate_up_T2I.shape
    n = two_n // 2
    out = gate_up_T2I.new_empty(num_tokens, n)
    _act_mul_kernel[(num_tokens, triton.cdiv(n, _ELEMENTS))](
        gate_up_T2I, out, gate_up_T2I.stride(0), N=n, ELEMENTS=_ELEMENTS, num_warps=4,
        **early(out.device),
    )  # fmt: skip
    return out


def act_mul_reference(gate_up_T2I: Tensor) -> Tensor:
    """What `act_mul` returns, as the plain node computes it."""
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    return F.silu(gate) * up
