"""On a GPU: replay equals eager bit for bit, compositions agree, memory comes back."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from core import Engine, SamplingParams
from core.testing import parity
from core.testing.graphs_gpu import Watch
from core.testing.tiny import save_tiny

pytestmark = pytest.mark.gpu


def prompts(lengths=(1, 2, 15, 16, 17, 40, 70, 200)):
    rng = np.random.default_rng(7)
    return [rng.integers(3, 290, n).tolist() for n in lengths]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "qwen3"
    save_tiny("qwen3", path)
    return str(path)


def engine(model, **options):
    defaults = {
        "model": model,
        "device": "cuda",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "kv_cache_bytes": 1 << 28,
    }
    return Engine(**{**defaults, **options})


@pytest.mark.parametrize("graphs", ["decode", "piecewise", "full"])
@pytest.mark.parametrize("kv", ["contiguous", "paged", "paged_int8"])
@pytest.mark.parametrize("fusion", ["none", "triton"])
def test_replay_equals_eager_at_the_same_padded_shape_bit_for_bit(checkpoint, graphs, kv, fusion):
    """Decode steps, lone prompts, chunks that sample no row, and mixes of them."""
    with engine(checkpoint, graphs=graphs, kv=kv, fusion=fusion) as e:
        watch = Watch(e)
        for lengths in ((2,), (15,), (64,), (200,), (400,), (1, 2, 15, 16, 17, 40, 70, 200, 300)):
            e.generate(prompts(lengths), SamplingParams(max_tokens=6, ignore_eos=True))
        num_graph_steps, num_eager_steps = e.counters.num_graph_steps, e.counters.num_eager_steps
    assert watch.differing == []
    assert {shape.decode_only for shape in watch.replayed} >= {True}
    assert num_graph_steps > 0 and (graphs == "decode" or num_eager_steps == 0)
    if graphs != "decode":
        assert {shape.fresh for shape in watch.replayed} == {True, False}
        assert any(not s.fresh and not s.decode_only for s in watch.replayed)


@pytest.mark.parametrize("graphs", ["decode", "piecewise", "full"])
def test_what_graphs_hold_is_reported(checkpoint, graphs):
    with engine(checkpoint, graphs="none") as e:
        assert e.report()["graph_bytes"] == 0
    with engine(checkpoint, graphs=graphs) as e:
        assert 0 < e.report()["graph_bytes"] < 1 << 28


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_composition_gives_the_same_tokens_in_float32(checkpoint, temperature):
    """float32, so that rounding does not decide between near-equal logits."""
    params = [
        SamplingParams(max_tokens=16, ignore_eos=True, temperature=temperature, seed=i)
        for i in range(len(prompts()))
    ]
    found = {}
    for kv in ("contiguous", "paged"):
        for graphs in ("none", "decode", "piecewise", "full"):
            for fusion in ("none", "triton"):
                for overlap in (False, True):
                    with engine(
                        checkpoint,
                        kv=kv,
                        graphs=graphs,
                        fusion=fusion,
                        overlap=overlap,
                        dtype="float32",
                    ) as e:
                        outputs = e.generate(prompts(), params)
                    found[kv, graphs, fusion, overlap] = [o.token_ids for o in outputs]
    reference = found["paged", "none", "none", False]
    assert [key for key, ids in found.items() if ids != reference] == []


def test_the_gpu_agrees_with_the_cpu_in_float32(checkpoint):
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with engine(checkpoint, dtype="float32") as e:
        on_gpu = [o.token_ids for o in e.generate(prompts(), params)]
    with engine(checkpoint, device="cpu", dtype="float32") as e:
        on_cpu = [o.token_ids for o in e.generate(prompts(), params)]
    assert on_gpu == on_cpu


@pytest.mark.parametrize("fusion", ["none", "triton"])
def test_int8_scores_as_on_a_cpu_in_float32(checkpoint, fusion):
    """A fresh chunk, and one that reads it from codes; a tie between codes may fall either way."""
    ids = np.random.default_rng(8).integers(3, 290, 480).tolist()
    found = []
    for options in ({"fusion": fusion}, {"device": "cpu"}):
        with engine(checkpoint, kv="paged_int8", dtype="float32", **options) as e:
            parts = e.score(ids, lambda first, logits, _: logits.log_softmax(-1).cpu())
        found.append(torch.cat(parts))
    on_gpu, on_cpu = found
    kl = (on_cpu.exp() * (on_cpu - on_gpu)).sum(-1)
    assert kl.mean() < parity.MEAN_KL_OF_TIES and kl.max() < parity.MAX_KL_OF_TIES


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("overlap", [False, True])
def test_scarcity_preempts_and_changes_no_token(checkpoint, preemption, overlap):
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with engine(checkpoint, dtype="float32") as e:
        wanted = [o.token_ids for o in e.generate(prompts(), params)]
    scarce = {"settings": {"kv.num_blocks": 17}, "preemption": preemption, "overlap": overlap}
    with engine(checkpoint, dtype="float32", **scarce) as e:
        assert [o.token_ids for o in e.generate(prompts(), params)] == wanted
        assert e.counters.num_preemptions > 0
        assert (e.counters.num_swapped_bytes > 0) == (preemption == "swap")
        assert e.counters.num_eager_steps == 0


@pytest.mark.parametrize("graphs", ["piecewise", "full"])
def test_prefix_hits_change_no_token(checkpoint, graphs):
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with engine(checkpoint, dtype="float32", graphs=graphs) as e:
        first = e.generate(prompts(), params)
        again = e.generate(prompts(), params)
    assert [o.token_ids for o in first] == [o.token_ids for o in again]
    assert again[-1].metrics.num_cached_tokens == 192


def test_memory_comes_back_on_close(checkpoint):
    def held():
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    with engine(checkpoint) as e:  # libraries keep workspaces of their own, once
        e.generate(prompts(), SamplingParams(max_tokens=4))
    del e
    before = held()
    with engine(checkpoint) as e:
        e.generate(prompts(), SamplingParams(max_tokens=4))
        assert torch.cuda.memory_allocated() > before + (1 << 27)
    del e
    assert held() - before < 1 << 20


def test_the_collector_looks_at_what_is_new_alone(checkpoint):
    with engine(checkpoint):
        assert gc.get_freeze_count() > 100_000
    assert gc.get_freeze_count() == 0


def test_the_budget_is_what_is_left(checkpoint, monkeypatch):
    """kv_cache_bytes=None: what weights, activations and graphs leave of the share that may be
    used."""
    total = torch.cuda.mem_get_info()[1]
    free = total - (2 << 30)  # whatever the tests beside this one take and give back meanwhile
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, total))
    with engine(checkpoint, kv_cache_bytes=None, gpu_memory_utilization=0.15) as e:
        assert torch.cuda.memory_reserved() <= 0.15 * total
        left = 0.15 * total - (total - free)
        assert left - (8 << 30) < e.config.kv_cache_bytes < left
