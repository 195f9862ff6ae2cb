"""One row's context shared out among programs, and the merge of what they found.

Flash-Decoding (2023): every program attends to a part of the context, and leaves its result and the
logarithm of its sum of exponentials. Where the parts are few the program that ends last merges them
(as in stream-K, Osama et al. 2023): a merge of its own would be launched once a layer to add up
kilobytes. On an H200, 16 query and 8 KV heads of 128, 1,088 tokens a row in bf16, µs with one and
with the other: 4 rows 10.4 and 10.8, 8 rows 13.7 and 15.0, 16 rows 23.0 and 24.5. A lone row's 32
parts are merged faster by programs that share them (6.2 against 6.6).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from plugins.early_launch import early, let_next_start, wait_for_previous

if TYPE_CHECKING:
    from torch import Tensor

_LAST_MERGES = range(3, 14)  # numbers of splits
_ELEMENTS = 1024  # of parts that a warp of the last program holds at once
MAX_ARRIVALS = 512


@triton.jit
def is_idle(begin, stop, split, MERGES: tl.constexpr):
    """Whether a program has nothing to attend to and nothing to write: the merge knows from the
    length which splits hold something. Where the last program merges, somebody has to write the
    zeros of a row of length 0."""
    idle = begin >= stop
    if MERGES:
        idle = idle & (split > 0)
    return idle


@triton.jit
def merge_if_last(
    partial_ptr, lse_ptr, arrivals_ptr, out_ptr, row, kv_head, num_splits, length, per_split,
    stride_out,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    SPLITS_PADDED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a row's KV head, `per_split` positions of `length` each, if this is the
    last of its programs to come.

    To be called behind the stores of the part. `arrivals` is zero before and after.
    """
    num_used = tl.maximum(tl.cdiv(length, tl.maximum(per_split, 1)), 1)
    tl.debug_barrier()  # every thread's stores come before the one arrival
    place = arrivals_ptr + row * tl.num_programs(1) + kv_head
    if tl.atomic_add(place, 1, sem="acq_rel") == num_used - 1:
        tl.store(place, 0)
        member = tl.arange(0, GROUP_PADDED)
        dim = tl.arange(0, D_PADDED)
        heads = kv_head * GROUP + member
        first = (row * tl.num_programs(1) * GROUP + heads) * num_splits
        split = tl.arange(0, SPLITS_PADDED)
        is_used = (member < GROUP)[:, None] & (split < num_used)[None, :]
        # Past L1, which may hold what an earlier layer left at the same place.
        all_at = lse_ptr + first[:, None] + split[None, :]
        all_lse = tl.load(all_at, mask=is_used, other=float("-inf"), cache_modifier=".cg")
        top = tl.maximum(tl.max(all_lse, 1), -1e30)  # finite where nothing was seen: weights are 0
        total = tl.sum(tl.exp2(all_lse - top[:, None]), 1)
        merged = tl.zeros((GROUP_PADDED, D_PADDED), tl.float32)
        for begin in tl.range(0, num_used, AT_ONCE, num_stages=1):
            some = begin + tl.arange(0, AT_ONCE)
            is_some = (member < GROUP)[:, None] & (some < num_used)[None, :]
            part = first[:, None] + some[None, :]
            lse = tl.load(lse_ptr + part, mask=is_some, other=float("-inf"), cache_modifier=".cg")
            is_there = is_some[:, :, None] & (dim < D)[None, None, :]
            at = partial_ptr + part[:, :, None] * D + dim[None, None, :]
            partial = tl.load(at, mask=is_there, other=0.0, cache_modifier=".cg")
            merged += tl.sum(partial * tl.exp2(lse - top[:, None])[:, :, None], 1)
        merged = merged / tl.where(total > 0, total, 1.0)[:, None]
        out_at = out_ptr + row.to(tl.int64) * stride_out + heads[:, None] * D + dim[None, :]
        mask = (member < GROUP)[:, None] & (dim < D)[None, :]
        tl.store(out_at, merged.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    partial_ptr, lse_ptr, lens_ptr, num_decodes_ptr, out_ptr, num_splits, stride_out,
    D: tl.constexpr, D_PADDED: tl.constexpr, SPLITS_PADDED: tl.constexpr, TILE_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    num_decodes, length = tl.load(num_decodes_ptr), tl.load(lens_ptr + row)
    wait_for_previous(PDL)
    if row >= num_decodes:
        return
    per_split = tl.cdiv(tl.cdiv(length, num_splits), TILE_N) * TILE_N
    split = tl.arange(0, SPLITS_PADDED)
    dim = tl.arange(0, D_PADDED)
    is_used = split * per_split < length
    at = (row * tl.num_programs(1) + head) * num_splits + split
    lse = tl.load(lse_ptr + at, mask=is_used, other=float("-inf"))
    mask = is_used[:, None] & (dim < D)[None, :]
    partial = tl.load(partial_ptr + at[:, None] * D + dim[None, :], mask=mask, other=0.0)
    top = tl.maximum(tl.max(lse, 0), -1e30)  # finite where no split is used, so that weights are 0
    weights = tl.exp2(lse - top)
    total = tl.sum(weights, 0)
    merged = tl.sum(partial * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    out_at = out_ptr + row.to(tl.int64) * stride_out + head * D + dim
    tl.store(out_at, merged.to(out_ptr.dtype.element_ty), mask=dim < D)


class Parts(NamedTuple):
    """What the programs of a decode kernel leave, float32: results [R, H, S, D], contiguous, and
    log2-sum-exps [R, H, S]. `arrivals` is theirs where the last of them merges."""

    results: Tensor
    lse: Tensor
    arrivals: Tensor | None

    def constants(self, num_kv_heads: int, num_warps: int) -> dict[str, int | bool]:
        """Of a kernel that calls `merge_if_last`, `num_warps` among them."""
        _, num_heads, num_splits, head_dim = self.results.shape
        padded = triton.next_power_of_2(num_splits)
        group = triton.next_power_of_2(num_heads // num_kv_heads)
        room = max(1, num_warps * _ELEMENTS // (group * triton.next_power_of_2(head_dim)))
        return {
            "MERGES": self.arrivals is not None,
            "GROUP_PADDED": group,
            "SPLITS_PADDED": padded,
            "AT_ONCE": min(padded, room),
            "num_warps": num_warps,
        }

    def merge(self, seq_lens_R: Tensor, num_decodes: Tensor, out: Tensor, tile_n: int) -> None:
        """Attention of whole rows, into `out`; nothing where the last program has merged already.

        Splits are of whole tiles of `tile_n` positions, as even as such can be.
        """
        num_rows, num_heads, num_splits, head_dim = self.results.shape
        if num_splits == 1 or self.arrivals is not None:
            return
        _merge_kernel[(num_rows, num_heads)](
            self.results, self.lse, seq_lens_R, num_decodes, out, num_splits, out.stride(0),
            D=head_dim, D_PADDED=triton.next_power_of_2(head_dim),
            SPLITS_PADDED=triton.next_power_of_2(num_splits), TILE_N=tile_n, num_warps=4,
            **early(out.device),
        )  # fmt: skip


def parts_of(
    q_RHD: Tensor, num_rows: int, num_kv_heads: int, num_splits: int, arrivals: Tensor | None
) -> Parts:
    """Room for what `num_splits` programs a row and KV head leave; with one they leave nothing.

    `arrivals` are zeros, int32, contiguous, and for one stream. A kernel of its own merges where
    they are None or too few, and where there are more or fewer splits than the last one should
    merge.
    """
    num_heads, head_dim = q_RHD.shape[1:]
    size = (num_rows, num_heads, num_splits) if num_splits > 1 else (0, num_heads, 1)
    results, lse = (
        torch.empty(*size, *rest, dtype=torch.float32, device=q_RHD.device)
        for rest in ((head_dim,), ())
    )
    if arrivals is not None:
        has_room = num_rows * num_kv_heads <= arrivals.numel()
        arrivals = arrivals if num_splits in _LAST_MERGES and has_room else None
    return Parts(results, lse, arrivals)


def choose_num_splits(num_programs: int, num_sms: int, num_kv_heads: int, per_sm: int) -> int:
    """Programs that share one row's context, so that there are at least `per_sm` an SM, or a little
    less than that where it would be much more.

    Without splits there are `num_programs`, one a row and KV head. Host integers alone decide,
    never the lengths, so that a captured graph fits every step of its shape. Of 24 rows of 1,088
    tokens 3 splits (1.45 waves) take 34.3 µs and 2 take 30.6; of 12 rows 5 (1.2 waves) take 18.2
    and 4 take 19.7.
    """
    most = 32 if num_kv_heads >= 4 else 64  # a lone row of few heads needs more to reach every SM
    room = per_sm * num_sms
    num = triton.cdiv(room, num_programs)
    return min(most, num - 1 if num > 2 and 4 * num * num_programs > 5 * room else num)
