"""Shift and factor of the keys: from weights, from data, and what they must not change."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from core import Engine
from core.batch import Limits
from core.errors import UserError
from core.model import rotate
from core.rope import rope_tables
from core.testing.probes import compute
from core.testing.rig import Rig, tiny_facts
from core.testing.tiny import save_tiny
from core.weights import allocate
from plugins.kv.smoothing import (
    KeyMoments,
    KeyRecorder,
    from_range,
    from_weights,
    key_moments,
    mean_turn,
    no_turn,
    read_range,
    record_keys,
)

FACTS = tiny_facts()
HEADS, DIM = FACTS.num_kv_heads, FACTS.head_dim
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def layer(facts, seed=0):
    """One layer of normal weights, bias and norms where `facts` has them."""
    made = allocate(facts, "cpu").layers[0]
    generator = torch.Generator().manual_seed(seed)
    for field in dataclasses.fields(made):
        tensor = getattr(made, field.name)
        if tensor is not None:
            mean = 1.0 if field.name.endswith("norm") else 0.0
            tensor.normal_(mean, 0.2, generator=generator)
    return made


def true_keys(facts, weights, num_tokens=20000):
    """Keys before RoPE of independent normal inputs, [n, K, D]."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_tokens, facts.hidden_size, generator=generator) * weights.attn_norm
    qkv = torch.nn.functional.linear(x, weights.qkv, weights.qkv_bias)
    k = qkv.split_with_sizes(facts.qkv_sizes, -1)[1].unflatten(-1, (-1, facts.head_dim))
    if weights.k_norm is not None:
        k = k * torch.rsqrt(k.square().mean(-1, keepdim=True)) * weights.k_norm
    return k


@pytest.mark.parametrize(
    "kind",
    [{}, {"qkv_bias": True}, {"qk_norm": True}, {"qkv_bias": True, "qk_norm": True}],
    ids=str,
)
def test_moments_are_those_of_the_keys(kind):
    """For independent inputs; a key norm divides each token by nearly the same."""
    facts = dataclasses.replace(FACTS, **kind)
    weights = layer(facts)
    moments = key_moments(weights)
    k = true_keys(facts, weights).flatten(1)
    size = k.square().mean().sqrt()
    off = 0.1 if facts.qk_norm else 0.03  # 3 % is the error of 20,000 draws
    assert (moments.mean - k.mean(0)).abs().max() <= off * size
    assert (moments.deviation / k.std(0) - 1).abs().max() <= off


def test_moments_are_copies():
    """They outlive the weights, which are never touched."""
    weights = layer(dataclasses.replace(FACTS, qkv_bias=True))
    before = {f.name: getattr(weights, f.name) for f in dataclasses.fields(weights)}
    before = {name: t.clone() for name, t in before.items() if t is not None}
    moments = key_moments(weights)
    assert all(torch.equal(getattr(weights, name), t) for name, t in before.items())
    kept = KeyMoments(*(x.clone() for x in moments))
    for name in before:
        getattr(weights, name).zero_()
    assert torch.equal(moments.mean, kept.mean)
    assert torch.equal(moments.deviation, kept.deviation)


@pytest.mark.parametrize("scaling", [{}, YARN], ids=["default", "yarn"])
@pytest.mark.parametrize("num_positions", [1, 50, 1000])
def test_shift_is_the_mean_bias_after_rope(scaling, num_positions):
    facts = dataclasses.replace(FACTS, rope_scaling=scaling)
    mean = torch.randn(HEADS * DIM, generator=torch.Generator().manual_seed(2)) * 50
    moments = KeyMoments(mean, torch.ones(HEADS * DIM))
    shift, _ = from_weights(moments, mean_turn(facts, num_positions), HEADS)
    cos, sin = rope_tables(facts, num_positions, "cpu")
    (turned,) = rotate(cos, sin, mean.view(1, HEADS, DIM).expand(num_positions, -1, -1))
    assert torch.allclose(shift, turned.double().mean(0).float(), atol=1e-3)


