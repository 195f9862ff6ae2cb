"""Codes by channel, in INT4 and INT8: the suite, what is stored and when, bytes, texts."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core import Engine, SamplingParams
from core.batch import Limits
from core.config import RunConfig
from core.errors import UserError
from core.plan import resolve
from core.registry import Registry
from core.testing import codes
from core.testing.dense import queries, run_dense_step
from core.testing.kv import MAX_LEN, KVManagerSuite
from core.testing.oracle import PageOracle
from core.testing.probes import decode, run_step
from core.testing.rig import Rig, tiny_facts
from core.testing.tiny import save_tiny
from evals.quality.verdicts import limits_of
from plugins.kv.affine import decode as values_of, encode, pack, unpack
from plugins.kv.paged import Paged
from plugins.kv.paged_int4 import PagedInt4
from plugins.kv.paged_int8 import PagedInt8

# --------------------------------------------------------------------------------------- the suite


class Used:
    """Over memory that somebody has used: a stale read of a code shows, of the rest it is NaN."""

    def bind(self, facts, limits, kv_cache_bytes, device):
        super().bind(facts, limits, kv_cache_bytes, device)
        s = self.storage
        s.k.fill_(255), s.v.fill_(255)
        for stale in (s.k_centre, s.k_step, s.v_centre, s.v_step, s.tail):
            stale.fill_(float("nan"))


class UsedInt8(Used, PagedInt8):
    pass


class UsedInt4(Used, PagedInt4):
    pass


class ByChannel(KVManagerSuite):
    def test_chunks_do_not_show(self):
        """Everybody reads the same codes: exact but for the order of sums."""
        strict = type("Strict", (type(self),), {"tolerance": 1e-5})
        KVManagerSuite.test_chunks_do_not_show(strict())


class TestPagedInt8ByChannel(ByChannel):
    """As by token: values in [-1, 1) are off by 1/255 at most, and so are keys; 0.0073 was seen."""

    offer = UsedInt8
    config = {"k_scales": "channel"}
    tolerance = 0.012
    bytes_per_token = 2 * 2 * ((32 + 4 * 32 / 16) + (32 + 4))


class TestPagedInt4(ByChannel):
    """Off by 1/15 at most: a score then by 0.09 in root mean square, and its weight too."""

    offer = UsedInt4
    tolerance = PagedInt4.held_to["tolerance"]
    bytes_per_token = PagedInt4.held_to["bytes_per_token"]


class TestPagedInt4Odd(ByChannel):
    offer = UsedInt4
    config = {"block_size": 5, "v_group": 8}
    tolerance = PagedInt4.held_to["tolerance"]
    bytes_per_token = 2 * 2 * ((16 + 4 * 32 / 5) + (16 + 4 * 32 / 8))


CASES = {"int8": (UsedInt8, {"k_scales": "channel"}), "int4": (UsedInt4, {})}


@pytest.mark.parametrize("case", CASES)
def test_in_bfloat16(case):
    offer, config = CASES[case]
    tolerance = {"int8": 0.02, "int4": PagedInt4.held_to["tolerance"]}[case]
    members = {"offer": offer, "config": config, "dtype": torch.bfloat16}
    suite = type("Suite", (KVManagerSuite,), {**members, "tolerance": tolerance})()
    suite.test_write_then_read_is_dense_attention()
    suite.test_what_is_saved_comes_back()
    strict = type("Strict", (KVManagerSuite,), {**members, "tolerance": 2**-8})()
    strict.test_chunks_do_not_show()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_tokens", [24, 96])
def test_short_blocks_under_the_page_oracle(case, num_tokens):
    """Many blocks a request, in a pool that is scarce and in one that is not."""
    offer, config = CASES[case]
    limits, counts = Limits(24, 3, 12), []
    for seed in range(8):
        kv = offer(offer.Config(**{**config, "block_size": 4}))
        rig = Rig(kv, num_tokens=num_tokens, limits=limits)
        counts.append(PageOracle(rig, seed=seed, num_requests=3, max_total=18).run())
    assert all(count.num_finished == 3 for count in counts)
    assert sum(count.num_preemptions for count in counts) > 3
    assert sum(count.num_cached_tokens for count in counts) > 0


# ----------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize(("size", "shift"), [(1, 0), (1e-3, 0), (1e-6, 0), (2, 300), (5e4, 0)])
def test_codes_are_half_a_step_off_at_most(bits, dim, size, shift):
    """Beside a large constant too, which is what keys of Qwen2 are made of."""
    generator = torch.Generator().manual_seed(4)
    x = (torch.rand(7, 3, 32, 64, generator=generator) * 2 - 1) * size + shift
    got, centre, step = encode(x, dim, bits)
    assert (got.dtype, centre.dtype, step.dtype) == (torch.uint8, torch.float16, torch.float16)
    assert size < 1e-3 or (got.amin(), got.amax()) == (0, 2**bits - 1)
    off = (values_of(got, centre, step, bits) - x).abs()
    assert (off <= step.float() * 0.501 + x.abs() * 2**-23).all()
    radius = (x.amax(dim, keepdim=True) - x.amin(dim, keepdim=True)) / 2
    spare = centre.abs().float() * 2**-11  # of a centre that float16 has rounded
    assert (step.float() <= (radius + spare) * 2 / (2**bits - 1) * 1.001 + 2**-23).all()


def test_codes_round_to_nearest():
    """Truncation would shift every value by half a step (vllm#45361)."""
    x = torch.tensor([-7.5, -6.9, -6.1, 0.4, 0.6, 7.5])
    got, centre, step = encode(x, -1, 4)
    assert (centre.item(), step.item()) == (0, 1)
    assert got.tolist() == [0, 1, 1, 8, 8, 15]


def test_what_float16_cannot_hold():
    """Constants come back, too large numbers saturate, nothing becomes NaN."""
    x = torch.tensor([[0.0, 0.0], [391.3, 391.3], [1e30, -1e30], [1e-30, 2e-30]])
    for bits in (4, 8):
        got = values_of(*encode(x, -1, bits), bits)
        assert torch.equal(got[0], x[0]) and (got[1] - 391.3).abs().max() < 1e-3
        assert got.isfinite().all() and (got[2].abs() - 65504).abs().max() < 64
        assert got[3].abs().max() < 1e-6


def test_two_codes_are_one_byte():
    x = torch.randint(0, 16, (5, 3, 8), dtype=torch.uint8)
    packed = pack(x, 4)
    assert packed.shape == (5, 3, 4) and torch.equal(unpack(packed, 4), x)
    assert pack(x, 8) is x and unpack(x, 8) is x


# ----------------------------------------------------------------------------- what is stored, when


def make(case, num_tokens=3 * MAX_LEN, **options):
    offer, config = CASES[case]
    kv = offer(offer.Config(**{"block_size": 8, **config, **options}))
    return Rig(kv, num_tokens=num_tokens, limits=Limits(MAX_LEN, 4, MAX_LEN))


def content(rig, seq, layer, kind, num_tokens):
    return torch.from_numpy(codes.floats(rig.hashes(seq)[:num_tokens], layer, kind, rig.facts))


def chunks(rig, seq, lengths):
    return [run_dense_step(rig, [], [(seq, n)]) for n in lengths]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lengths", [(31,), (3, 4, 1, 9, 14), (1,) * 31])
def test_codes_are_of_the_whole_block_and_made_once(case, lengths):
    """However it came: raw codes of a full block are those of its 8 keys; what is open has none."""
    rig = make(case)
    seq = rig.sequence([3] * 31)
    rig.admit(seq)
    chunks(rig, seq, lengths)
    s, bits = rig.kv.storage, rig.kv.storage.bits
    blocks = rig.kv.tables.host[seq.slot, :4]
    for layer in range(2):
        keys = content(rig, seq, layer, codes.KEY, 31)
        for i, block in enumerate(blocks[:3]):
            made, centre, step = encode(keys[8 * i : 8 * i + 8].transpose(0, 1), -2, bits)
            assert torch.equal(s.k[layer, block], pack(made, bits))
            assert torch.equal(s.k_centre[layer, block], centre)
            assert torch.equal(s.k_step[layer, block], step)
        assert (s.k[layer, blocks[3]] == 255).all() and s.k_step[layer, blocks[3]].isnan().all()
        assert torch.equal(s.tail[layer, seq.slot, :, :7], keys[24:].transpose(0, 1))


@pytest.mark.parametrize("case", CASES)
def test_gather_is_exact_in_the_open_block_and_half_a_step_off_before(case):
    rig = make(case, v_group=16) if case == "int4" else make(case)
    seq = rig.sequence([6] * 29)
    rig.admit(seq)
    chunks(rig, seq, (29,))
    levels = 2**rig.kv.storage.bits - 1
    for layer in range(2):
        k, v, _ = rig.kv.gather(seq.slot, layer, 0, 29)
        keys, values = (content(rig, seq, layer, kind, 29) for kind in (codes.KEY, codes.VALUE))
        assert torch.equal(k[24:], keys[24:])
        blocks = keys[:24].unflatten(0, (3, 8))
        step = (blocks.amax(1) - blocks.amin(1)) / levels
        off = (k[:24] - keys[:24]).abs().unflatten(0, (3, 8)).amax(1)
        assert (off <= step * 0.51 + 1e-3 / levels).all() and (off > step * 0.1).any()
        groups = values.unflatten(-1, (rig.kv.storage.v_step.shape[-1], -1))
        step = (groups.amax(-1) - groups.amin(-1)) / levels
        off = (v - values).abs().view(groups.shape).amax(-1)
        assert (off <= step * 0.51 + 1e-3 / levels).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lengths", [(29,), (5, 24), (1,) * 29])
def test_a_query_reads_what_is_stored_after_it(case, lengths):
    """Written out query by query: codes of full blocks, its own block as it came."""
    rig = make(case)
    seq = rig.sequence([9] * 29)
    rig.admit(seq)
    outs = chunks(rig, seq, lengths)
    facts, bits = rig.facts, rig.kv.storage.bits
    for layer in range(2):
        keys = content(rig, seq, layer, codes.KEY, 29)
        rounded = torch.cat([
            values_of(*encode(block, 0, bits), bits) for block in keys[:24].split(8)
        ])  # fmt: skip
        values = rig.kv.gather(seq.slot, layer, 0, 29)[1].repeat_interleave(2, 1)
        asked = torch.from_numpy(queries(rig, seq, 0, 29, layer))
        got = np.concatenate([out[layer] for out in outs])
        for p in range(29):
            num_full = (p + 1) // 8 * 8
            seen = torch.cat((rounded[:num_full], keys[num_full : p + 1])).repeat_interleave(2, 1)
            scores = torch.einsum("hd,phd->hp", asked[p], seen) * facts.softmax_scale
            wanted = torch.einsum("hp,phd->hd", scores.softmax(-1), values[: p + 1])
            assert np.abs(got[p] - wanted.numpy()).max() < 2e-5, f"position {p}"


@pytest.mark.parametrize("case", CASES)
def test_tails_and_scales_travel(case):
    """To the host and into other room and another slot, to the bit; all of it is counted."""
    rig = make(case)
    seq, squatter = rig.sequence([4] * 29, share_prefix=False), rig.sequence([5] * 29)
    rig.admit(seq)
    chunks(rig, seq, (29,))
    before = [rig.kv.gather(seq.slot, layer, 0, 29)[:2] for layer in range(2)]
    slot, saved = seq.slot, rig.kv.save(seq, 29)
    per_block, tail = rig.kv.block_bytes(rig.facts), 2 * 2 * 5 * 32 * 4
    assert saved.num_bytes == 4 * per_block + tail
    rig.release(seq)
    rig.admit(squatter)
    chunks(rig, squatter, (29,))
    rig.admit(seq)
    assert seq.slot != slot
    rig.kv.restore(seq, saved, 0)
    seq.num_computed = 29
    rig.append(seq, 1)
    run_dense_step(rig, [seq])
    for layer, pair in enumerate(before):
        after = rig.kv.gather(seq.slot, layer, 0, 29)[:2]
        assert all(torch.equal(x, y) for x, y in zip(pair, after, strict=True))


def test_who_finds_more_than_he_saved_goes_on_from_there():
    """Another has published more of the same text by then: nothing is restored over it."""
    rig = make("int4")
    text = [7] * 40
    seq, other = rig.sequence(text, share_prefix=True), rig.sequence(text)
    rig.admit(seq)
    run_step(rig, [], [(seq, 13)])
    saved = rig.kv.save(seq, 13)
    rig.release(seq)
    rig.admit(other)
    run_step(rig, [], [(other, 40)])
    rig.publish_due(other)
    cached = rig.admit(seq)
    assert cached == 32
    rig.kv.restore(seq, saved, cached)
    run_step(rig, [], [(seq, 8)])
    decode(rig, [seq, other], 9)


# ------------------------------------------------------------------------------------------- bytes

CONTEXT = 4096
FORMATS = {
    "paged_int8": (PagedInt8, {}, 0.53),
    "channel": (PagedInt8, {"k_scales": "channel"}, 0.58),
    "paged_int4": (PagedInt4, {}, 0.32),
}
WIDE = dataclasses.replace(tiny_facts(torch.bfloat16), num_layers=1, num_kv_heads=1, head_dim=128)
LIMITS = Limits(CONTEXT, 32, 64)


def bound(offer, options, num_bytes):
    kv = offer(offer.Config(**options))
    limits = dataclasses.replace(LIMITS, max_num_seqs=kv.capacity(num_bytes, WIDE, LIMITS).num_seqs)
    kv.bind(WIDE, limits, num_bytes, torch.device("cpu"))
    return kv


def tensors_of(storage):
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
            for x in vars(storage).values() if isinstance(x, torch.Tensor)}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_of_a_token_of_a_full_cache(name):
    """Everything allocated, tables and tails too, over what 32 sequences of 4,096 tokens hold."""
    offer, options, limit = FORMATS[name]
    kv = bound(offer, {**options, "num_blocks": 32 * CONTEXT // offer.Config().block_size}, 0)
    num_bytes = sum(tensors_of(kv.storage).values())
    ratio = num_bytes / (32 * CONTEXT) / WIDE.kv_bytes_per_token
    print(f"{name}: {ratio:.4f} x bfloat16")
    assert ratio <= limit


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_allocated_is_what_the_budget_buys(name):
    """Scratch that a GPU has is paid for and not taken here; not a block is left over."""
    offer, options, _ = FORMATS[name]
    kv = bound(offer, options, 1_000_000)
    scratch = LIMITS.max_num_batched_tokens * WIDE.kv_bytes_per_token
    used = sum(tensors_of(kv.storage).values()) + scratch
    assert 1_000_000 - kv.block_bytes(WIDE) - kv.tail_bytes(WIDE) < used <= 1_000_000


def num_admitted(offer, options, num_bytes):
    """Sequences of 4,096 tokens that hold room at once."""
    rig_limits = Limits(CONTEXT, 1, 64)
    kv, count = bound(offer, options, num_bytes), 0
    maker = Rig(Paged(Paged.Config(num_blocks=1)), num_tokens=16, limits=rig_limits, facts=WIDE)
    while kv.acquire(maker.sequence([count] * CONTEXT), CONTEXT) is not None:
        count += 1
    return count


def test_more_sequences_fit():
    num_bytes = 8 * (CONTEXT + 64) * WIDE.kv_bytes_per_token
    fit = functools.partial(num_admitted, num_bytes=num_bytes)
    found = {name: fit(offer, options) for name, (offer, options, _) in FORMATS.items()}
    assert fit(Paged, {}) == 8
    assert found == {"paged_int8": 15, "channel": 14, "paged_int4": 25}


# ----------------------------------------------------------------------------------------- options


def test_there_are_no_kernels_yet(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    resolved = functools.partial(RunConfig, model="tiny", device="cuda")
    with pytest.raises(UserError, match="'paged_int4' has no kernels .* cuda: choose --kv paged_"):
        resolve(resolved(kv="paged_int4"), Registry())
    channel = resolved(kv="paged_int8", settings={"kv.k_scales": "channel"})
    with pytest.raises(UserError, match="channel has no kernels .* choose --set kv.k_scales=token"):
        resolve(channel, Registry())
    token = resolved(kv="paged_int8", settings={"kv.k_scales": "token"})
    assert resolve(token, Registry()).kv.config.k_scales == "token"


@pytest.mark.parametrize(
    ("head_dim", "v_group", "num_groups"),
    [(128, 32, 4), (64, 64, 1), (16, 32, 1), (80, 32, 4), (96, 20, 6), (32, 1, 32)],
)
def test_groups_are_alike_and_no_larger_than_asked_for(head_dim, v_group, num_groups):
    facts = dataclasses.replace(WIDE, head_dim=head_dim)
    kv = PagedInt4(PagedInt4.Config(v_group=v_group, num_blocks=2))
    kv.bind(facts, LIMITS, 0, torch.device("cpu"))
    assert kv.storage.v_step.shape == kv.storage.v_centre.shape == (1, 3, 1, 32, num_groups)


def test_calibration_is_of_smoothed_keys():
    settings = {"kv.k_scales": "channel", "kv.k_smoothing": "calibrated", "kv.key_range": "x"}
    with pytest.raises(UserError, match="smooths nothing, .* or choose k_scales=token"):
        Engine(model="random:tiny", kv="paged_int8", device="cpu", settings=settings)


def test_int4_is_held_to_its_own_limits():
    limits = limits_of(PagedInt4, "float32")
    assert (limits.values["mean_kl"], limits.values["top1"]) == (2e-2, 0.9)
    assert (limits.written["rep4"], limits.written["tasks"]) == (0.05, 0.04)
    assert limits.values["drift"] == limits_of(PagedInt8, "float32").values["drift"]


# ------------------------------------------------------------------------------------------- texts

LENGTH = 400


def engine(model, kv="paged", settings=(), **options):
    defaults = {"model": str(model), "kv": kv, "device": "cpu", "max_model_len": LENGTH}
    return Engine(**{**defaults, "max_num_seqs": 4, "settings": dict(settings), **options})


@pytest.fixture(scope="module")
def outlier(tmp_path_factory):
    """A tiny Qwen2 with a constant of 117 in the pair of key channels that RoPE turns least."""
    path = save_tiny("qwen2", tmp_path_factory.mktemp("outlier") / "qwen2")
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if "q_proj" in name:
            tensor /= 4  # the scores of tiny models are far larger than trained ones
        if name.endswith("k_proj.bias"):
            heads = tensor.view(2, -1)
            heads[:, heads.shape[1] // 2 - 1] += 100
            heads[:, -1] -= 60
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def text():
    return np.random.default_rng(1).integers(3, 290, LENGTH).tolist()


def log_probs(engine):
    return torch.cat(engine.score(text(), lambda i, logits, _: logits.log_softmax(-1)))


def mean_kl(p, q):
    return (p.exp() * (p - q)).sum(-1).mean().item()


MODES = {
    "int8": ("paged_int8", {"kv.k_scales": "channel"}),
    "int4": ("paged_int4", {}),
    "unsmoothed": ("paged_int8", {"kv.k_smoothing": "none"}),
}


def test_an_outlier_among_channels_costs_nothing(outlier):
    """INT8 by token is spoilt by it, INT4 by channel is not."""
    with engine(outlier) as exact:
        wanted = log_probs(exact)
    found = {}
    for name, (kv, settings) in MODES.items():
        with engine(outlier, kv, settings) as other:
            found[name] = mean_kl(wanted, log_probs(other))
    assert found["int4"] <= found["unsmoothed"] and found["int8"] < 0.02 * found["unsmoothed"]


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_chunks_and_decoding_read_what_a_whole_prompt_reads(outlier, mode):
    """But for codes on the edge, that the order of sums tips."""
    kv, settings = MODES[mode]
    with engine(outlier, kv, settings) as whole, engine(outlier, kv, settings, chunk_size=7) as cut:
        assert mean_kl(log_probs(whole), log_probs(cut)) <= {"int8": 1e-6, "int4": 5e-5}[mode]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_hits_and_scarcity_change_no_token(outlier, mode, preemption):
    """Codes, scales and tails are shared, moved to the host, given away, made again."""
    kv, settings = MODES[mode]
    settings = {**settings, "kv.block_size": 16}
    rng = np.random.default_rng(5)
    stem = rng.integers(3, 290, 70).tolist()
    prompts = [stem[:n] + rng.integers(3, 290, m).tolist() for n, m in ((70, 1), (70, 9), (48, 30))]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with engine(outlier, kv, settings, enable_prefix_caching=False) as plenty:
        wanted = [o.token_ids for o in plenty.generate(prompts, params)]
    scarcely = {**settings, "kv.num_blocks": 7}  # 112 tokens; the longest needs 91
    options = {"preemption": preemption, "max_model_len": 96, "overlap": True}
    with engine(outlier, kv, scarcely, **options) as scarce:
        for _ in range(2):
            outputs = scarce.generate(prompts, params)
            assert [o.token_ids for o in outputs] == wanted
        assert outputs[0].metrics.num_cached_tokens or outputs[1].metrics.num_cached_tokens
        assert scarce.counters.num_preemptions
        scarce._kv.check_integrity()
