"""Keys and values as INT8 codes with a scale for each token and head, and how both are made.

Shapes: L layers, N blocks, K key/value heads, B tokens a block, D head_dim, T tokens.

Scales are float32: at 4 bytes for D codes they cost 2 bytes more than float16, 1.5 % of a block
where D is 128, and no value overflows, nor does a tiny one lose bits of its scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from core.seams import KVSink
from plugins.kv.storage import Storage, overhead_bytes as _overhead_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from core.batch import Limits
    from core.facts import ModelFacts
    from plugins.kv.int8_cuda_path import Int8CudaPath
    from plugins.kv.int8_path import Int8Path

MAX_CODE = 127  # symmetric: -128 is not used
_SCALE_BYTES = torch.float32.itemsize


@dataclass(frozen=True, kw_only=True)
class Int8Sink(KVSink):
    """Where a fused span may write a layer's codes and scales itself.

    kind "int8_blocks": `k` is int8 [N, K, B, D], `v` int8 [N, K, D, B], `k_scale` and `v_scale` are
    float32 [N, K, B]. Codes, of at most `max_code`, are those of `quantize`, of
    (K - `k_shift`) / `k_factor`, float32 [K, D] both, and of V. `fresh` gets what codes and scales
    stand for, keys without their shift.
    """

    k_scale: Tensor
    v_scale: Tensor
    k_shift: Tensor
    k_factor: Tensor
    max_code: int = MAX_CODE


@dataclass(eq=False)
class Int8Storage(Storage):
    """Codes in `k` and `v`, int8 [L, N, K, B, D] each; `k_scale`, `v_scale` float32 [L, N, K, B].

    `k` and `k_scale` stand for (K - `k_shift`) / `k_factor`, both float32 [L, K, D]: see
    plugins.kv.smoothing. `dtype` is that of the values outside.

    On CUDA `v` is a view of [L, N, K, D, B] in memory: P · V sums over tokens, and what a tensor
    core sums over must be adjacent where elements are bytes. The pair in `fresh` gets what codes
    and scales stand for, keys without `k_shift`.
    """

    k_scale: Tensor
    v_scale: Tensor
    k_shift: Tensor
    k_factor: Tensor
    dtype: torch.dtype

    def planes(self) -> tuple[Tensor, ...]:
        return self.k, self.v, self.k_scale, self.v_scale

    def sink(self, layer: int) -> Int8Sink | None:
        """None where values lie as plain torch reads them."""
        if self.fresh is None:
            return None
        return Int8Sink(
            "int8_blocks",
            self.k[layer],
            self.v[layer].transpose(-1, -2),
            self.block_size,
            self.slot_map,
            self.fresh,
            k_scale=self.k_scale[layer],
            v_scale=self.v_scale[layer],
            k_shift=self.k_shift[layer],
            k_factor=self.k_factor[layer],
        )

    def gather(self, slot: int, layer: int, lo: int, hi: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [n, K, D] of positions lo..hi-1, dequantised and unsmoothed."""
        k, v, positions = super().gather(slot, layer, lo, hi)
        block, offset = self.blocks(torch.full_like(positions, slot), positions)
        smooth_k = dequantize(k, self.k_scale[layer][block, :, offset])
        keys = smooth_k * self.k_factor[layer] + self.k_shift[layer]
        values = dequantize(v, self.v_scale[layer][block, :, offset])
        return keys.to(self.dtype), values.to(self.dtype), positions


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [..., D] and scales float32 [...] of x [..., D], in float32 throughout.

    The scale is max|x| / 127, codes are x / scale rounded to nearest even. A row of zeros has scale
    0, which gives the zeros back exactly.
    """
    wide = x.float()
    scale = wide.abs().amax(-1) / MAX_CODE
    step = torch.where(scale > 0, scale, 1.0)  # 0 / 0 has no integer
    return (wide / step[..., None]).round().to(torch.int8), scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """float32 [..., D] of codes [..., D] and scales [...]."""
    return codes.float() * scale[..., None]


def allocate(
    facts: ModelFacts,
    limits: Limits,
    device: torch.device,
    *,
    num_blocks: int,
    block_size: int,
    table_width: int,
) -> Int8Storage:
    """Zeroed storage for `num_blocks` blocks, the trash block counted; nothing is smoothed yet."""
    heads, dim, num_tokens = facts.num_kv_heads, facts.head_dim, limits.max_num_batched_tokens
    shape = (2, facts.num_layers, num_blocks, heads, block_size)
    k, v = torch.zeros(*shape, dim, dtype=torch.int8, device=device)
    scales = torch.zeros(shape, device=device)
    index = {"dtype": torch.int32, "device": device}
    fresh = None
    if device.type == "cuda":
        v = v.view(*shape[1:-1], dim, block_size).transpose(-1, -2)
        scratch = torch.zeros(2, num_tokens, heads, dim, dtype=facts.dtype, device=device)
        fresh = scratch[0], scratch[1]
    return Int8Storage(
        k=k,
        v=v,
        block_size=block_size,
        slot_map=torch.zeros(num_tokens, **index),
        table=torch.zeros(limits.max_num_seqs + 1, table_width, **index),
        fresh=fresh,
        prefix=None,
        k_scale=scales[0],
        v_scale=scales[1],
        k_shift=torch.zeros(facts.num_layers, heads, dim, device=device),
        k_factor=torch.ones(facts.num_layers, heads, dim, device=device),
        dtype=facts.dtype,
    )


def token_bytes(facts: ModelFacts) -> int:
    """Bytes of the codes and scales of one token over all layers."""
    return 2 * facts.num_layers * facts.num_kv_heads * (facts.head_dim + _SCALE_BYTES)


def overhead_bytes(facts: ModelFacts, limits: Limits, table_width: int) -> int:
    """Bytes beside the blocks: slot map, block tables, scratch, shift and factor of the keys."""
    num_channels = facts.num_layers * facts.num_kv_heads * facts.head_dim
    plain = _overhead_bytes(facts, limits, table_width, num_prefix=0)
    return plain + 2 * num_channels * _SCALE_BYTES


def device_path(facts: ModelFacts, storage: Int8Storage) -> Int8CudaPath | Int8Path:
    """Who writes and reads the storage: kernels on CUDA, plain torch anywhere else."""
    if storage.k.device.type == "cuda":
        from plugins.kv.int8_cuda_path import Int8CudaPath

        return Int8CudaPath(facts, storage)
    from plugins.kv.int8_path import Int8Path

    return Int8Path(facts, storage)
