"""Chunks behind a prefix by cuDNN: which steps, which room, and on a GPU what comes out of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from core import Engine, SamplingParams
from core.batch import BatchShape, HostBatch, Limits
from core.testing import parity
from core.testing.graphs_gpu import Watch
from core.testing.parity import Error, Transformers, held_to, tokens_held_to
from core.testing.rig import tiny_facts, to_batch
from core.testing.tiny import save_tiny
from plugins.kv import cudnn, int8_storage, storage

BF16 = torch.bfloat16


def facts_of(num_heads=16, num_kv_heads=8, head_dim=128, dtype=BF16):
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return replace(tiny_facts(dtype), max_position=8192, **heads)


# ----------------------------------------------------------------------------------------- the host


@pytest.mark.parametrize(
    ("start", "num_tokens", "wanted"),
    [
        (1024, 1024, True),
        (7168, 2048, True),
        (0, 1024, False),  # fresh
        (None, 1024, False),
        (1024, 1025, False),
        (1024, 512, False),
        (1000, 1024, False),
    ],
)
def test_whole_are_multiples_behind_a_prefix(start, num_tokens, wanted):
    shape = BatchShape(num_tokens, 1, num_tokens, (start or 0) + num_tokens, start)
    assert cudnn.is_whole(shape) is wanted


@pytest.mark.parametrize(
    ("facts", "max_model_len", "max_num_batched_tokens", "num_tokens"),
    [
        (facts_of(), 40_960, 8192, 39 * 1024),
        (facts_of(), 3500, 1024, 2048),
        (facts_of(dtype=torch.float16, head_dim=80), 2048, 1024, 1024),
        (facts_of(), 2047, 1024, 0),
        (facts_of(), 40_960, 1023, 0),
        (facts_of(dtype=torch.float32), 40_960, 8192, 0),
        (facts_of(head_dim=256), 40_960, 8192, 0),
    ],
)
def test_the_room_for_a_prefix_is_paid_for(
    facts, max_model_len, max_num_batched_tokens, num_tokens
):
    limits = Limits(max_model_len, 4, max_num_batched_tokens)
    assert cudnn.prefix_tokens(facts, limits) == num_tokens
    without = storage.overhead_bytes(facts, limits, 9, num_prefix=0)
    num_bytes = 2 * num_tokens * facts.num_kv_heads * facts.head_dim * facts.dtype.itemsize
    assert storage.overhead_bytes(facts, limits, 9) - without == num_bytes
    channels = facts.num_layers * facts.num_kv_heads * facts.head_dim
    assert int8_storage.overhead_bytes(facts, limits, 9) == without + 2 * 4 * channels


# ---------------------------------------------------------------------------------------- on a GPU


LIMITS = Limits(6144, 4, 2048)
BLOCK = 16


def allocated(facts, is_paged):
    """A cache of NaN whose table, if it has one, is scrambled."""
    num_columns, num_slots, device = LIMITS.max_model_len // BLOCK, 5, torch.device("cuda")
    sizes = {"num_blocks": num_slots, "block_size": LIMITS.max_model_len, "table_width": 0}
    if is_paged:
        sizes = {"num_blocks": num_slots * num_columns + 1, "block_size": BLOCK}
        sizes["table_width"] = num_columns
    found = storage.allocate(facts, LIMITS, device, **sizes)
    found.k.fill_(torch.nan), found.v.fill_(torch.nan)
    if is_paged:
        order = torch.randperm(num_slots * num_columns, generator=torch.Generator().manual_seed(0))
        found.table.copy_(1 + order.view(num_slots, num_columns))
    return found


def a_chunk(start, num_tokens, slot):
    """The batch of a lone chunk of `slot`, with a list of tiles that holds none."""
    host = HostBatch(
        num_tokens, 1, 0,
        slots=np.array([slot], np.int32),
        query_start=np.array([0, num_tokens], np.int32),
        seq_lens=np.array([start + num_tokens], np.int32),
        positions=np.arange(start, start + num_tokens, dtype=np.int32),
        token_slots=np.full(num_tokens, slot, np.int32),
    )  # fmt: skip
    tiles = torch.full((64, 2), -1, dtype=torch.int32, device="cuda")
    return to_batch(host, LIMITS, {"tiles": tiles}, torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("is_paged", [True, False])
@pytest.mark.parametrize(("start", "num_tokens"), [(1024, 1024), (3072, 2048)])
@pytest.mark.parametrize("shape", [(16, 8, 128), (14, 2, 64), (8, 8, 80)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_a_whole_chunk_is_causal_attention(dtype, shape, start, num_tokens, is_paged):
    pytest.importorskip("triton", reason="needs triton, which is not installed here")
    from plugins.kv.cuda_path import CudaPath
    from plugins.kv.kernels.decode import attention_reference
    from plugins.kv.kernels.slot_map import slot_map_reference
    from plugins.kv.kernels.write import write_kv_reference

    facts, slot, length = facts_of(*shape, dtype), 2, start + num_tokens
    cache = allocated(facts, is_paged)
    num_heads, num_kv_heads, head_dim = shape
    generator = torch.Generator("cuda").manual_seed(start)
    size = (length, num_heads + 2 * num_kv_heads, head_dim)
    packed = torch.randn(size, generator=generator, device="cuda").to(dtype)
    q, k, v = packed.split((num_heads, num_kv_heads, num_kv_heads), 1)
    q = 2 * q[start:]  # some keys count for more than others
    positions = torch.arange(start, dtype=torch.int32, device="cuda")
    places = slot_map_reference(
        positions, torch.full_like(positions, slot), cache.table, cache.block_size
    )
    write_kv_reference(k[:start], v[:start], cache.k[1], cache.v[1], places, cache.block_size)
    path, batch = CudaPath(facts, cache), a_chunk(start, num_tokens, slot)
    path.begin_step(batch)
    path.write(1, k[start:], v[start:], batch)
    found = path.attend(1, q, batch).view(num_tokens, num_heads, head_dim)
    wanted = attention_reference(q, k, v, facts.softmax_scale)
    tolerance = parity.ATTENTION[dtype]
    torch.testing.assert_close(found.float(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_float32_and_short_limits_have_no_room_for_a_prefix():
    assert allocated(facts_of(), True).prefix[0].shape == (5120, 8, 128)
    assert allocated(facts_of(dtype=torch.float32), True).prefix is None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("cudnn") / "qwen3"
    return str(save_tiny("qwen3", path, max_position_embeddings=8192))


def engine(model, **options):
    limits = {"max_model_len": 4096, "max_num_seqs": 4, "max_num_batched_tokens": 1024}
    device = {"device": "cuda", "dtype": "bfloat16", "kv_cache_bytes": 1 << 28}
    return Engine(model=model, **limits, **device, enable_prefix_caching=False, **options)


def prompt(num_tokens):
    return np.random.default_rng(num_tokens).integers(3, 290, num_tokens).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["paged", "contiguous"])
@pytest.mark.parametrize(("graphs", "fusion"), [("none", "none"), ("none", "triton"),
                                                ("full", "none"), ("full", "triton")])  # fmt: skip
def test_a_prompt_of_four_chunks(checkpoint, graphs, fusion, kv, monkeypatch):
    """What is scored, and the tokens that follow, are as near to transformers as the rule asks."""
    lengths, attention = set(), cudnn.attention

    def watched(q_THD, k_SKD, v_SKD, *, is_causal, scale):
        lengths.add((len(q_THD), len(k_SKD), is_causal))
        return attention(q_THD, k_SKD, v_SKD, is_causal=is_causal, scale=scale)

    monkeypatch.setattr(cudnn, "attention", watched)
    ids, num_new = prompt(3500), 8
    with engine(checkpoint, graphs=graphs, fusion=fusion, kv=kv) as made:
        before = made.counters.num_eager_steps
        params = SamplingParams(max_tokens=num_new, ignore_eos=True)
        (output,) = made.generate([ids], params)
        assert output.error is None
        assert (made.counters.num_eager_steps == before) == (graphs == "full")
        whole = {(1024, 1024, True), (1024, 1024, False), (1024, 2048, False)}
        assert lengths == whole
        ours = torch.cat(made.score(ids, lambda first, logits, targets: logits.clone()))
    reference32, reference16 = Transformers(checkpoint, device="cuda").logits(
        ids + output.token_ids[:-1]
    )
    held_to(ours, reference32[: len(ids)], reference16[: len(ids)])
    noise = Error.of(reference16, reference32)
    tokens_held_to(torch.tensor(output.token_ids), reference32[-num_new:], noise)


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["paged", "contiguous", "paged_int8"])
@pytest.mark.parametrize("fusion", ["none", "triton"])
def test_replay_of_whole_chunks_equals_eager_bit_for_bit(checkpoint, fusion, kv):
    with engine(checkpoint, graphs="full", fusion=fusion, kv=kv) as made:
        watch = Watch(made)
        chunks = {BatchShape(1024, 1, 1024, 1024 + start, start) for start in (1024, 2048)}
        assert {shape for shape in made._executor._shapes if shape.start} == chunks
        for num_tokens in (2048, 3072, 3500):
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            (output,) = made.generate([prompt(num_tokens)], params)
            assert output.error is None
        assert made.counters.num_eager_steps == 0
    assert not watch.differing, f"replay and eager differ at {watch.differing[0]}"
    assert chunks <= watch.replayed
