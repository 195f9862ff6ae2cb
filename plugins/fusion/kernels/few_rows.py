"""Products with a weight for the few rows of a small decode step, with what stands around them.

There a product is a matter of latency: Qwen3-0.6B's weights of one projection take an H200 2 µs,
cuBLAS takes 5 to 11. These kernels load weights before they wait for the kernel in front (see
plugins.early_launch), and need no launch of their own for a norm, an addition or an activation.
Results are rounded where the plain nodes round.

Two kernels: for one row, whose products run on CUDA cores; for 2 to 16, the height of a tensor-core
tile. In the second the warps of a program share K between them, or it would be one long chain of
dependent instructions. Where K is long, programs share it too, and the addition and norm behind
them add up their parts (a layer of Qwen3-0.6B without attention at 8 rows on an H200: 18.4 µs
instead of 19.5). With more rows it loses to cuBLAS, where plugins.fusion.kernels.one_tile takes
over. It loses where weights are large, too (Qwen3-4B's gate_up at 8 rows on an H200: 47.7 µs
against 28.5): those are a matter of bandwidth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from core.model import rms_norm
from plugins.early_launch import early, let_next_start, wait_for_previous

if TYPE_CHECKING:
    from torch import Tensor

_TILE_M = 16  # rows of a tensor-core tile
_ELEMENTS = 32 * 1024  # of weights that a program of four warps can keep in registers
_CHUNK = 1024  # of K at a time
_MOST_PARTS = 3  # of a product whose programs share K


@triton.jit
def activated(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of float32 sums, rounded to dtype at each node's end."""
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return silu * up.to(dtype).to(tl.float32)


@triton.jit
def _weights(at, k, K: tl.constexpr, EVEN: tl.constexpr):
    """A chunk of weight rows; zero beyond K."""
    if EVEN:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=k < K, other=0.0)
    return found


