"""Round a step's keys and values to INT8 codes, in the cache and back in contiguous scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from plugins.kv.int8_storage import MAX_CODE, dequantize, quantize

if TYPE_CHECKING:
    from torch import Tensor

_ELEMENTS = 1024  # of K a program, and as many of V


@triton.jit
def rint(x):
    """Nearest integer of |x| < 2**22, ties to even: the sum has no bits below one."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr):
    """Scales of rows whose largest |x| is this. Divisions round as torch's do."""
    return tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))


@triton.jit
def codes_of(x, scale):
    """Codes of rows x [n, D] with scales [n], whole numbers in float32."""
    step = tl.where(scale > 0, scale, 1.0)
    return rint(tl.div_rn(x, tl.broadcast_to(step[:, None], x.shape)))


@triton.jit(do_not_specialize=["num_tokens"])
def _write_int8_kernel(
    k_ptr, v_ptr, shift_ptr, factor_ptr, k_codes_ptr, v_codes_ptr, k_scale_ptr, v_scale_ptr,
    slot_map_ptr, fresh_k_ptr, fresh_v_ptr, num_tokens,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_block, stride_kv_head, stride_scale_block,
    HEADS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, LARGEST: tl.constexpr, HAS_FRESH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    is_token = token < num_tokens
    dim = tl.arange(0, D_PADDED)
    is_dim = dim < D
    mask = is_token[:, None] & is_dim[None, :]
    place = tl.load(slot_map_ptr + token, mask=is_token, other=0)
    row = token.to(tl.int64)
    k_at = k_ptr + (row * stride_k_token + head * stride_k_head)[:, None] + dim[None, :]
    v_at = v_ptr + (row * stride_v_token + head * stride_v_head)[:, None] + dim[None, :]
    k = tl.load(k_at, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(v_at, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + head * D + dim, mask=is_dim, other=0.0)
    factor = tl.load(factor_ptr + head * D + dim, mask=is_dim, other=1.0)[None, :]
    smooth = tl.div_rn(k - shift[None, :], tl.broadcast_to(factor, k.shape))
    k_scale = scale_of(tl.max(tl.abs(smooth), 1), LARGEST)
    v_scale = scale_of(tl.max(tl.abs(v), 1), LARGEST)
    k_codes, v_codes = codes_of(smooth, k_scale), codes_of(v, v_scale)

    block, offset = (place // BLOCK).to(tl.int64), place % BLOCK
    within = block * stride_block + head.to(tl.int64) * stride_kv_head
    tl.store(
        k_codes_ptr + (within + offset * D)[:, None] + dim[None, :], k_codes.to(tl.int8), mask=mask
    )
    tl.store(
        v_codes_ptr + (within + offset)[:, None] + dim[None, :] * BLOCK,
        v_codes.to(tl.int8),
        mask=mask,
    )
    scale_at = block * stride_scale_block + head * BLOCK + offset
    tl.store(k_scale_ptr + scale_at, k_scale, mask=is_token)
    tl.store(v_scale_ptr + scale_at, v_scale, mask=is_token)
    if HAS_FRESH:
        fresh_at = ((row * HEADS + head) * D)[:, None] + dim[None, :]
        dtype: tl.constexpr = fresh_k_ptr.dtype.element_ty
        tl.store(fresh_k_ptr + fresh_at, (k_codes * k_scale[:, None] * factor).to(dtype), mask=mask)
        tl.store(fresh_v_ptr + fresh_at, (v_codes * v_scale[:, None]).to(dtype), mask=mask)


def write_int8(
    k_TKD: Tensor,
    v_TKD: Tensor,
    shift_KD: Tensor,
    factor_KD: Tensor,
    codes: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    slot_map_T: Tensor,
    block_size: int,
    fresh: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Store codes and scales of (k - shift) / factor and of v where `slot_map` int32 [>= T] says.

    Keys and values are [T, K, D] with unit stride in D; shift and factor float32 [K, D],
    contiguous. `codes` and `scales` are as in plugins.kv.kernels.decode_int8.decode_int8, equal to
    those of plugins.kv.int8_storage.quantize bit for bit. `fresh`, a pair of contiguous
    [>= T, K, D], gets what they stand for, in its dtype, keys without their shift. Tokens that
    share a place (padding, in the trash block) leave any one of them there.
    """
    num_tokens, num_heads, head_dim = k_TKD.shape
    padded = triton.next_power_of_2(head_dim)
    tokens = max(1, _ELEMENTS // padded)
    fresh_k, fresh_v = fresh if fresh is not None else (k_TKD, v_TKD)
    _write_int8_kernel[(triton.cdiv(num_tokens, tokens), num_heads)](
        k_TKD, v_TKD, shift_KD, factor_KD, *codes, *scales, slot_map_T, fresh_k, fresh_v,
        num_tokens, k_TKD.stride(0), k_TKD.stride(1), v_TKD.stride(0), v_TKD.stride(1),
        codes[0].stride(0), codes[0].stride(1), scales[0].stride(0),
        HEADS=num_heads, D=head_dim, D_PADDED=padded, BLOCK=block_size, TOKENS=tokens,
        LARGEST=MAX_CODE, HAS_FRESH=fresh is not None, num_warps=4,
    )  # fmt: skip


def write_int8_reference(
    k_TKD: Tensor,
    v_TKD: Tensor,
    shift_KD: Tensor,
    factor_KD: Tensor,
    codes: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    slot_map_T: Tensor,
    block_size: int,
    fresh: tuple[Tensor, Tensor] | None = None,
) -> None:
    """What `write_int8` does, in plain torch; bit for bit on a CPU.

    On CUDA torch divides by a number as it multiplies by its inverse.
    """
    num_tokens = k_TKD.shape[0]
    place = slot_map_T[:num_tokens].long()
    blocks, offsets = place // block_size, place % block_size
    k_codes, k_scale = quantize((k_TKD.float() - shift_KD) / factor_KD)
    v_codes, v_scale = quantize(v_TKD)
    codes[0][blocks, :, offsets] = k_codes
    codes[1][blocks, :, :, offsets] = v_codes
    scales[0][blocks, :, offsets] = k_scale
    scales[1][blocks, :, offsets] = v_scale
    if fresh is not None:
        k, v = dequantize(k_codes, k_scale) * factor_KD, dequantize(v_codes, v_scale)
        for scratch, values in zip(fresh, (k, v), strict=True):
            scratch[:num_tokens] = values.to(scratch.dtype)
