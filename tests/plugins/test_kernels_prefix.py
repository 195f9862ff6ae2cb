"""What a chunk behind a prefix needs beside attention: the prefix in one piece, two parts merged.

Without a GPU it runs in Triton's interpreter, in a process of its own, because TRITON_INTERPRET
must be set before triton is imported.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed here")

from core.testing import parity  # noqa: E402
from core.testing.interpreter import (  # noqa: E402
    HERE,
    INTERPRETING,
    PLACES,
    ints,
    poisoned,
    randn,
    run_in_the_interpreter,
)

FAR = 1 << 28  # a block id that nothing may follow


@pytest.fixture(params=PLACES, ids=str)
def place(request):
    return request.param


@pytest.mark.skipif(INTERPRETING, reason=HERE)
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)


# KV heads, head_dim, block size (None: the slot is the block), tokens of the prefix.
@pytest.mark.parametrize(
    "shape",
    [(1, 16, 1, 7), (3, 80, 5, 23), (8, 128, 16, 32), (2, 64, 7, 49), (3, 48, None, 21)],
    ids=str,
)
def test_gather_prefix(place, shape):
    from plugins.kv.kernels.prefix import gather_prefix, gather_prefix_reference

    num_kv_heads, head_dim, block_size, num_tokens = shape
    is_paged, block_size = block_size is not None, block_size or num_tokens + 4
    num_blocks, num_slots, slot = 60, 6, 4
    k, v = (
        randn(place, num_blocks, num_kv_heads, block_size, head_dim, seed=seed) for seed in (1, 2)
    )
    used = -(-num_tokens // block_size)
    table = np.full((num_slots, used + 2), FAR, np.int32)
    table[slot, :used] = np.random.default_rng(0).permutation(num_blocks)[:used]
    table = ints(place, table) if is_paged else None
    slots = ints(place, [slot, FAR])
    room = [poisoned(randn(place, num_tokens + 3, num_kv_heads, head_dim)) for _ in "kv"]
    own = [tensor[:num_tokens] for tensor in room]
    gather_prefix(k, v, table, slots, *own, block_size=block_size)
    wanted = gather_prefix_reference(k, v, table, slots, num_tokens, block_size=block_size)
    for found, want, whole in zip(own, wanted, room, strict=True):
        assert found.equal(want) and whole[num_tokens:].isnan().all()
    place_of_5 = (int(table[slot, 5 // block_size]) if is_paged else slot), 5 % block_size
    assert own[1][5].equal(v[place_of_5[0], :, place_of_5[1]])


def parts_of(place, num_tokens, num_heads, head_dim):
    """Two parts as attention leaves them, head-strided and not, and their sums: from one part that
    counts for nothing to the other."""
    out = randn(place, num_tokens + 2, num_heads, head_dim, seed=1)
    part = randn(place, num_tokens, num_heads, head_dim + 16, seed=2)[..., :head_dim]
    lse, part_lse = (
        randn((place[0], torch.float32), num_heads, num_tokens, seed=seed, scale=3)
        for seed in (3, 4)
    )
    lse[0, 0], part_lse[0, 0] = -300.0, 300.0
    lse[-1, -1], part_lse[-1, -1] = 200.0, -200.0
    return out, lse, part, part_lse


@pytest.mark.parametrize("shape", [(1, 1, 16), (13, 3, 80), (37, 16, 128), (5, 7, 64)], ids=str)
def test_merge_parts(place, shape):
    from plugins.kv.kernels.prefix import merge_parts, merge_parts_reference

    num_tokens, num_heads, head_dim = shape
    out, lse, part, part_lse = parts_of(place, *shape)
    out[num_tokens:] = torch.nan
    own = out[:num_tokens]
    wanted = merge_parts_reference(own, lse, part, part_lse)
    second = part.clone()
    merge_parts(own, lse, part, part_lse)
    tolerance = parity.SPAN[place[1]]
    torch.testing.assert_close(own.float(), wanted, rtol=tolerance, atol=tolerance)
    assert out[num_tokens:].isnan().all() and part.equal(second)
    if num_tokens > 1:
        assert own[0, 0].equal(part[0, 0])  # all of the weight


def test_the_reference_merges_parts_into_the_whole():
    """Attention over a prefix and over a chunk, in plain torch, is causal attention over both."""
    from plugins.kv.kernels.decode import attention_reference
    from plugins.kv.kernels.prefix import merge_parts_reference

    place, length, n = ("cpu", torch.float32), 50, 20
    q = randn(place, n, 4, 16, seed=1, scale=2)
    k, v = (randn(place, length, 2, 16, seed=seed) for seed in (2, 3))
    own = plain_attention(q, k[-n:], v[-n:], is_causal=True, scale=0.25)
    before = plain_attention(q, k[:-n], v[:-n], is_causal=False, scale=0.25)
    found, wanted = merge_parts_reference(*own, *before), attention_reference(q, k, v, 0.25)
    tolerance = parity.ATTENTION[torch.float32]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def plain_attention(q_THD, k_SKD, v_SKD, *, is_causal, scale):
    """What plugins.kv.cudnn.attention gives, in float32."""
    group = q_THD.shape[1] // k_SKD.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k_SKD, v_SKD))
    scores = torch.einsum("thd,shd->hts", q_THD.float(), k) * scale
    if is_causal:
        scores += torch.full(scores.shape[1:], -torch.inf, device=k.device).triu(1)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v), scores.logsumexp(-1)
