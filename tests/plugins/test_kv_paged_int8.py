"""`paged_int8`: the suite, its codes and bytes, and how near its logits are to those of `paged`.

The measurement on real weights is `pytest -m real --models DIR --texts DIR -s` of this file: the
first .txt document of each sub-folder of texts, but one, which calibrates.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from core import Engine, SamplingParams
from core.batch import Limits
from core.errors import UserError
from core.testing import codes
from core.testing.dense import run_dense_step
from core.testing.kv import MAX_LEN, KVManagerSuite
from core.testing.kv_gpu import KVManagerGpuSuite
from core.testing.probes import compute
from core.testing.rig import Rig, tiny_facts
from core.testing.tiny import save_tiny
from core.weights import LayerWeights
from plugins.kv.int8_storage import dequantize, quantize
from plugins.kv.paged_int8 import PagedInt8
from plugins.kv.smoothing import record_keys

TINY_TOKEN_BYTES = 2 * 2 * 2 * (32 + 4)  # K and V, layers, heads: codes and a float32 scale


class Used(PagedInt8):
    """Smoothed unevenly, over memory that somebody has used: one stale read shows in any sum."""

    def bind(self, facts, limits, kv_cache_bytes, device):
        super().bind(facts, limits, kv_cache_bytes, device)
        s, generator = self.storage, torch.Generator().manual_seed(1)
        for stale, value in ((s.k, 100), (s.v, -100), (s.k_scale, 10), (s.v_scale, 10)):
            stale.fill_(value)
        pairs = torch.rand(*s.k_factor.shape[:2], facts.head_dim // 2, generator=generator)
        s.k_factor.copy_(torch.cat((pairs, pairs), -1) * 0.7 + 0.3)
        s.k_shift.copy_(torch.rand(s.k_shift.shape, generator=generator) - 0.5)


class Int8Suite(KVManagerSuite):
    """What INT8 costs: values in [-1, 1) are off by 1/254 at most, and so are keys.

    With 32 dimensions and queries in [-4, 4) a score is off by 0.005 in root mean square, and so is
    its weight. The worst seen is 0.0082; with factors down to 0.3 and shifts of 0.5, 0.0147.
    """

    tolerance = 0.012
    chunk_tolerance = 1e-5
    bytes_per_token = TINY_TOKEN_BYTES

    def test_chunks_do_not_show(self):
        """Everybody reads the same codes: exact but for the order of sums."""
        strict = type("Strict", (type(self),), {"tolerance": self.chunk_tolerance})
        KVManagerSuite.test_chunks_do_not_show(strict())


class TestPagedInt8(Int8Suite):
    plugin = "paged_int8"


class TestPagedInt8Used(Int8Suite):
    offer = Used
    tolerance = 0.02


class TestPagedInt8UsedOdd(Int8Suite):
    offer = Used
    tolerance = 0.02
    config = {"block_size": 5}


class TestPagedInt8UsedInBfloat16(Int8Suite):
    """Dequantised keys and smoothed queries are rounded too, and so is the output, by 2**-8."""

    offer = Used
    dtype = torch.bfloat16
    tolerance = 0.025
    chunk_tolerance = 2**-8


class TestPagedInt8OnGpu(KVManagerGpuSuite):
    offer = Used
    tolerance = 0.025
    bytes_per_token = TINY_TOKEN_BYTES


# --------------------------------------------------------------------------------- codes and bytes


def test_codes_round_to_nearest_even():
    """Truncation halves what is left of the precision and shifts every value (vllm#45361)."""
    x = torch.tensor([[127.0, 2.5, 3.5, -2.5, -0.5, 1.4, 1.6, -127.0], [0.0] * 8])
    got, scale = quantize(x)
    assert got.tolist() == [[127, 2, 4, -2, 0, 1, 2, -127], [0] * 8]
    assert scale.tolist() == [1.0, 0.0]
    assert torch.equal(dequantize(got, scale)[1], torch.zeros(8))


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1.0, 1e6, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_half_a_step_off_at_most(size, dtype):
    x = (torch.randn(300, 2, 64, generator=torch.Generator().manual_seed(4)) * size).to(dtype)
    got, scale = quantize(x)
    assert got.dtype == torch.int8 and scale.dtype == torch.float32
    assert (got.abs().amax(-1) == 127).all() and got.min() == -127
    off = (dequantize(got, scale) - x.float()).abs()
    assert (off <= scale[..., None] * 0.50001).all()


def make(offer=PagedInt8, num_tokens=3 * MAX_LEN, **options):
    kv = offer(offer.Config(**options))
    return Rig(kv, num_tokens=num_tokens, limits=Limits(MAX_LEN, 4, 64))


@pytest.mark.parametrize("block_size", [5, 16])
def test_a_step_stores_codes_and_scales_of_its_own_tokens_alone(block_size):
    """Raw codes, of smoothed keys; everything else, the trash block apart, keeps its bytes."""
    rig = make(Used, block_size=block_size)
    decoding, prompt = rig.sequence([3] * 18), rig.sequence([4] * 23)
    for seq in (decoding, prompt):
        rig.admit(seq)
    compute(rig, decoding)
    rig.append(decoding, 5)
    step = rig.begin([decoding], [(prompt, 23)], num_padding_tokens=6, num_padding_rows=1)
    s, kv = rig.kv.storage, rig.kv
    parts = {codes.KEY: (s.k, s.k_scale), codes.VALUE: (s.v, s.v_scale)}
    for layer in range(2):
        before = {kind: [x.clone() for x in part] for kind, part in parts.items()}
        rig.write(step, codes.floats, layer)
        for kind, (stored, scales) in parts.items():
            wanted, wanted_scales = before[kind]
            for row in step.rows:
                hashes = rig.hashes(row.seq)[row.lo : row.hi]
                x = torch.from_numpy(codes.floats(hashes, layer, kind, rig.facts))
                if kind == codes.KEY:
                    x = (x - s.k_shift[layer]) / s.k_factor[layer]
                place = np.arange(row.lo, row.hi)
                block = kv.tables.host[row.seq.slot, place // block_size]
                got, scale = quantize(x)
                wanted[layer, block, :, place % block_size] = got
                wanted_scales[layer, block, :, place % block_size] = scale
            assert torch.equal(stored[:, 1:], wanted[:, 1:])
            assert torch.equal(scales[:, 1:], wanted_scales[:, 1:])
            assert not torch.equal(stored[layer, 0], before[kind][0][layer, 0])  # the padding


def test_gather_is_half_a_step_off_at_most():
    """True values: neither codes nor smoothed keys."""
    rig = make(Used)
    seq = rig.sequence([6] * 50)
    rig.admit(seq)
    run_dense_step(rig, [], [(seq, 50)])
    s = rig.kv.storage
    for layer in range(2):
        k, v, _ = rig.kv.gather(seq.slot, layer, 0, 50)
        for kind, got, factor, shift in (
            (codes.KEY, k, s.k_factor[layer], s.k_shift[layer]),
            (codes.VALUE, v, torch.tensor(1.0), torch.tensor(0.0)),
        ):
            x = torch.from_numpy(codes.floats(rig.hashes(seq), layer, kind, rig.facts))
            step = ((x - shift) / factor).abs().amax(-1, keepdim=True) / 127
            assert ((got - x).abs() <= step * factor / 2 + 1e-6).all()


def test_storage_is_int8_and_as_large_as_capacity_says():
    facts = dataclasses.replace(tiny_facts(torch.bfloat16), head_dim=64)
    limits, kv = Limits(512, 4, 64), PagedInt8(PagedInt8.Config())
    kv.bind(facts, limits, 1_000_000, torch.device("cpu"))
    s, num_blocks = kv.storage, kv.pool.num_blocks + 1
    assert {s.k.dtype, s.v.dtype} == {torch.int8}
    assert {s.k_scale.dtype, s.v_scale.dtype} == {torch.float32}
    assert s.k.shape == s.v.shape == (2, num_blocks, 2, 16, 64)
    assert s.k_scale.shape == s.v_scale.shape == (2, num_blocks, 2, 16)
    blocks = s.k.nbytes + s.v.nbytes + s.k_scale.nbytes + s.v_scale.nbytes
    assert blocks == num_blocks * kv.block_bytes(facts)
    beside = sum(x.nbytes for x in (s.slot_map, s.table, s.k_factor, s.k_shift))
    beside += 2 * limits.max_num_batched_tokens * 2 * 64 * 2  # the scratch that a GPU has
    assert beside == kv.overhead_bytes(facts, limits)
    assert 1_000_000 - kv.block_bytes(facts) < blocks + beside <= 1_000_000
    assert kv.capacity(1_000_000, facts, limits).num_tokens == (num_blocks - 1) * 16


def test_a_sink_is_shown_where_kernels_read():
    """As kernels take it: values transposed in memory, the same bytes as the storage's view."""
    kv = make().kv
    assert kv.sink(1) is None
    s = kv.storage
    s.v = s.v.transpose(-1, -2).clone(memory_format=torch.contiguous_format).transpose(-1, -2)
    s.fresh = s.k.float(), s.k.float()
    sink = kv.sink(1)
    assert sink.kind == "int8_blocks" and sink.slot_map is s.slot_map and sink.fresh is s.fresh
    num_blocks, heads, block_size, dim = s.k[1].shape
    assert sink.k.shape == (num_blocks, heads, block_size, dim) and sink.k.is_contiguous()
    assert sink.v.shape == (num_blocks, heads, dim, block_size) and sink.v.is_contiguous()
    for name in ("k", "v", "k_scale", "v_scale", "k_shift", "k_factor"):
        assert getattr(sink, name).data_ptr() == getattr(s, name)[1].data_ptr(), name


@pytest.mark.parametrize(("head_dim", "ratio"), [(64, 0.532), (128, 0.516)])
def test_a_token_costs_half_of_bfloat16(head_dim, ratio):
    facts = dataclasses.replace(tiny_facts(torch.bfloat16), head_dim=head_dim)
    per_token = PagedInt8(PagedInt8.Config()).block_bytes(facts) / 16
    assert per_token / facts.kv_bytes_per_token == pytest.approx(ratio, abs=1e-3)


def test_options_that_contradict_each_other():
    for options in ({"k_smoothing": "calibrated"}, {"key_range": "keys.safetensors"}):
        settings = {f"kv.{name}": value for name, value in options.items()}
        with pytest.raises(UserError, match="k_smoothing=calibrated and key_range=FILE"):
            Engine(kv="paged_int8", device="cpu", settings=settings)


# -------------------------------------------------------------------------------- near to `paged`


class Agreement(NamedTuple):
    """How near logits are to those of `paged`: KL(paged || other) in nats, same argmax."""

    kl: torch.Tensor  # [T] float32
    same: torch.Tensor  # [T] bool

    @property
    def p99(self):
        return self.kl.quantile(0.99).item()

    @property
    def mean(self):
        return self.kl.mean().item()

    def interval(self, z=1.96):
        """Wilson's 95 % interval of the share of equal argmax."""
        n, p = len(self.same), self.same.float().mean().item()
        centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)

    def __repr__(self):
        low, high = self.interval()
        return (
            f"mean KL {self.mean:.2e}, p99 {self.p99:.2e}, max {self.kl.max():.2e}, top-1 "
            f"{self.same.float().mean():.2%} [{low:.2%}, {high:.2%}], n={len(self.kl)}"
        )


def log_probs(engine, texts):
    """Of each text, [T, V]."""
    made = [engine.score(ids, lambda i, logits, _: logits.log_softmax(-1)) for ids in texts]
    return [torch.cat(parts) for parts in made]


def agreement(engine, texts, references):
    """Over all positions of the texts, reduced slice by slice."""
    kl, same = [], []
    for ids, reference in zip(texts, references, strict=True):

        def reduce(first, logits, _, reference=reference):
            p, q = reference[first : first + len(logits)], logits.log_softmax(-1)
            kl.append((p.exp() * (p - q)).sum(-1))
            same.append(p.argmax(-1) == q.argmax(-1))

        engine.score(ids, reduce)
    return Agreement(torch.cat(kl), torch.cat(same))


MAX_KL, MAX_P99 = 1e-3, 1e-2
MIN_TINY_AGREEMENT = 0.95  # logits of random weights are flat: a KL of 1e-4 turns 2 tokens of 100
LENGTH = 480


def engine(model, kv="paged_int8", length=LENGTH, **options):
    defaults = {"model": str(model), "kv": kv, "device": "cpu", "max_model_len": length}
    return Engine(**{**defaults, "max_num_seqs": 4, **options})


def texts():
    rng = np.random.default_rng(1)
    return [rng.integers(3, 290, LENGTH).tolist() for _ in range(3)]


def bias_outlier(name, tensor):
    """A constant of 117 in the pair that RoPE turns least, as in Qwen2.5's first layers.

    Queries are quartered, because the scores of the tiny models are far larger than trained ones.
    """
    if name.endswith("q_proj.weight") or name.endswith("q_proj.bias"):
        tensor /= 4
    if name.endswith("k_proj.bias"):
        heads = tensor.view(2, -1)
        last = heads.shape[1] // 2 - 1
        heads[:, last] += 100
        heads[:, 2 * last + 1] -= 60


def norm_outlier(name, tensor):
    """Large keys and small queries in one pair: in full precision the model is the same."""
    pair = [3, 3 + len(tensor) // 2]
    if name.endswith("k_norm.weight"):
        tensor[pair] *= 50
    if name.endswith("q_norm.weight"):
        tensor[pair] /= 50


PLANTS = {"qwen2": bias_outlier, "qwen3": norm_outlier}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """kind -> (a tiny model with an outlier in its keys, the log-probabilities of `paged`)."""
    made = {}
    for kind, plant in PLANTS.items():
        path = save_tiny(kind, tmp_path_factory.mktemp("planted") / kind)
        tensors = load_file(path / "model.safetensors")
        for name, tensor in tensors.items():
            plant(name, tensor)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        with engine(path, "paged") as reference:
            made[kind] = path, log_probs(reference, texts())
    return made


@pytest.fixture(params=sorted(PLANTS))
def outlier(request, planted):
    return planted[request.param]


def test_smoothing_tames_a_planted_outlier(outlier):
    path, references = outlier
    with engine(path) as smoothed:
        got = agreement(smoothed, texts(), references)
    assert got.mean <= MAX_KL and got.p99 <= MAX_P99, got
    assert got.interval()[0] >= MIN_TINY_AGREEMENT, got


def test_calibrated_smoothing_tames_a_planted_outlier(outlier, tmp_path):
    path, references = outlier
    rng = np.random.default_rng(9)
    stats = tmp_path / "keys.safetensors"
    record_keys(stats, [rng.integers(3, 290, 200).tolist()], model=str(path), device="cpu")
    settings = {"kv.k_smoothing": "calibrated", "kv.key_range": str(stats)}
    with engine(path, settings=settings) as calibrated, engine(path) as smoothed:
        factors = [one._kv.storage.k_factor for one in (calibrated, smoothed)]
        assert not torch.equal(*factors)
        got = agreement(calibrated, texts(), references)
    assert got.mean <= MAX_KL and got.p99 <= MAX_P99, got
    assert got.interval()[0] >= MIN_TINY_AGREEMENT, got


def test_without_smoothing_a_planted_outlier_spoils_the_rest(outlier):
    """The limits above mean something: each of them is missed, by far."""
    path, references = outlier
    with engine(path, settings={"kv.k_smoothing": "none"}) as raw:
        got = agreement(raw, texts(), references)
    assert got.mean > 10 * MAX_KL and got.p99 > 10 * MAX_P99, got
    assert got.interval()[1] < 0.9, got


def test_without_the_shift_a_bias_costs_its_share(planted):
    """Factors alone: codes of the large constant are as coarse as ever, and queries read them."""
    path, references = planted["qwen2"]
    with engine(path, settings={"kv.k_shift": False}) as factors, engine(path) as both:
        assert not factors._kv.storage.k_shift.any() and both._kv.storage.k_shift.any()
        got, best = (agreement(one, texts(), references) for one in (factors, both))
    assert got.mean > 3 * best.mean, f"{got}; with the shift {best}"


@pytest.mark.parametrize("chunk_size", [1, 7, 100])
def test_chunks_and_decoding_read_what_a_whole_prompt_reads(outlier, chunk_size):
    """But for codes on the edge, that the order of sums tips: a hundredth of what INT8 costs."""
    path, _ = outlier
    with engine(path) as whole, engine(path, chunk_size=chunk_size) as chunked:
        got = agreement(chunked, texts()[:1], log_probs(whole, texts()[:1]))
    assert got.mean <= 2e-6, got


def test_the_weights_are_not_touched(planted):
    path, _ = planted["qwen2"]
    with engine(path, "paged") as plain, engine(path) as smoothed:
        smoothed.generate([[5] * 20], SamplingParams(max_tokens=4))
        pairs = zip(
            plain._parts.model.weights.layers, smoothed._parts.model.weights.layers, strict=True
        )
        for one, other in pairs:
            for field in dataclasses.fields(LayerWeights):
                expected, got = getattr(one, field.name), getattr(other, field.name)
                assert expected is got is None or torch.equal(expected, got), field.name


def test_greedy_mostly_agrees_with_paged(outlier):
    """8 tokens after each of 24 prompts; where one differs, the rest follows another text.

    With 97 of 100 tokens alike, 0.875 of these places agree; 0.8 leaves room for chance.
    """
    path, _ = outlier
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 290, n).tolist() for n in rng.integers(1, 120, 24)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with engine(path, "paged") as paged, engine(path) as int8:
        wanted, got = (
            np.array([o.token_ids for o in one.generate(prompts, params)]) for one in (paged, int8)
        )
    assert (wanted == got).mean() >= 0.8


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_hits_and_scarcity_change_no_token(outlier, overlap, preemption):
    """Codes and scales are shared, moved to the host, given away, made again: the text stays."""
    path, _ = outlier
    rng = np.random.default_rng(5)
    stem = rng.integers(3, 290, 70).tolist()
    prompts = [stem[:n] + rng.integers(3, 290, m).tolist() for n, m in ((70, 1), (70, 9), (48, 30))]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with engine(path, enable_prefix_caching=False) as plenty:
        wanted = [o.token_ids for o in plenty.generate(prompts, params)]
    settings = {"kv.num_blocks": 7}  # 112 tokens; the longest needs 91
    options = {"overlap": overlap, "preemption": preemption}
    with engine(path, settings=settings, length=96, **options) as scarce:
        for _ in range(2):
            outputs = scarce.generate(prompts, params)
            assert [o.token_ids for o in outputs] == wanted
        assert outputs[0].metrics.num_cached_tokens or outputs[1].metrics.num_cached_tokens
        assert scarce.counters.num_preemptions
        scarce._kv.check_integrity()


def test_calibrating_late_is_refused(planted):
    path, _ = planted["qwen3"]
    with engine(path) as used:
        kv = used._kv
        key_range = torch.stack((-torch.ones(2, 2, 32), torch.ones(2, 2, 32)))
        pointer = kv.storage.k_factor.data_ptr()
        kv.calibrate(key_range)
        assert kv.storage.k_factor.data_ptr() == pointer and (kv.storage.k_factor == 1).all()
        used.generate([[5] * 40], SamplingParams(max_tokens=2))
        with pytest.raises(UserError, match="holds 32 tokens .* before the first request"):
            kv.calibrate(key_range)


# ------------------------------------------------------------------------------------ real weights

NUM_POSITIONS, NUM_CALIBRATION = 2048, 512
BUCKETS = (0, 64, 256, 1024, NUM_POSITIONS)
MIN_AGREEMENT = 0.98
LARGE_BIAS = 100.0  # of a key channel: where rounding raw keys is known to fail


def qwen_models(config):
    """Folders of Qwen2 and Qwen3 checkpoints under --models."""
    root = config.getoption("--models")
    found = sorted(path.parent for path in Path(root).glob("*/config.json")) if root else []
    kinds = {path: json.loads((path / "config.json").read_text())["model_type"] for path in found}
    return [path for path in found if kinds[path].startswith("qwen")]


def pytest_generate_tests(metafunc):
    if "directory" in metafunc.fixturenames:
        found = qwen_models(metafunc.config) or [None]
        ids = [path.name if path else "none" for path in found]
        metafunc.parametrize("directory", found, ids=ids, scope="module")


def largest_key_bias(directory):
    largest = 0.0
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                if name.endswith("k_proj.bias"):
                    largest = max(largest, file.get_tensor(name).abs().max().item())
    return largest


@pytest.fixture(scope="module")
def documents(texts_dir):
    """The beginnings of real documents: those to measure, and the one that calibrates."""
    found = {path.parent: path for path in sorted(texts_dir.glob("*/*.txt"), reverse=True)}
    assert len(found) >= 2, f"{texts_dir} needs two sub-folders with .txt documents at least"
    firsts = [path.read_text(encoding="utf-8")[: 12 * NUM_POSITIONS] for path in found.values()]
    spare = sorted(next(iter(found)).glob("*.txt"))[-1]
    assert spare not in found.values(), f"{spare} is measured: it cannot calibrate too"
    return firsts, spare.read_text(encoding="utf-8")[: 12 * NUM_CALIBRATION]


@pytest.fixture(scope="module")
def real(directory, documents, tmp_path_factory):
    """(folder, token ids, log-probabilities of `paged`, recorded keys) of one model."""
    if directory is None:
        pytest.skip("real: there is no Qwen model under --models")
    stats = tmp_path_factory.mktemp("recorded") / "keys.safetensors"
    with real_engine(directory, "paged") as reference:
        encode = reference.tokenizer.encode
        ids = [encode(text)[:NUM_POSITIONS] for text in documents[0]]
        calibration = encode(documents[1])[:NUM_CALIBRATION]
        made = log_probs(reference, ids)
    record_keys(stats, [calibration], model=str(directory), device="cpu", max_model_len=1024)
    return directory, ids, made, stats


def real_engine(directory, kv="paged_int8", **settings):
    return engine(directory, kv, length=NUM_POSITIONS, max_num_seqs=1, settings=settings)


def measure(real, title, **settings):
    """The agreement of one variant, printed whole and by position."""
    directory, ids, references, _ = real
    with real_engine(directory, **settings) as int8:
        got = agreement(int8, ids, references)
    position = torch.cat([torch.arange(len(one)) for one in ids])
    print(f"\n{directory.name}, {title}: {got}")
    buckets = []
    for lo, hi in zip(BUCKETS, BUCKETS[1:], strict=False):
        inside = (position >= lo) & (position < hi)
        buckets.append(Agreement(got.kl[inside], got.same[inside]))
        print(f"  {lo:5}..{hi - 1:<5} {buckets[-1]}")
    return got, buckets


@pytest.mark.real
@pytest.mark.parametrize("mode", ["weights", "calibrated"])
def test_real_weights_with_smoothing(real, mode):
    settings = {"kv.k_smoothing": mode}
    if mode == "calibrated":
        settings["kv.key_range"] = str(real[3])
    got, buckets = measure(real, mode, **settings)
    assert got.mean <= MAX_KL and got.p99 <= MAX_P99
    assert got.interval()[0] >= MIN_AGREEMENT
    assert buckets[-1].mean <= 2 * buckets[-2].mean


@pytest.mark.real
def test_real_weights_without_the_shift(real):
    """Factors alone cost more than a quarter of the limit, which both together stay under."""
    if largest_key_bias(real[0]) < LARGE_BIAS:
        pytest.skip(f"real: {real[0].name} has no key bias of {LARGE_BIAS}")
    got, _ = measure(real, "weights, no shift", **{"kv.k_shift": False})
    assert got.mean > MAX_KL / 4


@pytest.mark.real
def test_real_weights_fail_without_smoothing(real):
    if largest_key_bias(real[0]) < LARGE_BIAS:
        pytest.skip(f"real: {real[0].name} has no key bias of {LARGE_BIAS}")
    got, _ = measure(real, "none", **{"kv.k_smoothing": "none"})
    assert got.mean > MAX_KL and got.p99 > MAX_P99
    assert got.interval()[1] < MIN_AGREEMENT
