"""The kernels of INT8 against plain torch: decode, prefill, and codes bit for bit.

Without a GPU they run in Triton's interpreter, as those of test_kernels_kv.py, in float32 and
float16.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed here")

from core.batch import HostBatch, Limits  # noqa: E402
from core.testing import parity  # noqa: E402
from core.testing.interpreter import (  # noqa: E402
    FEWER_PLACES,
    HERE,
    INTERPRETING,
    PLACES,
    ints,
    needs_loops,
    poisoned,
    randn,
    run_in_the_interpreter,
)
from plugins.kv.int8_storage import dequantize, quantize  # noqa: E402
from plugins.kv.kernels.tiles import fill_tiles, tiles_shape  # noqa: E402

HALF_PLACES = PLACES[1:] if INTERPRETING else PLACES[:2]  # of 16 bits
# Of outputs below 2 or so. Decode rounds the output alone, and queries to 2**-16 of their largest
# channel; prefill rounds queries and weights to the dtype too.
DECODE_TOLERANCE, PREFILL_TOLERANCE = parity.INT8_DECODE, parity.ATTENTION
FAR = 1 << 28  # a block id that nothing may follow


@pytest.fixture(params=PLACES, ids=str)
def place(request):
    return request.param


@needs_loops
@pytest.mark.skipif(INTERPRETING, reason=HERE)
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)


# ------------------------------------------------------------------------------------------ a cache


class Cache(NamedTuple):
    factor: torch.Tensor  # [K, D]
    codes: tuple[torch.Tensor, torch.Tensor]  # [N, K, B, D] and [N, K, D, B]
    scales: tuple[torch.Tensor, torch.Tensor]  # [N, K, B] each
    table: torch.Tensor
    slots: torch.Tensor  # of the rows
    lengths: torch.Tensor  # of the rows


def make_cache(place, lengths, *, num_kv_heads, head_dim, block_size, seed=0):
    """Rows in shuffled slots and blocks; where no row may read, large codes with scales of NaN."""
    device, _ = place
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    num_slots, per_slot = len(lengths) + 3, -(-max(*lengths, 1) // block_size)
    slots = rng.permutation(num_slots)[: len(lengths)]
    # Block 0 is the trash block, which kernels may load and must not use.
    free = 1 + rng.permutation(num_slots * per_slot)
    shape = (num_slots * per_slot + 1, num_kv_heads, block_size, head_dim)
    codes = [torch.full(shape, 127, dtype=torch.int8) for _ in "kv"]
    scales = [torch.full(shape[:3], torch.nan) for _ in "kv"]
    table = np.full((num_slots + 1, per_slot + 1), FAR, np.int32)
    for i, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        blocks = free[i * per_slot :][: -(-length // block_size)]
        table[slot, : len(blocks)] = blocks
        positions = np.arange(length)
        for code, scale in zip(codes, scales, strict=True):
            x = torch.randn(length, num_kv_heads, head_dim, generator=generator)
            where = blocks[positions // block_size], slice(None), positions % block_size
            code[where], scale[where] = quantize(x)
    codes[1] = codes[1].transpose(2, 3).contiguous()
    factor = torch.rand(num_kv_heads, head_dim, generator=generator) * 0.9 + 0.1
    slots, lengths = ints(place, slots), ints(place, lengths)
    return Cache(
        factor.to(device),
        tuple(code.to(device) for code in codes),
        tuple(scale.to(device) for scale in scales),
        torch.tensor(table).to(device),
        slots,
        lengths,
    )


def assert_close(found, wanted, tolerance):
    torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------- decode

# Query heads, KV heads, head_dim, block size: groups of 1 to 16, blocks that hold tiles, that tiles
# hold, and that do neither.
SHAPES = [
    (4, 2, 64, 16),
    (7, 1, 64, 32),
    (2, 2, 128, 8),
    (2, 1, 128, 64),
    (3, 1, 32, 5),
    (16, 1, 16, 1),
    (9, 1, 64, 128),
    (2, 2, 80, 7),
    (2, 1, 256, 48),
]


def decode(cache, place, q, num_decodes, num_splits=None, launch=None, **static):
    from plugins.kv.kernels.decode_int8 import decode_int8

    out = poisoned(q.contiguous())
    decode_int8(
        q, *cache, ints(place, [num_decodes]), num_rows=len(cache.lengths), out=out,
        num_splits=num_splits, launch=launch, **static,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("num_splits", [1, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("place", FEWER_PLACES, ids=str)
def test_decode(place, shape, num_splits):
    check_decode(place, shape, num_splits)


def test_decode_in_every_dtype(place):
    check_decode(place, SHAPES[0], 3)


@pytest.mark.parametrize("launch", [(32, 1, 2), (64, 2, 4), (128, 4, 3), (128, 8, 3)], ids=str)
@pytest.mark.parametrize("place", FEWER_PLACES[:1], ids=str)
def test_decode_by_other_launches(place, launch):
    from plugins.kv.kernels.decode_int8 import Launch

    check_decode(place, (4, 2, 128, 16), 2, Launch(*launch))


def check_decode(place, shape, num_splits, launch=None):
    from plugins.kv.kernels.decode_int8 import decode_int8_reference

    num_heads, num_kv_heads, head_dim, block_size = shape
    lengths, num_decodes = [1, 129, 0, 16, 70, 33, 9], 5
    cache = make_cache(
        place, lengths, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size
    )
    static = {"block_size": block_size, "scale": head_dim**-0.5}
    q = randn(place, len(lengths) + 2, num_heads + 1, head_dim)[:, 1:]  # strided over tokens
    wanted = decode_int8_reference(q, *cache, num_decodes, **static)
    arrivals = torch.zeros(64, dtype=torch.int32, device=place[0])
    for merging in (None, arrivals) if num_splits > 2 else (None,):
        options = {**static, "arrivals": merging}
        out = decode(cache, place, q, num_decodes, num_splits, launch, **options)
        assert_close(out[:num_decodes], wanted, DECODE_TOLERANCE[place[1]])
        assert out[num_decodes:].isnan().all(), "rows that do not decode belong to others"
        assert (out[:num_decodes][cache.lengths[:num_decodes] == 0] == 0).all()
    assert not arrivals.any()


def test_decode_into_flat_output(place):
    from plugins.kv.kernels.decode_int8 import decode_int8, decode_int8_reference

    cache = make_cache(place, [40, 21], num_kv_heads=2, head_dim=32, block_size=16)
    q = randn(place, 2, 4, 32)
    out = poisoned(q).flatten(1)
    decode_int8(q, *cache, ints(place, [2]), block_size=16, scale=0.2, num_rows=2, out=out)
    wanted = decode_int8_reference(q, *cache, 2, block_size=16, scale=0.2)
    assert_close(out, wanted.flatten(1), DECODE_TOLERANCE[place[1]])


@pytest.mark.parametrize("place", HALF_PLACES, ids=str)
def test_decode_errs_less_than_plain_torch(place):
    """Which rounds the queries, keys and values that it multiplies to the dtype of the model."""
    from plugins.kv.kernels.decode import decode_attention_reference
    from plugins.kv.kernels.decode_int8 import decode_int8_reference

    lengths, static = [300, 70, 150], {"block_size": 16, "scale": 0.125}
    cache = make_cache(place, lengths, num_kv_heads=2, head_dim=64, block_size=16)
    q = randn(place, 3, 8, 64) * 4
    exact = decode_int8_reference(q, *cache, 3, **static)
    smooth = (q.float().unflatten(1, (2, -1)) * cache.factor[:, None]).flatten(1, 2).to(q.dtype)
    codes = cache.codes[0], cache.codes[1].transpose(2, 3)
    k, v = (dequantize(*pair).to(q.dtype) for pair in zip(codes, cache.scales, strict=True))
    plain = decode_attention_reference(smooth, k, v, *cache[3:], 3, **static).to(q.dtype)
    out = decode(cache, place, q, 3, **static)
    off, plain_off = ((x.float() - exact).square().mean().sqrt() for x in (out, plain))
    assert off <= plain_off


@pytest.mark.parametrize("place", HALF_PLACES, ids=str)
def test_weights_keep_their_low_part(place):
    """Few keys, so that no rounding averages out, and an output that is not rounded."""
    from plugins.kv.kernels.decode_int8 import decode_int8, decode_int8_reference

    cache = make_cache(place, [3, 2, 5], num_kv_heads=2, head_dim=64, block_size=16)
    q = randn(place, 3, 8, 64)
    out = poisoned(q.float())
    static = {"block_size": 16, "scale": 0.125}
    decode_int8(q, *cache, ints(place, [3]), num_rows=3, out=out, num_splits=1, **static)
    assert_close(out, decode_int8_reference(q, *cache, 3, **static), 2e-4)


@pytest.mark.parametrize("place", FEWER_PLACES, ids=str)
def test_decode_with_an_outlier_in_the_queries(place):
    """Smoothing moves the outlier of a key channel into Q, where one INT8 would drown the rest."""
    from plugins.kv.kernels.decode_int8 import decode_int8_reference

    lengths, static = [300, 200], {"block_size": 16, "scale": 0.125}
    cache = make_cache(place, lengths, num_kv_heads=1, head_dim=64, block_size=16)
    q = randn(place, 2, 4, 64)
    q[..., 9] = 300.0
    cache.factor[:, 9] = 1.0
    cache.codes[0][..., 9] = 1  # a constant that softmax cancels: only the rest decides
    wanted = decode_int8_reference(q, *cache, 2, **static)
    out = decode(cache, place, q, 2, **static)
    one_int8 = q.float() * cache.factor
    step = one_int8.abs().amax(-1, keepdim=True) / 127
    rough = cache._replace(factor=torch.ones_like(cache.factor))
    rough = decode_int8_reference((one_int8 / step).round() * step, *rough, 2, **static)
    worst = (out.float() - wanted).abs().max()
    # The low part leaves 2^-16 of the outlier: 0.005 in every channel of Q.
    assert worst <= max(DECODE_TOLERANCE[place[1]] * 2, 2e-3)
    assert (rough - wanted).abs().max() > 20 * worst, "this would show nothing"


def test_decode_with_scores_far_apart(place):
    """A maximum that moves by tens from tile to tile, in both directions, and across splits."""
    from plugins.kv.kernels.decode_int8 import decode_int8_reference

    cache = make_cache(place, [400, 300], num_kv_heads=1, head_dim=64, block_size=32)
    steps = torch.arange(len(cache.table) * 20, device=place[0]) % 5 * 8.0 - 16.0
    cache.scales[0].mul_(steps[: len(cache.scales[0]), None, None])  # negative ones: why not
    q = randn(place, 2, 2, 64)
    static = {"block_size": 32, "scale": 0.125}
    wanted = decode_int8_reference(q, *cache, 2, **static)
    for num_splits in (1, 4, None):
        out = decode(cache, place, q, 2, num_splits, **static)
        assert_close(out, wanted, 8 * DECODE_TOLERANCE[place[1]])  # scores of 60 are 30 times ours


def test_decode_of_zeros_is_the_mean_and_exact(place):
    """What the page oracle asks: q = 0, values of one size, so that the sum is of integers."""
    cache = make_cache(place, [48, 7], num_kv_heads=2, head_dim=32, block_size=16)
    for scale in cache.scales:
        scale.copy_(torch.where(scale.isnan(), scale, 1 / 127))
    codes = cache.codes[1]
    codes.copy_(torch.where(codes > 0, 127, -127))
    q = torch.zeros_like(randn(place, 2, 4, 32))
    out = decode(cache, place, q, 2, 1, block_size=16, scale=1.0)
    for row, length in enumerate((48, 7)):
        blocks = cache.table[cache.slots[row], : -(-length // 16)].long()
        values = codes[blocks].float().permute(0, 3, 1, 2).flatten(0, 1)[:length] / 127
        wanted = values.sum(0).repeat_interleave(2, 0)
        assert (out[row].float() * length - wanted).abs().max() < 0.1


# ------------------------------------------------------------------------------------------ prefill


def host_batch(num_queries, lengths, num_decodes=0):
    starts = np.concatenate([[0], np.cumsum(num_queries)]).astype(np.int32)
    lengths = np.asarray(lengths, np.int32)
    rows = np.repeat(np.arange(len(lengths), dtype=np.int32), num_queries)
    positions = np.arange(starts[-1], dtype=np.int32) - starts[rows] + (lengths - num_queries)[rows]
    slots = np.arange(len(lengths), dtype=np.int32)
    return HostBatch(
        int(starts[-1]), len(lengths), num_decodes, slots, starts, lengths, positions, slots[rows]
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("place", FEWER_PLACES, ids=str)
def test_prefill(place, shape):
    check_prefill(place, shape)


def test_prefill_in_every_dtype(place):
    check_prefill(place, (3, 1, 48, 12))


def check_prefill(place, shape):
    from plugins.kv.kernels.prefill_int8 import prefill_int8, prefill_int8_reference

    num_heads, num_kv_heads, head_dim, block_size = shape
    # Two decode rows, then chunks with and without a context.
    num_queries, lengths = [1, 1, 2, 130, 9, 64], [7, 90, 2, 150, 139, 64]
    cache = make_cache(
        place, lengths, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size
    )
    step = host_batch(num_queries, lengths, num_decodes=2)
    shape, dtype = tiles_shape(Limits(1000, 8, 300))
    tiles = np.full(shape, 77, dtype)
    assert fill_tiles(step, tiles) == 5
    q = randn(place, step.num_tokens + 3, num_heads, head_dim + 16)[..., :head_dim]
    out = poisoned(q.contiguous())
    given = (q, *cache[:5], ints(place, step.query_start), cache.lengths)
    static = {"block_size": block_size, "scale": head_dim**-0.5}
    prefill_int8(*given, ints(place, tiles), out=out, **static)
    wanted = prefill_int8_reference(*given, range(2, 6), **static)
    mine = slice(2, step.num_tokens)
    assert_close(out[mine], wanted[mine], PREFILL_TOLERANCE[place[1]])
    assert out[:2].isnan().all() and out[step.num_tokens :].isnan().all()


# ------------------------------------------------------------------------------------------ writing


@pytest.mark.parametrize("has_fresh", [False, True])
@pytest.mark.parametrize("shape", [(1, 16, 1), (3, 80, 5), (8, 128, 16), (2, 64, 8)], ids=str)
def test_write(place, shape, has_fresh):
    """Codes and scales bit for bit, of strided rows, and nothing beside them."""
    from plugins.kv.kernels.write_int8 import write_int8, write_int8_reference

    num_kv_heads, head_dim, block_size = shape
    num_tokens, num_blocks = 21, 40
    packed = randn(place, num_tokens, 3 * num_kv_heads, head_dim) * 3
    packed[3] = 0.0
    packed[4] *= 1e-5
    packed[5, :, :8] = torch.tensor([127.0, 2.5, 3.5, -2.5, -0.5, 1.5, -127.0, 126.5])
    packed[5, :, 8:] = 0.0  # a scale of 1, and ties
    k, v = packed[:, num_kv_heads : 2 * num_kv_heads], packed[:, 2 * num_kv_heads :]
    generator = torch.Generator().manual_seed(5)
    shift, factor = torch.rand(2, num_kv_heads, head_dim, generator=generator).to(place[0]) + 0.05
    order = np.random.default_rng(0).permutation(num_blocks * block_size)[: num_tokens + 6]
    slot_map = ints(place, order)

    def empty(device):
        shapes = (num_blocks, num_kv_heads, block_size, head_dim)
        codes = torch.full(shapes, 99, dtype=torch.int8, device=device)
        scales = torch.full(shapes[:3], 77.0, device=device)
        room = (num_tokens + 2, num_kv_heads, head_dim)
        fresh = torch.full((2, *room), torch.nan, dtype=place[1], device=device)
        transposed = codes.transpose(2, 3).clone(memory_format=torch.contiguous_format)
        return (codes, transposed), (scales, scales.clone()), (fresh[0], fresh[1])

    found, wanted = empty(place[0]), empty("cpu")
    given = (k, v, shift, factor)
    write_int8(*given, *found[:2], slot_map, block_size, found[2] if has_fresh else None)
    write_int8_reference(
        *(x.cpu() for x in given), *wanted[:2], slot_map.cpu(), block_size,
        wanted[2] if has_fresh else None,
    )  # fmt: skip
    for made, expected in zip(sum(found, ()), sum(wanted, ()), strict=True):
        torch.testing.assert_close(made.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    assert found[2][0].isnan().all() != has_fresh
    assert (found[0][0] != 99).any() and (found[0][1] == 99).any()