@triton.jit
def _one_row_kernel(
    x_ptr, w_ptr, bias_ptr, gain_ptr, residual_ptr, out_ptr, eps,
    N: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, NUM_AHEAD: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    ADD: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < N
    k = tl.arange(0, CHUNK)
    EVEN: tl.constexpr = K % CHUNK == 0
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    w_at = w_ptr + tl.minimum(row, N - 1)[:, None].to(tl.int64) * K + k[None, :]
    w0 = _weights(w_at, k[None, :], K, EVEN)
    if ACT:
        up0 = _weights(w_at + N * K, k[None, :], K, EVEN)
    if NUM_AHEAD > 1:
        w1 = _weights(w_at + CHUNK, CHUNK + k[None, :], K, EVEN)
    if NUM_AHEAD > 2:
        w2 = _weights(w_at + 2 * CHUNK, 2 * CHUNK + k[None, :], K, EVEN)
    if NORM:
        gain0 = tl.load(gain_ptr + k, mask=k < K, other=0.0)
    if BIAS:
        bias = tl.load(bias_ptr + row, mask=is_row, other=0.0)
    wait_for_previous(PDL)

    if ADD:  # here, to be there at the end
        residual = tl.load(residual_ptr + row, mask=is_row, other=0.0)
    scale = 1.0
    if NORM:
        i = tl.arange(0, K_PADDED)
        whole = tl.load(x_ptr + i, mask=i < K, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(whole * whole, 0) / K + eps)
    acc = tl.zeros((ROWS, CHUNK), tl.float32)
    acc_up = tl.zeros((ROWS, CHUNK), tl.float32)
    for start in tl.static_range(0, K, CHUNK):
        x = tl.load(x_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        if NORM:
            if start == 0:
                gain = gain0.to(tl.float32)
            else:
                gain = tl.load(gain_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)
            x = (gain * (x * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        if start == 0:
            w = w0
        elif start == CHUNK and NUM_AHEAD > 1:
            w = w1
        elif start == 2 * CHUNK and NUM_AHEAD > 2:
            w = w2
        else:
            w = _weights(w_at + start, start + k[None, :], K, EVEN)
        acc += w.to(tl.float32) * x[None, :]
        if ACT:
            if start == 0:
                up = up0
            else:
                up = _weights(w_at + N * K + start, start + k[None, :], K, EVEN)
            acc_up += up.to(tl.float32) * x[None, :]

    out = tl.sum(acc, 1)
    if BIAS:
        out += bias.to(tl.float32)
    if ACT:
        out = activated(out, tl.sum(acc_up, 1), dtype)
    if ADD:
        out = residual.to(tl.float32) + out.to(dtype).to(tl.float32)
    tl.store(out_ptr + row, out.to(dtype), mask=is_row)


@triton.jit
def _few_rows_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, num_rows, stride_x,
    N: tl.constexpr, K: tl.constexpr, SHARE: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, NUM_AHEAD: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Everything is [PARTS, rows, CHUNK // PARTS]: a warp a part of CHUNK, summed at the end.
    let_next_start(PDL)
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    m = tl.arange(0, TILE_M)
    part = tl.program_id(1) * SHARE + tl.arange(0, PARTS)[:, None, None] * (CHUNK // PARTS)
    k = part + tl.arange(0, CHUNK // PARTS)[None, None, :]
    EVEN: tl.constexpr = K % SHARE == 0 and SHARE % CHUNK == 0
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    w_at = w_ptr + tl.minimum(n, N - 1)[None, :, None].to(tl.int64) * K + k
    w0 = _weights(w_at, k, K, EVEN)
    if ACT:
        up0 = _weights(w_at + N * K, k, K, EVEN)
    if NUM_AHEAD > 1:
        w1 = _weights(w_at + CHUNK, CHUNK + k, K, EVEN)
    if NUM_AHEAD > 2:
        w2 = _weights(w_at + 2 * CHUNK, 2 * CHUNK + k, K, EVEN)
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=n < N, other=0.0)
    wait_for_previous(PDL)

    is_row = (m < num_rows)[None, :, None]
    x_at = x_ptr + m[None, :, None].to(tl.int64) * stride_x + k
    acc = tl.zeros((PARTS, TILE_M, TILE_N), tl.float32)
    acc_up = tl.zeros((PARTS, TILE_M, TILE_N), tl.float32)
    x = tl.load(x_at, mask=is_row & (k < K), other=0.0)
    acc = tl.dot(x, tl.permute(w0, (0, 2, 1)), acc, input_precision="ieee")
    if ACT:
        acc_up = tl.dot(x, tl.permute(up0, (0, 2, 1)), acc_up, input_precision="ieee")
    if NUM_AHEAD > 1:
        x = tl.load(x_at + CHUNK, mask=is_row & (CHUNK + k < K), other=0.0)
        acc = tl.dot(x, tl.permute(w1, (0, 2, 1)), acc, input_precision="ieee")
    if NUM_AHEAD > 2:
        x = tl.load(x_at + 2 * CHUNK, mask=is_row & (2 * CHUNK + k < K), other=0.0)
        acc = tl.dot(x, tl.permute(w2, (0, 2, 1)), acc, input_precision="ieee")
    for start in range(NUM_AHEAD * CHUNK, SHARE, CHUNK):
        x = tl.load(x_at + start, mask=is_row & (start + k < K), other=0.0)
        w = _weights(w_at + start, start + k, K, EVEN)
        acc = tl.dot(x, tl.permute(w, (0, 2, 1)), acc, input_precision="ieee")
        if ACT:
            up = _weights(w_at + N * K + start, start + k, K, EVEN)
            acc_up = tl.dot(x, tl.permute(up, (0, 2, 1)), acc_up, input_precision="ieee")

    out = tl.sum(acc, 0)
    if BIAS:
        out += bias.to(tl.float32)[None, :]
    if ACT:
        out = activated(out, tl.sum(acc_up, 0), dtype)
    mask = (m < num_rows)[:, None] & (n < N)[None, :]
    row = tl.program_id(1).to(tl.int64) * num_rows + m
    out_at = out_ptr + row[:, None] * N + n[None, :]
    tl.store(out_at, out.to(dtype), mask=mask)


class Launch(NamedTuple):
    """Outputs of a program; elements of K a step; steps whose weights are loaded ahead."""

    num_outputs: int
    chunk: int
    num_ahead: int


def _launch(num_outputs: int, k: int, act: bool) -> Launch:
    """As many chunks ahead as registers hold, up to three; both weights of an activation count."""
    chunk = min(_CHUNK, max(64, triton.next_power_of_2(k)))
    room = _ELEMENTS // (num_outputs * chunk * (2 if act else 1))
    ahead = 1 if act else max(1, min(3, room, triton.cdiv(k, chunk)))
    return Launch(num_outputs, chunk, ahead)


def one_row(
    x_K: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    gain_K: Tensor | None = None,
    eps: float = 0.0,
    residual_N: Tensor | None = None,
    act: bool = False,
    out_N: Tensor | None = None,
) -> Tensor:
    """linear of one row x [1, K]: [1, N]. With `gain` x is normed first; `residual` is added last.

    With `act` the weight is [2 N, K], gate rows first, and silu(gate) * up is returned. `out` may
    be `residual` itself. x and weight have unit stride in K, weight rows lie side by side.
    """
    n, k = weight_NK.shape[0] // (2 if act else 1), weight_NK.shape[1]
    out = x_K.new_empty(1, n) if out_N is None else out_N
    launch = _launch(4 if n > 2048 else 2, k, act)
    nothing = weight_NK
    _one_row_kernel[(triton.cdiv(n, launch.num_outputs),)](
        x_K, weight_NK, nothing if bias_N is None else bias_N,
        nothing if gain_K is None else gain_K,
        nothing if residual_N is None else residual_N, out, eps,
        N=n, K=k, K_PADDED=triton.next_power_of_2(k), ROWS=launch.num_outputs, CHUNK=launch.chunk,
        NUM_AHEAD=launch.num_ahead, BIAS=bias_N is not None, NORM=gain_K is not None,
        ADD=residual_N is not None, ACT=act, num_warps=4, **early(x_K.device),
    )  # fmt: skip
    return out


def one_row_reference(
    x_K: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    gain_K: Tensor | None = None,
    eps: float = 0.0,
    residual_N: Tensor | None = None,
    act: bool = False,
) -> Tensor:
    """What `one_row` returns, as the plain nodes compute it."""
    x = x_K if gain_K is None else rms_norm(x_K, gain_K, eps)
    out = few_rows_reference(x, weight_NK, bias_N, act=act)
    return out if residual_N is None else residual_N + out


def few_rows(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, act: bool = False
) -> Tensor:
    """linear of M <= 16 rows of unit stride: [M, N]. `act` as in `one_row`."""
    n, k = weight_NK.shape[0] // (2 if act else 1), weight_NK.shape[1]
    launch = _launch(8 if n <= 2048 else 16 if act else 32, k, act)
    out = x_MK.new_empty(len(x_MK), n)
    _run(x_MK, weight_NK, bias_N, launch, k, act, out)
    return out


def suits_parts(num_rows: int, k: int) -> bool:
    """Whether programs that share K are faster, by what was measured."""
    return 1 < num_rows <= _TILE_M and k >= _MOST_PARTS * _CHUNK


def few_rows_parts(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Float32 [parts, M, N] whose sum over parts is linear of M <= 16 rows of unit stride."""
    n, k = weight_NK.shape
    share = triton.cdiv(triton.cdiv(k, _MOST_PARTS), _CHUNK) * _CHUNK
    shape = triton.cdiv(k, share), len(x_MK), n
    out = torch.empty(shape, dtype=torch.float32, device=x_MK.device)
    _run(x_MK, weight_NK, None, _launch(8, share, False), share, False, out)
    return out


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, launch: Launch, share: int, act: bool,
    out: Tensor,
) -> None:  # fmt: skip
    """`out` [..., M, N], of which every share of K is one [M, N]."""
    n, k = out.shape[-1], weight.shape[1]
    _few_rows_kernel[triton.cdiv(n, launch.num_outputs), triton.cdiv(k, share)](
        x, weight, weight if bias is None else bias, out, len(x), x.stride(0),
        N=n, K=k, SHARE=share, TILE_M=_TILE_M, TILE_N=launch.num_outputs, CHUNK=launch.chunk,
        PARTS=4, NUM_AHEAD=launch.num_ahead, BIAS=bias is not None, ACT=act,
        num_warps=4, num_stages=2, **early(x.device),
    )  # fmt: skip


def few_rows_reference(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, act: bool = False
) -> Tensor:
    """What `few_rows` returns, as the plain nodes compute it."""
    out = F.linear(x_MK, weight_NK, bias_N)
    if not act:
        return out
    gate, up = out.chunk(2, dim=-1)
    return F.silu(gate) * up
