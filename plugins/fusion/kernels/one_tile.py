"""Products with a weight whose programs compute one tile each: up to 128 rows, or 256 by parts.

Still a matter of latency where the weight is small: a layer of Qwen3-0.6B (four products, two norms
and an activation) takes an H200 28.0 µs at 64 rows by cuBLAS and 21.3 by these kernels, which send
for their weights before they wait for the kernel in front (see plugins.early_launch). Rows that are
missing cost nothing. Weights beyond some 20 MB are a matter of bandwidth, and cuBLAS's (Qwen3-4B's
gate_up at 64 rows: 30.7 µs against 34.0).

A product of few outputs is shared out along K too, or most of the device would idle: its parts are
left in float32, and added up, always in the same order, by the addition and norm behind it. With
more than 64 rows such products are faster than cuBLAS's (o_proj and down of Qwen3-0.6B with
addition and norm, µs: 128 rows 5.5 and 7.1 against 8.2 and 9.0, 256 rows 7.7 and 9.4 against 8.6
and 9.9; at 384 rows they are slower), and up to 128 rows that of qkv (a layer without attention at
128 rows: 26.4 against 26.8), but not gate_up's with its activation (27.7).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from plugins.early_launch import early, let_next_start, prefetch, wait_for_previous
from plugins.fusion.kernels.few_rows import activated

if TYPE_CHECKING:
    from torch import Tensor

_TALL, _TILE_N = 128, 32  # rows, where there are more than 64, and outputs of a program
_MOST_ROWS, _MOST_ROWS_BY_PARTS = 128, 256
_LONGEST_PART = 1536  # with more than 64 rows
_LINE = 64  # elements of two bytes in a line of L2
_MOST_LINES = 16  # of a row of weights, sent for ahead
SHARED_BYTES = 160 << 10  # that a program takes


class Tiling(NamedTuple):
    """Rows and warps of a program; elements of K a step of its pipeline, and its stages; how many
    programs share K at most."""

    num_rows: int
    num_warps: int
    chunk: int
    stages: int
    most_parts: int

    def part(self, k: int) -> int:
        """Elements of K a program, in whole chunks."""
        return triton.cdiv(triton.cdiv(k, self.chunk), self.most_parts) * self.chunk


def _tiling(num_rows: int, weight: Tensor, *, act: bool = False, by_parts: bool = False) -> Tiling:
    """As much of K a step as SHARED_BYTES hold."""
    tall = num_rows > 64
    most = (128 if act or tall else 256) * 2 // weight.itemsize
    chunk = min(most, max(16, triton.next_power_of_2(weight.shape[1])))
    if tall and not by_parts:
        return Tiling(_TALL, 8, chunk, 3, 1)
    most_parts = _most_parts(num_rows) if by_parts else 1
    return Tiling(_TALL if tall else 64, 4, chunk, 4 if act or tall else 3, most_parts)


def _most_parts(num_rows: int) -> int:
    return 4 if num_rows <= 128 else 2


def suits_tall(num_rows: int, n: int, k: int, num_sms: int, *, by_parts: bool) -> bool:
    """Whether a product of more than 64 rows, of a weight [n, k], is for these kernels: whether its
    programs, which take an SM each, all run at once, and not for long."""
    parts, most = (_most_parts(num_rows), _MOST_ROWS_BY_PARTS) if by_parts else (1, _MOST_ROWS)
    programs = triton.cdiv(n, _TILE_N) * triton.cdiv(num_rows, _TALL) * parts
    fits = programs <= num_sms and k <= parts * _LONGEST_PART
    return 64 < num_rows <= most and fits


@triton.jit
def _one_tile_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, num_rows, stride_x,
    N: tl.constexpr, K: tl.constexpr, PART: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, LINE: tl.constexpr,
    NUM_LINES: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    m = tl.program_id(2) * TILE_M + tl.arange(0, TILE_M)
    start = tl.program_id(1) * PART
    w_row = w_ptr + tl.minimum(n, N - 1)[:, None].to(tl.int64) * K
    if PDL:
        line = tl.minimum(start + tl.arange(0, NUM_LINES) * LINE, K - 1)[None, :]
        prefetch(w_row + line)
        if ACT:
            prefetch(w_row + N * K + line)
        if BIAS:
            prefetch(bias_ptr + tl.minimum(n, N - 1))
    wait_for_previous(PDL)

    EVEN: tl.constexpr = K % PART == 0 and PART % CHUNK == 0
    is_row = (m < num_rows)[:, None]
    x_row = x_ptr + m[:, None].to(tl.int64) * stride_x
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    acc_up = tl.zeros((TILE_M, TILE_N), tl.float32)
    for i in tl.range(0, PART, CHUNK, num_stages=STAGES):
        k = start + i + tl.arange(0, CHUNK)[None, :]
        if EVEN:
            x = tl.load(x_row + k, mask=is_row, other=0.0)
            w = tl.load(w_row + k)
        else:
            x = tl.load(x_row + k, mask=is_row & (k < K), other=0.0)
            w = tl.load(w_row + k, mask=k < K, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if ACT:
            if EVEN:
                up = tl.load(w_row + N * K + k)
            else:
                up = tl.load(w_row + N * K + k, mask=k < K, other=0.0)
            acc_up = tl.dot(x, tl.trans(up), acc_up, input_precision="ieee")

    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ACT:
        acc = activated(acc, acc_up, x_ptr.dtype.element_ty)
    row = tl.program_id(1).to(tl.int64) * num_rows + m
    mask = is_row & (n < N)[None, :]
    out_at = out_ptr + row[:, None] * N + n[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling, act: bool, out: Tensor
) -> None:
    """`out` [..., M, N], of which every part of K is one [M, N]."""
    num_rows, n, k, part = len(x), out.shape[-1], weight.shape[1], tiling.part(weight.shape[1])
    num_lines = min(_MOST_LINES, triton.next_power_of_2(triton.cdiv(part, _LINE)))
    grid = triton.cdiv(n, _TILE_N), triton.cdiv(k, part), triton.cdiv(num_rows, tiling.num_rows)
    _one_tile_kernel[grid](
        x, weight, weight if bias is None else bias, out, num_rows, x.stride(0),
        N=n, K=k, PART=part, TILE_M=tiling.num_rows, TILE_N=_TILE_N, CHUNK=tiling.chunk,
        STAGES=tiling.stages, LINE=_LINE, NUM_LINES=num_lines, BIAS=bias is not None, ACT=act,
        num_warps=tiling.num_warps, **early(x.device),
    )  # fmt: skip


def one_tile(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, act: bool = False
) -> Tensor:
    """linear of M <= 128 rows of unit stride: [M, N].

    With `act` the weight is [2 N, K], gate rows first, and silu(gate) * up is returned. Weight rows
    lie side by side.
    """
    out = x_MK.new_empty(x_MK.shape[0], weight_NK.shape[0] // (2 if act else 1))
    _run(x_MK, weight_NK, bias_N, _tiling(len(x_MK), weight_NK, act=act), act, out)
    return out


def one_tile_parts(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Float32 [parts, M, N] whose sum over parts is linear of rows of unit stride."""
    (num_rows, k), n = x_MK.shape, len(weight_NK)
    tiling = _tiling(num_rows, weight_NK, by_parts=True)
    shape = triton.cdiv(k, tiling.part(k)), num_rows, n
    out = torch.empty(shape, dtype=torch.float32, device=x_MK.device)
    _run(x_MK, weight_NK, None, tiling, False, out)
    return out


def one_tile_parts_reference(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """What the parts add up to, in float64 [M, N]."""
    return F.linear(x_MK.double(), weight_NK.double())
