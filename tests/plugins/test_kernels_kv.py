"""Decode, prefill, slot map and write against plain torch; and the host's tiles.

Without a GPU they run in Triton's interpreter, in a process of their own, because TRITON_INTERPRET
must be set before triton is imported; there in float32 and float16, since the interpreter's
bfloat16 is wrong.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
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
from plugins.kv.kernels.limits import refusal  # noqa: E402
from plugins.kv.kernels.tiles import TILE, fill_tiles, max_tiles, tiles_shape  # noqa: E402

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
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor | None
    slots: torch.Tensor  # of the rows
    lengths: torch.Tensor  # of the rows


def make_cache(place, lengths, *, num_kv_heads, head_dim, block_size, paged=True, seed=0):
    """Rows in shuffled slots and blocks; NaN where no row may read, wild ids in unused entries."""
    device, dtype = place
    rng = np.random.default_rng(seed)
    num_slots = len(lengths) + 3
    slots = rng.permutation(num_slots)[: len(lengths)]
    if not paged:
        block_size = max(*lengths, 1)
    per_slot = -(-max(*lengths, 1) // block_size)
    num_blocks = num_slots * per_slot + 1
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    k, v = (torch.full(shape, torch.nan, dtype=dtype) for _ in "kv")
    table = np.full((num_slots + 1, per_slot + 1), FAR, np.int32)
    free = rng.permutation(num_blocks)
    generator = torch.Generator().manual_seed(seed)
    for i, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        blocks = free[i * per_slot :][: -(-length // block_size)] if paged else [slot]
        table[slot, : len(blocks)] = blocks
        for position in range(length):
            for cache in (k, v):
                row = torch.randn(num_kv_heads, head_dim, generator=generator)
                cache[blocks[position // block_size], :, position % block_size] = row.to(dtype)
    tensors = [torch.tensor(x, dtype=torch.int32, device=device) for x in (slots, lengths)]
    return Cache(
        k.to(device), v.to(device), torch.tensor(table).to(device) if paged else None, *tensors
    )


def assert_close(found, wanted, dtype):
    tolerance = parity.ATTENTION[dtype]
    torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------- decode

# Query heads, KV heads, head_dim, block size: groups that are no powers of two, blocks that hold
# tiles, that tiles hold, and that do neither.
SHAPES = [
    (4, 2, 64, 16),
    (3, 1, 32, 5),
    (7, 1, 16, 1),
    (16, 1, 16, 64),
    (2, 1, 128, 32),
    (2, 2, 80, 7),
    (3, 1, 96, 128),
    (2, 1, 256, 48),
]


@pytest.mark.parametrize("num_splits", [1, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("place", FEWER_PLACES, ids=str)
def test_decode(place, shape, num_splits):
    check_decode(place, shape, [1, 129, 0, 16, 70, 33, 9], 5, num_splits)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_decode_of_contiguous_slots(place, head_dim, num_splits):
    check_decode(place, (6, 2, head_dim, None), [100, 131, 0, 1], 4, num_splits)


def check_decode(place, shape, lengths, num_decodes, num_splits):
    from plugins.kv.kernels.decode import decode_attention, decode_attention_reference

    num_heads, num_kv_heads, head_dim, block_size = shape
    cache = make_cache(
        place, lengths, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size or 0,
        paged=block_size is not None,
    )  # fmt: skip
    rows, static = len(lengths), {"block_size": cache.k.shape[2], "scale": head_dim**-0.5}
    q = randn(place, rows + 2, num_heads + 1, head_dim)[:, 1:]  # strided over tokens
    given = (q, cache.k, cache.v, cache.table, cache.slots, cache.lengths)
    wanted = decode_attention_reference(*given, num_decodes, **static)
    arrivals = torch.zeros(64, dtype=torch.int32, device=place[0])
    # Merged by a kernel of its own, and by the last to come, which leaves the counts as they were.
    for merging in (None, arrivals) if (num_splits or 1) > 2 else (None,):
        out = poisoned(q.contiguous())
        decode_attention(
            *given, ints(place, [num_decodes]), num_rows=rows, out=out, num_splits=num_splits,
            arrivals=merging, **static,
        )  # fmt: skip
        assert_close(out[:num_decodes], wanted, place[1])
        assert out[num_decodes:].isnan().all(), "rows that do not decode belong to others"
        assert (out[:num_decodes][cache.lengths[:num_decodes] == 0] == 0).all()
    assert not arrivals.any()


def test_decode_into_flat_output_and_in_blocks_with_gaps(place):
    from plugins.kv.kernels.decode import decode_attention, decode_attention_reference

    cache = make_cache(place, [40, 21], num_kv_heads=2, head_dim=32, block_size=16)
    # As one layer of [N, L, K, B, D]: blocks are contiguous, the cache is not.
    k, v = (torch.stack((poisoned(c), c), 1)[:, 1] for c in (cache.k, cache.v))
    q = randn(place, 2, 4, 32)
    out = poisoned(q).flatten(1)
    rest = (cache.table, cache.slots, cache.lengths)
    decode_attention(
        q, k, v, *rest, ints(place, [2]), block_size=16, scale=0.2, num_rows=2, out=out
    )
    wanted = decode_attention_reference(q, cache.k, cache.v, *rest, 2, block_size=16, scale=0.2)
    assert_close(out, wanted.flatten(1), place[1])


def test_decode_with_scores_far_apart(place):
    """A maximum that moves by tens from tile to tile, in both directions, and across splits."""
    from plugins.kv.kernels.decode import decode_attention, decode_attention_reference

    lengths = [400, 300]
    cache = make_cache(place, lengths, num_kv_heads=1, head_dim=64, block_size=32)
    steps = torch.arange(cache.k.shape[0], device=cache.k.device) % 5 * 8.0 - 16.0
    cache.k.mul_(steps[:, None, None, None].to(cache.k.dtype))
    q = randn(place, 2, 2, 64)
    given = (q, cache.k, cache.v, cache.table, cache.slots, cache.lengths)
    static = {"block_size": 32, "scale": 0.125}
    wanted = decode_attention_reference(*given, 2, **static)
    for num_splits in (1, 4, None):
        out = poisoned(q)
        decode_attention(
            *given, ints(place, [2]), num_rows=2, out=out, num_splits=num_splits, **static
        )
        assert_close(out, wanted, place[1])


def test_the_last_to_come_merges_what_is_too_much_to_hold_at_once(place, monkeypatch):
    from plugins.kv.kernels import splits

    monkeypatch.setattr(splits, "_ELEMENTS", 1)
    check_decode(place, (6, 2, 80, 7), [90, 131, 0, 1], 4, 13)


def test_counts_are_there_for_so_many_rows_and_some_numbers_of_splits():
    from plugins.kv.kernels.splits import parts_of

    q, arrivals = torch.empty(9, 4, 16), torch.zeros(8, dtype=torch.int32)
    merges = [
        parts_of(q, num_rows, 2, num_splits, arrivals).arrivals is not None
        for num_rows, num_splits in ((4, 3), (4, 13), (4, 2), (4, 14), (5, 3), (4, 1))
    ]
    assert merges == [True, True, False, False, False, False]
    assert parts_of(q, 4, 2, 3, None).arrivals is None


def test_splits_fill_the_gpu_and_never_depend_on_lengths():
    from plugins.kv.kernels.decode import NARROW, WIDE, default_launch

    found = [default_launch(rows, 8, 132) for rows in (1, 8, 12, 16, 24, 32, 48, 64, 72, 256)]
    assert [splits for splits, _ in found] == [32, 7, 5, 3, 2, 2, 1, 1, 2, 1]
    assert "".join("N" if share is NARROW else "W" for _, share in found) == "WWWWWNWNWW"
    assert default_launch(1, 2, 132) == (64, WIDE)
    for rows in range(2, 300):
        splits, share = default_launch(rows, 8, 132)
        waves = splits * rows * 8 / (share.per_sm * 132)
        assert waves / math.ceil(waves) > (0.65 if rows > 24 else 0.5)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_decode_in_narrow_tiles(place, num_splits, monkeypatch):
    """What 25 to 98 rows of 8 KV heads may take on a GPU, with few rows."""
    from plugins.kv.kernels import decode

    monkeypatch.setattr(decode, "default_launch", lambda *_: (num_splits, decode.NARROW))
    check_decode(place, (4, 2, 128, 16), [1, 129, 0, 70, 33], 4, None)


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


@pytest.mark.parametrize("shape", [*SHAPES, (2, 1, 64, None), (2, 1, 80, None)], ids=str)
@pytest.mark.parametrize("place", FEWER_PLACES, ids=str)
def test_prefill(place, shape):
    from plugins.kv.kernels.prefill import prefill_attention, prefill_attention_reference

    num_heads, num_kv_heads, head_dim, block_size = shape
    # Two decode rows, then chunks with and without a context.
    num_queries, lengths = [1, 1, 2, 130, 9, 64], [7, 90, 2, 150, 139, 64]
    cache = make_cache(
        place, lengths, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size or 0,
        paged=block_size is not None,
    )  # fmt: skip
    step = host_batch(num_queries, lengths, num_decodes=2)
    shape, dtype = tiles_shape(Limits(1000, 8, 300))
    tiles = np.full(shape, 77, dtype)
    assert fill_tiles(step, tiles) == 5
    q = randn(place, step.num_tokens + 3, num_heads, head_dim + 16)[..., :head_dim]
    out = poisoned(q.contiguous())
    given = (
        q,
        cache.k,
        cache.v,
        cache.table,
        cache.slots,
        ints(place, step.query_start),
        cache.lengths,
    )
    static = {"block_size": cache.k.shape[2], "scale": head_dim**-0.5}
    prefill_attention(*given, ints(place, tiles), out=out, **static)
    wanted = prefill_attention_reference(*given, range(2, 6), **static)
    mine = slice(2, step.num_tokens)
    assert_close(out[mine], wanted[mine], place[1])
    assert out[:2].isnan().all() and out[step.num_tokens :].isnan().all()


@pytest.mark.parametrize("num_tokens", [1, 16, 70, 200])
@pytest.mark.parametrize("shape", [shape[:3] for shape in SHAPES], ids=str)
@pytest.mark.parametrize("place", FEWER_PLACES, ids=str)
def test_fresh(place, shape, num_tokens):
    """Behind the prompt lies what is never read, between its heads what others have."""
    from plugins.kv.kernels.fresh import fresh_attention, fresh_attention_reference

    num_heads, num_kv_heads, head_dim = shape
    q = randn(place, num_tokens, num_heads + 1, head_dim + 16)[:, 1:, :head_dim]
    room = [poisoned(randn(place, num_tokens + 3, num_kv_heads, head_dim)) for _ in "kv"]
    for seed, cache in enumerate(room):
        cache[:num_tokens] = randn(place, num_tokens, num_kv_heads, head_dim, seed=seed)
    k, v = (cache[:num_tokens] for cache in room)
    found = fresh_attention(q, k, v, scale=head_dim**-0.5)
    wanted = fresh_attention_reference(q, k, v, scale=head_dim**-0.5)
    assert found.is_contiguous() and found.dtype == place[1]
    assert_close(found, wanted, place[1])


def test_fewer_tiles_are_on_their_way_where_there_is_less_room():
    from plugins.kv.kernels.fresh import _launch

    stages = [_launch(512, dim, 2, room << 10).num_stages for dim, room in
              ((128, 227), (128, 163), (64, 163), (64, 99), (256, 99))]  # fmt: skip
    assert stages == [3, 2, 3, 2, 2]


def test_short_prompts_of_so_many_heads_are_for_the_kernel():
    from plugins.kv.kernels.fresh import suits_fresh

    half, shapes = torch.float16, [(1152, 16, 128), (1152, 14, 64), (576, 32, 128)]
    assert all(suits_fresh(torch.empty(shape, dtype=half)) for shape in shapes)
    beyond = [(1153, 14, 64), (577, 32, 128), (8, 8, 256)]
    assert not any(suits_fresh(torch.empty(shape, dtype=half)) for shape in beyond)
    assert not suits_fresh(torch.empty(8, 8, 64))


def test_a_prompt_in_chunks_is_the_prompt_at_once(place):
    """Up to rounding; and its last query is a decode."""
    from plugins.kv.kernels.decode import decode_attention
    from plugins.kv.kernels.prefill import prefill_attention

    length, static = 200, {"block_size": 16, "scale": 0.125}
    cache = make_cache(place, [length], num_kv_heads=1, head_dim=64, block_size=16)
    q = randn(place, length, 2, 64)

    def attend(lo, hi):
        tiles = np.zeros((max_tiles(hi - lo, 1), 2), np.int32)
        fill_tiles(host_batch([hi - lo], [hi]), tiles)
        out = poisoned(q[lo:hi])
        prefill_attention(
            q[lo:hi], cache.k, cache.v, cache.table, cache.slots, ints(place, [0, hi - lo]),
            ints(place, [hi]), ints(place, tiles), out=out, **static,
        )  # fmt: skip
        return out

    whole = attend(0, length)
    assert_close(torch.cat([attend(0, 70), attend(70, 71), attend(71, length)]), whole, place[1])
    last = poisoned(q[-1:])
    decode_attention(
        q[-1:], cache.k, cache.v, cache.table, cache.slots, cache.lengths, ints(place, [1]),
        num_rows=1, out=last, **static,
    )  # fmt: skip
    assert_close(last, whole[-1:], place[1])


def test_tiles_are_every_query_of_every_prefill_row_once_and_the_longest_come_first():
    rng = np.random.default_rng(3)
    for _ in range(50):
        num_rows = int(rng.integers(1, 12))
        num_decodes = int(rng.integers(0, num_rows + 1))
        num_queries = np.where(np.arange(num_rows) < num_decodes, 1, rng.integers(1, 500, num_rows))
        step = host_batch(num_queries, num_queries + rng.integers(0, 900, num_rows), num_decodes)
        out = np.full((max_tiles(step.num_tokens, num_rows) + 2, 2), 5, np.int32)
        num_tiles = fill_tiles(step, out)
        wanted = {
            (r, f) for r in range(num_decodes, num_rows) for f in range(0, num_queries[r], TILE)
        }
        assert num_tiles == len(wanted)
        assert {(int(r), int(f)) for r, f in out[:num_tiles]} == wanted
        assert (out[num_tiles:] == -1).all()
        ends = [step.seq_lens[r] - num_queries[r] + f for r, f in out[:num_tiles]]
        assert ends == sorted(ends, reverse=True)


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs"), [(1, 1), (5, 9), (300, 2), (1000, 7), (1024, 8)]
)
def test_the_bound_on_tiles_is_reached_and_never_passed(num_tokens, num_seqs):
    rows = min(num_seqs, num_tokens)
    most = 0
    for short in range(rows):  # `short` rows of one token, the others share what is left
        left, others = num_tokens - short, rows - short
        num_queries = np.array(
            [1] * short + [left // others + (i < left % others) for i in range(others)]
        )
        most = max(most, int((-(-num_queries // TILE)).sum()))
    assert most == max_tiles(num_tokens, num_seqs)
    assert tiles_shape(Limits(4096, num_seqs, num_tokens)) == ((most, 2), "int32")


# ----------------------------------------------------------------------------- slot map and writing


@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("paged", [True, False])
def test_slot_map(place, paged, block_size):
    from plugins.kv.kernels.slot_map import fill_slot_map, slot_map_reference

    rng = np.random.default_rng(0)
    num_slots, width, num_tokens = 9, 7, 300
    table = ints(place, rng.integers(1, 1000, (num_slots + 1, width)))
    table[num_slots] = 0  # the trash slot
    positions = ints(place, rng.integers(0, width * block_size, num_tokens))
    token_slots = ints(place, rng.integers(0, num_slots, num_tokens))
    positions[-4:], token_slots[-4:] = 0, num_slots
    out = ints(place, [-7] * (num_tokens + 5))
    table = table if paged else None
    fill_slot_map(positions, token_slots, table, block_size, out)
    assert out[:num_tokens].equal(slot_map_reference(positions, token_slots, table, block_size))
    assert (out[num_tokens:] == -7).all()
    assert (out[num_tokens - 4 : num_tokens] == (0 if paged else num_slots * block_size)).all()


@pytest.mark.parametrize("has_fresh", [False, True])
@pytest.mark.parametrize("shape", [(1, 16, 1), (3, 80, 5), (8, 128, 16), (2, 256, 3)], ids=str)
def test_write(place, shape, has_fresh):
    from plugins.kv.kernels.write import write_kv, write_kv_reference

    num_kv_heads, head_dim, block_size = shape
    num_tokens, num_blocks = 21, 40
    packed = randn(place, num_tokens, 3 * num_kv_heads, head_dim)
    k, v = packed[:, num_kv_heads : 2 * num_kv_heads], packed[:, 2 * num_kv_heads :]
    order = np.random.default_rng(0).permutation(num_blocks * block_size)[: num_tokens + 6]
    slot_map = ints(place, order)
    caches = [
        poisoned(randn(place, num_blocks, num_kv_heads, block_size, head_dim)) for _ in range(4)
    ]
    fresh = [poisoned(randn(place, num_tokens + 2, num_kv_heads, head_dim)) for _ in range(4)]
    write_kv(k, v, *caches[:2], slot_map, block_size, fresh=tuple(fresh[:2]) if has_fresh else None)
    write_kv_reference(
        k, v, *caches[2:], slot_map, block_size, tuple(fresh[2:]) if has_fresh else None
    )
    for found, wanted in ((caches[0], caches[2]), (caches[1], caches[3])):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    for found, wanted in ((fresh[0], fresh[2]), (fresh[1], fresh[3])):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert fresh[0].isnan().all() != has_fresh


# ------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("head_dim", "num_heads", "num_kv_heads", "words"),
    [
        (128, 16, 8, None),
        (80, 7, 1, None),
        (16, 16, 1, None),
        (256, 3, 1, None),
        (8, 2, 1, "head_dim is 8"),
        (100, 2, 1, "head_dim is 100"),
        (512, 2, 1, "head_dim is 512"),
        (64, 34, 2, "17 query heads"),
    ],
)
def test_what_the_kernels_refuse(head_dim, num_heads, num_kv_heads, words):
    facts = SimpleNamespace(head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
    found = refusal(facts)
    assert found is None if words is None else words in found