@pytest.mark.parametrize("scaling", [{}, YARN], ids=["default", "yarn"])
def test_factor_is_the_size_of_what_is_left(scaling):
    """Of a pair of large bias: all of it without a shift, else what the mean leaves of it."""
    facts = dataclasses.replace(FACTS, rope_scaling=scaling)
    cos, sin = rope_tables(facts, 512, "cpu")
    mean, deviation = torch.zeros(HEADS, DIM), torch.ones(HEADS, DIM)
    still, turning = DIM // 2 - 1, 0
    mean[:, still] = mean[:, turning + DIM // 2] = 1000.0
    moments, turn = KeyMoments(mean.flatten(), deviation.flatten()), mean_turn(facts, 512)
    (turned,) = rotate(cos, sin, mean[None].expand(512, -1, -1))
    for used, shifted in ((turn, True), (no_turn(turn), False)):
        shift, factor = from_weights(moments, used, HEADS)
        assert torch.equal(factor[:, : DIM // 2], factor[:, DIM // 2 :])
        assert factor.amax(-1).tolist() == [1.0] * HEADS
        left = turned - shift
        assert bool(shift.any()) == shifted
        size = left.unflatten(-1, (2, -1)).square().sum(-2).mean(0).sqrt()  # [K, E]
        size += 3 * 2**0.5 * cos[0]
        assert torch.allclose(factor[:, : DIM // 2], size / size.amax(-1, keepdim=True), rtol=1e-3)
    assert factor[0, turning] == factor[0, still] == 1
    _, factor = from_weights(moments, turn, HEADS)
    assert factor[0, turning] == 1 and factor[0, still] < 0.1


def test_smoothing_commutes_with_rope_and_leaves_the_softmax():
    """In float64 the weights of attention are those of the raw keys."""
    generator = torch.Generator().manual_seed(3)
    k, q = torch.randn(2, 40, HEADS, DIM, generator=generator, dtype=torch.float64)
    mean = torch.randn(HEADS, DIM, generator=generator, dtype=torch.float64) * 30
    moments = KeyMoments(mean.float().flatten(), torch.rand(HEADS * DIM, generator=generator))
    shift, factor = from_weights(moments, mean_turn(FACTS, 40), HEADS)
    cos, sin = rope_tables(FACTS, 40, "cpu")
    turned, apart = rotate(cos, sin, k + mean, (k + mean) / factor)
    assert torch.allclose(apart, turned / factor)
    raw = torch.einsum("qhd,khd->hqk", q, turned).softmax(-1)
    smooth = torch.einsum("qhd,khd->hqk", q * factor, (turned - shift) / factor).softmax(-1)
    assert torch.allclose(raw, smooth, atol=1e-12)


def test_channels_that_are_always_zero_keep_their_factor():
    """A pruned head and a dead pair: no division by zero, before or after."""
    deviation = torch.ones(HEADS, DIM)
    deviation[0] = 0
    deviation[1, [3, 3 + DIM // 2]] = 0
    moments = KeyMoments(torch.zeros(HEADS * DIM), deviation.flatten())
    _, factor = from_weights(moments, mean_turn(FACTS, 10), HEADS)
    assert torch.equal(factor, torch.ones(HEADS, DIM))
    assert torch.equal(from_range(torch.zeros(2, HEADS, DIM), torch.zeros(HEADS, DIM)), factor)


def test_factor_from_a_range_is_its_distance_from_the_shift():
    smallest, largest = torch.full((HEADS, DIM), -1.0), torch.full((HEADS, DIM), 1.0)
    shift = torch.zeros(HEADS, DIM)
    largest[0, 5] = 8.0
    smallest[0, 7 + DIM // 2], shift[0, 7 + DIM // 2] = -1.0, 3.0
    smallest[1, 2], largest[1, 2], shift[1, 2] = 99.0, 101.0, 100.0  # tight around its shift
    smallest[1, 4], largest[1, 4], shift[1, 4] = 9.0, 10.0, 8.0  # beside its shift
    factor = from_range(torch.stack((smallest, largest)), shift)
    wanted = torch.full((HEADS, DIM // 2), 1 / 8)
    wanted[0, 5], wanted[0, 7] = 1.0, 0.5
    wanted[1], wanted[1, 4] = 0.5, 1.0
    assert torch.equal(factor, torch.cat((wanted, wanted), -1))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny("qwen2", tmp_path_factory.mktemp("smoothing") / "qwen2"))


@pytest.mark.parametrize("chunk_size", [None, 7])
def test_the_recorder_sees_every_key(model, tmp_path, chunk_size):
    """The range of what the cache of a plain run holds, whatever the chunks."""
    ids = [[5 + i % 50 for i in range(40)], [7] * 20]
    config = {"model": model, "device": "cpu", "max_model_len": 64, "max_num_seqs": 2}
    path = tmp_path / "keys.safetensors"
    record_keys(path, ids, chunk_size=chunk_size, **config)
    seen = load_file(path)["key_range"]

    kept = {}

    class Keeps(KeyRecorder):
        def write(self, layer, k, v, batch):
            kept.setdefault(layer, []).append(k.clone())
            super().write(layer, k, v, batch)

    kv = Keeps(Keeps.Config())
    with Engine(kv=kv, **config) as engine:
        for one in ids:
            engine.score(one, lambda first, logits, targets: None)
    keys = torch.stack([torch.cat(parts) for parts in kept.values()], 1)
    assert len(keys) == 60
    assert torch.allclose(seen, torch.stack((keys.amin(0), keys.amax(0))), atol=1e-5)


def test_padding_is_not_recorded():
    """It carries 1000, the tokens carry ±1."""
    rig = Rig(KeyRecorder(KeyRecorder.Config()), num_tokens=96, limits=Limits(64, 4, 32))
    seq = rig.sequence([5] * 20)
    rig.admit(seq)
    compute(rig, seq, num_padding_tokens=5)
    smallest, largest = rig.kv.key_range
    assert (smallest == -1).all() and (largest == 1).all()


def test_a_file_that_is_no_recording_is_refused(tmp_path):
    path = tmp_path / "keys.safetensors"
    for content, said in (
        ({"other": torch.zeros(1)}, "KeyError"),
        (
            {"key_range": torch.zeros(2, 3, HEADS, DIM)},
            rf"\[2, 3, {HEADS}, {DIM}\] where the model",
        ),
    ):
        save_file(content, path)
        with pytest.raises(UserError, match=said) as caught:
            read_range(str(path), FACTS)
        assert "record_keys" in str(caught.value)
    path.write_bytes(b"no safetensors")
    for wrong in (path, tmp_path / "absent"):
        with pytest.raises(UserError, match="holds no tensor key_range"):
            read_range(str(wrong), FACTS)
