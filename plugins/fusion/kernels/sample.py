"""Gumbel-max over counter-based noise: one pass over the logits and a small reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from plugins.early_launch import after_previous, early

if TYPE_CHECKING:
    from torch import Tensor

_ELEMENTS = 2048  # of a row of logits a program
_LN_2 = 0.6931471805599453


@triton.jit
def _fmix32(x):
    """MurmurHash3's 32-bit finaliser on uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _log2(x, CUDA: tl.constexpr):
    """By the device's own instruction, off by 2^-22.6 of the result, between 1/2 and 2 absolutely:
    here 1e-6 of a score. What Triton has takes a dozen instructions, which were half of the time.
    """
    if CUDA:
        found = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
        )
    else:
        found = tl.log2(x)
    return found


@triton.jit
def _scores_kernel(
    logits_ptr, temperature_ptr, keys_ptr, best_ptr, index_ptr, num_blocks, stride_logits,
    V: tl.constexpr, ELEMENTS: tl.constexpr, LN_2: tl.constexpr, CUDA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1)
    entry = block * ELEMENTS + tl.arange(0, ELEMENTS)
    at = logits_ptr + row.to(tl.int64) * stride_logits + entry
    score = tl.load(at, mask=entry < V, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        key0 = tl.load(keys_ptr + 2 * row).to(tl.uint32, bitcast=True)
        key1 = tl.load(keys_ptr + 2 * row + 1).to(tl.uint32, bitcast=True)
        hashed = _fmix32(_fmix32(entry.to(tl.uint32) * 0x9E3779B1 + key0) ^ key1)
        u = (hashed.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2**-32
        # -log(1 - u). Near 0, the end that wins, 1 - u would keep few of the 32 bits: there a
        # series, exact to float32 below 1/8.
        tail = 1.0 / 5 + u * (1.0 / 6 + u * (1.0 / 7 + u * 0.125))
        series = u * (1.0 + u * (0.5 + u * (1.0 / 3 + u * (0.25 + u * tail))))
        exponential = tl.where(u < 0.125, series, _log2(1.0 - u, CUDA) * -LN_2)
        score = score * (1.0 / temperature) - _log2(exponential, CUDA) * LN_2
    # A model that has gone wrong gives NaN; as the worst score it cannot lead outside of the
    # vocabulary.
    score = tl.where(score == score, score, float("-inf"))
    best, index = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_ptr + row * num_blocks + block, best)
    tl.store(index_ptr + row * num_blocks + block, block * ELEMENTS + index)


@triton.jit
def _best_kernel(
    best_ptr, index_ptr, out_ptr, num_blocks, BLOCKS_PADDED: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS_PADDED)
    mask = block < num_blocks
    best = tl.load(best_ptr + row * num_blocks + block, mask=mask, other=float("-inf"))
    index = tl.load(index_ptr + row * num_blocks + block, mask=mask, other=0x7FFFFFFF)
    tl.store(out_ptr + row, tl.min(tl.where(best == tl.max(best, 0), index, 0x7FFFFFFF), 0))


def sample(logits_RV: Tensor, temperature_R: Tensor, key_R2: Tensor, out_R: Tensor) -> None:
    """The index of each row's best logit / temperature + Gumbel noise, int32; the lowest on ties.

    Temperature 0 compares plain logits. The noise is a function of the row's key, int32 [R, 2], and
    of the entry v alone: -log(E), where E = -log(1 - u), u = (h + 1/2) / 2^32 and
    h = fmix32(fmix32(v * 0x9E3779B1 + key0) ^ key1).
    """
    num_rows, num_entries = logits_RV.shape
    num_blocks = triton.cdiv(num_entries, _ELEMENTS)
    best = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits_RV.device)
    index = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits_RV.device)
    _scores_kernel[(num_blocks, num_rows)](
        logits_RV, temperature_R, key_R2, best, index, num_blocks, logits_RV.stride(0),
        V=num_entries, ELEMENTS=_ELEMENTS, LN_2=_LN_2, CUDA=best.is_cuda, num_warps=4,
        **early(best.device),
    )  # fmt: skip
    padded = triton.next_power_of_2(num_blocks)
    _best_kernel[(num_rows,)](
        best, index, out_R, num_blocks, BLOCKS_PADDED=padded, num_warps=1, **early(best.device)
    )


def scores_reference(logits_RV: Tensor, temperature_R: Tensor, key_R2: Tensor) -> Tensor:
    """The scores that `sample` compares, float64 [R, V]; hashes in int64, reduced modulo 2^32."""
    low = (1 << 32) - 1

    def fmix32(x: Tensor) -> Tensor:
        # Products of two 32-bit numbers wrap in int64, which leaves their low 32 bits right.
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & low
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & low
        return x ^ (x >> 16)

    keys = key_R2.long() & low
    entries = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    hashed = fmix32((entries * 0x9E3779B1 + keys[:, :1]) & low)
    hashed = fmix32(hashed ^ keys[:, 1:])
    u = (hashed.double() + 0.5) * 2.0**-32
    noise = -torch.log(-torch.log1p(-u))
    logits, temperature = logits_RV.double(), temperature_R.double()[:, None]
    return torch.where(temperature > 0, logits / temperature.clamp_min(1e-30) + noise, logits)
