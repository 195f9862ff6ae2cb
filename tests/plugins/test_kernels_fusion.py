"""The `triton` fusion set: kernels against the plain nodes, the sampler, the chain, covered.

Without a GPU they run in Triton's interpreter, in a process of their own, because TRITON_INTERPRET
must be set before triton is imported; there in float32 and float16, since the interpreter's
bfloat16 is wrong.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

pytest.importorskip("triton", reason="needs triton, which is not installed here")

from core.chain import cover, decoder_chain, execute  # noqa: E402
from core.errors import UserError  # noqa: E402
from core.facts import ModelFacts, facts_from_config  # noqa: E402
from core.loading import RANDOM_SHAPES  # noqa: E402
from core.model import Site  # noqa: E402
from core.seams import KVSink  # noqa: E402
from core.testing import parity  # noqa: E402
from core.testing.interpreter import (  # noqa: E402
    HERE,
    INTERPRETING,
    PLACES,
    every_pair,
    ints,
    poisoned,
    randn,
    run_in_the_interpreter,
)
from core.weights import LayerWeights, ModelWeights  # noqa: E402
from plugins.fusion.none import NoFusion  # noqa: E402
from plugins.fusion.triton import NAMES, TritonFusion  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=PLACES, ids=str)
def place(request):
    return request.param


@pytest.mark.skipif(INTERPRETING, reason=HERE)
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)


def turns(place, num_positions, head_dim):
    """cos and sin, float32 [P, D / 2]."""
    angles = torch.arange(num_positions)[:, None] * 10.0 ** -torch.linspace(0, 3, head_dim // 2)
    return angles.cos().to(place[0]), angles.sin().to(place[0])


def assert_rounded_alike(found, wanted, share=0.02):
    """Close everywhere; in half precision equal nearly everywhere, which takes equal roundings."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    tolerance = parity.SPAN[wanted.dtype]
    torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)
    if wanted.dtype != torch.float32:
        assert (found != wanted).float().mean() <= share


# ----------------------------------------------------------------------------------- norms, act_mul


@pytest.mark.parametrize(
    ("place", "width", "in_place"), every_pair(PLACES, [8, 96, 1000, 1024], [False, True]), ids=str
)
def test_add_norm(place, width, in_place):
    from plugins.fusion.kernels.add_norm import add_norm, add_norm_reference

    residual = randn(place, 7, width + 8, scale=3.0)[:, :width]
    hidden = randn(place, 7, 2 * width, seed=2)[:, width:]
    residual[3], hidden[3] = 0, 0  # a row of zeros divides by sqrt(eps) alone
    gain = randn(place, width, seed=3)
    wanted = add_norm_reference(residual, hidden, gain, 1e-6)
    out = hidden if in_place else poisoned(hidden)
    add_norm(residual, hidden, gain, 1e-6, out)
    assert residual.equal(wanted[0])
    assert_rounded_alike(out, wanted[1])


@pytest.mark.parametrize("width", [96, 1024])
def test_embed_norm(place, width):
    from plugins.fusion.kernels.add_norm import embed_norm, embed_norm_reference

    embed, gain = randn(place, 50, width), randn(place, width, seed=2)
    token_ids, token_slots = ints(place, [3, -1, 49, 0, -1]), ints(place, [1, 2, 4, 3, 0])
    last_token = ints(place, [11, 12, 13, 14, 1 << 28])
    given = (token_ids, token_slots, last_token, embed, gain, 1e-5)
    residual, hidden = embed_norm(*given)
    # The oracle looks up every slot's last token, the kernel only those that are asked for.
    last_token[4] = 0
    wanted = embed_norm_reference(*given)
    assert residual.equal(wanted[0])
    assert residual[1].equal(embed[13]) and residual[4].equal(embed[11])
    assert_rounded_alike(hidden, wanted[1])


@pytest.mark.parametrize("width", [5, 1024, 1500])
def test_act_mul(place, width):
    from plugins.fusion.kernels.act_mul import act_mul, act_mul_reference

    gate_up = randn(place, 5, 2 * width + 3, scale=4.0)[:, : 2 * width]
    gate_up[0, :2] = torch.tensor([-100.0, 100.0])
    assert_rounded_alike(act_mul(gate_up), act_mul_reference(gate_up))


@pytest.mark.parametrize("width", [8, 1000])
def test_norm(place, width):
    from core.model import rms_norm
    from plugins.fusion.kernels.add_norm import norm

    x, gain = randn(place, 7, width + 8, scale=3.0)[:, :width], randn(place, width, seed=3)
    before = x.clone()
    assert_rounded_alike(norm(x, gain, 1e-6), rms_norm(x, gain, 1e-6))
    assert x.equal(before)


# ------------------------------------------------------------------------------- few_rows, one_tile

# Outputs and inputs of a product: less than a tile, odd, several chunks, one row of 4 a program.
PRODUCTS = [(5, 24), (96, 64), (33, 1500), (130, 2560), (2050, 40)]
ONE_ROW = ["plain", "bias", "act", "norm", "norm bias", "norm act", "add"]


def on_a_cpu(values):
    """cuBLAS may add up half-precision parts of a product, which a CPU does not."""
    return [value if value is None else value.cpu() for value in values]


def weights(place, n, k, seed=5):
    return randn(place, n, k, seed=seed, scale=k**-0.5)


@pytest.mark.parametrize(
    ("place", "shape", "num_rows", "kind"),
    every_pair(PLACES, PRODUCTS, [1, 3, 16], ["plain", "bias", "act"]),
    ids=str,
)
def test_few_rows(place, shape, num_rows, kind):
    from plugins.fusion.kernels.few_rows import few_rows, few_rows_reference

    n, k = shape
    x = randn(place, num_rows, k + 8)[:, :k]
    weight = weights(place, 2 * n if kind == "act" else n, k)
    given = (x, weight, randn(place, n, seed=6) if kind == "bias" else None)
    wanted = few_rows_reference(*on_a_cpu(given), act=kind == "act")
    assert_rounded_alike(few_rows(*given, act=kind == "act").cpu(), wanted, share=0.1)


@pytest.mark.parametrize(
    ("place", "shape", "num_rows", "kind"),
    every_pair(PLACES, PRODUCTS, [17, 64, 65, 128], ["plain", "bias", "act"]),
    ids=str,
)
def test_one_tile(place, shape, num_rows, kind):
    from plugins.fusion.kernels.few_rows import few_rows_reference
    from plugins.fusion.kernels.one_tile import one_tile

    n, k = shape
    x = randn(place, num_rows, k + 8)[:, :k]
    weight = weights(place, 2 * n if kind == "act" else n, k)
    given = (x, weight, randn(place, n, seed=6) if kind == "bias" else None)
    wanted = few_rows_reference(*on_a_cpu(given), act=kind == "act")
    assert_rounded_alike(one_tile(*given, act=kind == "act").cpu(), wanted, share=0.1)


@pytest.mark.parametrize(
    ("place", "shape", "num_rows"), every_pair(PLACES, PRODUCTS, [17, 64, 65, 200]), ids=str
)
def test_one_tile_parts(place, shape, num_rows):
    """Float32 before anything is rounded: off by the order of sums alone."""
    from plugins.fusion.kernels.one_tile import one_tile_parts, one_tile_parts_reference

    n, k = shape
    x, weight = randn(place, num_rows, k + 8)[:, :k], weights(place, n, k)
    parts = one_tile_parts(x, weight)
    assert parts.dtype == torch.float32 and 1 <= len(parts) <= 4
    assert (len(parts) > 1) == (k > (256 if num_rows <= 64 else 128))
    assert num_rows <= 128 or len(parts) <= 2
    wanted = one_tile_parts_reference(*on_a_cpu((x, weight)))
    tolerance = parity.SPAN[torch.float32]
    found = parts.double().sum(0).cpu()
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("place", "shape", "num_rows"),
    every_pair(PLACES, [(5, 24), (33, 1500), (20, 3072), (16, 4864)], [2, 16]),
    ids=str,
)
def test_few_rows_parts(place, shape, num_rows):
    from plugins.fusion.kernels.few_rows import few_rows_parts
    from plugins.fusion.kernels.one_tile import one_tile_parts_reference

    n, k = shape
    x, weight = randn(place, num_rows, k + 8)[:, :k], weights(place, n, k)
    parts = few_rows_parts(x, weight)
    assert parts.dtype == torch.float32 and len(parts) == min(3, -(-k // 1024))
    wanted = one_tile_parts_reference(*on_a_cpu((x, weight)))
    tolerance = parity.SPAN[torch.float32]
    found = parts.double().sum(0).cpu()
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("place", "width", "num_parts"), every_pair(PLACES, [8, 1000, 1024], [1, 2, 4]), ids=str
)
def test_add_parts_norm(place, width, num_parts):
    from plugins.fusion.kernels.add_norm import add_norm_reference, add_parts_norm

    residual = randn(place, 7, width + 8, scale=3.0)[:, :width]
    parts = randn(("cpu", torch.float32), num_parts, 7, width, seed=2).to(place[0])
    gain = randn(place, width, seed=3)
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    wanted = add_norm_reference(residual, whole.to(place[1]), gain, 1e-6)
    found = add_parts_norm(residual, parts, gain, 1e-6)
    assert residual.equal(wanted[0])
    assert_rounded_alike(found, wanted[1])


@pytest.mark.parametrize(("place", "shape", "kind"), every_pair(PLACES, PRODUCTS, ONE_ROW), ids=str)
def test_one_row(place, shape, kind):
    """Beside the row lies nothing that is read; an addition is made in place."""
    from plugins.fusion.kernels.few_rows import one_row, one_row_reference

    n, k = shape
    act = "act" in kind
    x = poisoned(randn(place, 3, k))
    x[1] = randn(place, k, scale=3.0)
    given = (x[1:2], weights(place, 2 * n if act else n, k))
    bias = randn(place, n, seed=6) if "bias" in kind else None
    residual = randn(place, 1, n, seed=7, scale=3.0) if kind == "add" else None
    gain = randn(place, k, seed=8) if "norm" in kind else None
    options = {"gain_K": gain, "eps": 1e-6, "act": act}
    *given_there, residual_there, gain_there = on_a_cpu((*given, bias, residual, gain))
    there = {**options, "gain_K": gain_there, "residual_N": residual_there}
    wanted = one_row_reference(*given_there, **there)
    found = one_row(*given, bias, residual_N=residual, out_N=residual, **options)
    assert residual is None or found is residual
    assert_rounded_alike(found.cpu(), wanted, share=0.1)


# ------------------------------------------------------------------------------------ qk_rope_write

# Query heads, KV heads, head_dim, block size.
SHAPES = [
    (4, 2, 64, 16),
    (3, 1, 32, 5),
    (7, 7, 16, 1),
    (16, 8, 128, 16),
    (9, 3, 128, 7),
    (2, 1, 256, 3),
]


@pytest.mark.parametrize(
    ("place", "shape", "has_norm", "has_fresh"),
    every_pair(PLACES, SHAPES, [False, True], [False, True]),
    ids=str,
)
def test_qk_rope_write(place, shape, has_norm, has_fresh):
    from plugins.fusion.kernels.qk_rope_write import qk_rope_reference, qk_rope_write

    num_heads, num_kv_heads, head_dim, block_size = shape
    num_tokens, num_blocks = 5, 12
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = randn(place, num_tokens, width + 16, scale=2.0)[:, :width]
    gains = (randn(place, head_dim, seed=3), randn(place, head_dim, seed=4)) if has_norm else None
    cos, sin = turns(place, 40, head_dim)
    positions, places = ints(place, [39, 0, 7, 7, 21]), ints(place, [11, 3, 5, 0, 8, 2, 2])
    caches = [poisoned(randn(place, num_blocks, num_kv_heads, block_size, head_dim)) for _ in "kv"]
    fresh = [poisoned(randn(place, num_tokens + 1, num_kv_heads, head_dim)) for _ in "kv"]
    q = qk_rope_write(
        qkv, gains, cos, sin, positions, tuple(caches), places, tuple(fresh) if has_fresh else None,
        num_heads=num_heads, block_size=block_size, eps=1e-6,
    )  # fmt: skip
    wanted_q, *wanted = qk_rope_reference(
        qkv, gains, cos, sin, positions,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, eps=1e-6,
    )  # fmt: skip
    assert q.is_contiguous()
    assert_rounded_alike(q, wanted_q)
    used = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for cache, scratch, values in zip(caches, fresh, wanted, strict=True):
        for token, at in enumerate(places[:num_tokens].tolist()):
            used[at // block_size, at % block_size] = True
            stored = cache[at // block_size, :, at % block_size]
            assert_rounded_alike(stored, values[token], share=0.2)
        if has_fresh:
            assert_rounded_alike(scratch[:num_tokens], values)
        assert scratch[num_tokens if has_fresh else 0 :].isnan().all()
        assert cache.transpose(1, 2)[~used].isnan().all(), "a place that no token owns was written"


@pytest.mark.parametrize(
    ("place", "shape", "has_norm", "has_fresh"),
    every_pair(PLACES, SHAPES, [False, True], [False, True]),
    ids=str,
)
def test_qk_rope_write_int8(place, shape, has_norm, has_fresh):
    """What the plain span stores, rounded to codes bit for bit as the cache's own write does."""
    from plugins.fusion.kernels.qk_rope_write import qk_rope_write
    from plugins.fusion.kernels.qk_rope_write_int8 import qk_rope_write_int8
    from plugins.kv.int8_storage import Int8Sink
    from plugins.kv.kernels.write_int8 import write_int8_reference

    num_heads, num_kv_heads, head_dim, block_size = shape
    num_tokens, num_blocks = 5, 12
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = randn(place, num_tokens, width + 16, scale=2.0)[:, :width]
    gains = (randn(place, head_dim, seed=3), randn(place, head_dim, seed=4)) if has_norm else None
    given = (qkv, gains, *turns(place, 40, head_dim), ints(place, [39, 0, 7, 7, 21]))
    places = ints(place, [11, 3, 5, 0, 8, 2, 2])
    eps = {"num_heads": num_heads, "eps": 1e-6}

    blocks = (num_blocks, num_kv_heads, block_size)
    plain = [poisoned(randn(place, *blocks, head_dim)) for _ in "kv"]
    wanted_q = qk_rope_write(*given, tuple(plain), places, None, block_size=block_size, **eps)
    at = places[:num_tokens].long()
    k, v = (cache[at // block_size, :, at % block_size] for cache in plain)
    smoothing = torch.rand(2, num_kv_heads, head_dim, generator=torch.Generator().manual_seed(6))
    shift, factor = smoothing.to(place[0]) + 0.05

    def empty(device):
        codes = torch.full((*blocks, head_dim), 99, dtype=torch.int8, device=device)
        transposed = torch.full((*blocks[:2], head_dim, block_size), 99, dtype=torch.int8)
        scales = torch.full((2, *blocks), 7.0, device=device)
        room = (2, num_tokens + 1, num_kv_heads, head_dim)
        fresh = torch.full(room, torch.nan, dtype=place[1], device=device)
        return codes, transposed.to(device), *scales, *fresh

    found, wanted = empty(place[0]), empty("cpu")
    sink = Int8Sink(
        "int8_blocks", *found[:2], block_size, places, found[4:], k_scale=found[2],
        v_scale=found[3], k_shift=shift, k_factor=factor,
    )  # fmt: skip
    q = qk_rope_write_int8(*given, sink, sink.fresh if has_fresh else None, **eps)
    write_int8_reference(
        *(x.cpu() for x in (k, v, shift, factor)), wanted[:2], wanted[2:4], places.cpu(),
        block_size, wanted[4:] if has_fresh else None,
    )  # fmt: skip
    # In float32 two kernels may fuse a product and a sum differently, and an ulp turns a code.
    exact = place[1] != torch.float32 or place[0] == "cpu"
    atol = {"codes": 0, "scales": 0, "values": 0}
    if not exact:
        atol = {"codes": 1, "scales": 1e-6, "values": 1.5 * float(found[2:4][0].max())}
    assert q.is_contiguous()
    torch.testing.assert_close(q, wanted_q, rtol=0, atol=0 if exact else 2e-6)
    kinds = ("codes", "codes", "scales", "scales", "values", "values")
    for kind, made, expected in zip(kinds, found, wanted, strict=True):
        torch.testing.assert_close(made.cpu(), expected, rtol=0, atol=atol[kind], equal_nan=True)
        if kind == "codes":
            assert (made.cpu() != expected).float().mean() <= (0 if exact else 1e-3)
    assert found[4].isnan().all() != has_fresh


# ------------------------------------------------------------------------------------------- sample


def keys(place, num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-(2**31), 2**31, (num_rows, 2), generator=generator)
    return drawn.to(torch.int32).to(place[0])


def draw(logits, temperature, row_keys):
    from plugins.fusion.kernels.sample import sample

    out = torch.full((logits.shape[0],), -1, dtype=torch.int32, device=logits.device)
    sample(logits, torch.tensor(temperature, device=logits.device), row_keys, out)
    return out


@pytest.mark.parametrize("num_entries", [1, 100, 2048, 6001])
def test_sample_picks_the_best_score(place, num_entries):
    from core.sampler import gumbel_scores
    from plugins.fusion.kernels.sample import scores_reference

    temperature = [0.0, 1.0, 0.3, 0.0, 2.0, 1e-3]
    logits = randn(place, 6, num_entries + 24, scale=2.0)[:, :num_entries]
    row_keys = keys(place, 6)
    found = draw(logits, temperature, row_keys).long()
    heat = torch.tensor(temperature, device=logits.device)
    wanted = scores_reference(logits, heat, row_keys)
    # float32 scores may swap neighbours that float64 tells apart; they may not lose more than their
    # rounding.
    best = wanted.max(-1).values
    lost = best - wanted.gather(-1, found[:, None])[:, 0]
    assert (lost <= parity.TIE + parity.RELATIVE_TIE * best.abs()).all()
    greedy = heat == 0
    assert found[greedy].equal(logits.float().argmax(-1)[greedy])
    # The engine's plain sampler draws the same tokens.
    plain = gumbel_scores(logits, heat, row_keys).double()
    torch.testing.assert_close(plain, wanted, rtol=1e-4, atol=1e-4)


def test_sample_takes_the_lowest_of_ties_and_stays_inside(place):
    logits = torch.zeros(4, 5000, dtype=place[1], device=place[0])
    logits[0, [4999, 2050, 4000]] = 1  # in two blocks of the first stage
    logits[1, [7, 8]] = 1
    logits[2] = -torch.inf
    logits[3] = torch.nan
    assert draw(logits, [0.0] * 4, keys(place, 4)).tolist() == [2050, 7, 0, 0]
    assert draw(logits[2:], [1.0] * 2, keys(place, 2)).tolist() == [0, 0]


def test_sample_depends_on_key_and_logits_alone(place):
    logits, row_keys = randn(place, 1, 3000).expand(3, -1), keys(place, 3)
    alone = [draw(logits[:1], [1.0], row_keys[i : i + 1]).item() for i in range(3)]
    assert draw(logits, [1.0] * 3, row_keys).tolist() == alone
    assert len(set(alone)) > 1


def test_sampled_frequencies_are_the_softmax(place):
    num_rows = 250 if INTERPRETING else 4000
    chances = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03], device=place[0])
    logits = chances.log().to(place[1]).expand(num_rows, -1)
    counts = draw(logits, [1.0] * num_rows, keys(place, num_rows)).bincount(minlength=5)
    expected = chances * num_rows
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 23.5  # 4 degrees of freedom: passed by chance once in ten thousand


# ---------------------------------------------------------------------------------------- the chain


def tiny(place, *, qk_norm, num_layers=2, inner=40):
    """A random decoder and a stand-in for a cache: tokens have places, attention mixes q, k, v."""
    hidden, heads, kv_heads, head_dim, vocab = 48, 4, 2, 16, 30
    facts = ModelFacts(
        num_layers, hidden, inner, heads, kv_heads, head_dim, vocab, 64, 1e-6, 1e4,
        qk_norm=qk_norm, dtype=place[1],
    )  # fmt: skip
    seeds = iter(range(100, 1000))

    def weight(*shape):
        return randn(place, *shape, seed=next(seeds), scale=shape[-1] ** -0.5)

    def gain(width):
        return 1 + randn(place, width, seed=next(seeds), scale=0.1)

    layers = tuple(
        LayerWeights(
            attn_norm=gain(hidden),
            qkv=weight((heads + 2 * kv_heads) * head_dim, hidden),
            o=weight(hidden, heads * head_dim),
            mlp_norm=gain(hidden),
            gate_up=weight(2 * inner, hidden),
            down=weight(hidden, inner),
            q_norm=gain(head_dim) if qk_norm else None,
            k_norm=gain(head_dim) if qk_norm else None,
        )
        for _ in range(num_layers)
    )
    model = ModelWeights(weight(vocab, hidden), layers, gain(hidden), weight(vocab, hidden))
    k, v = (poisoned(randn(place, 4, kv_heads, 2, head_dim)) for _ in "kv")
    sink = KVSink("blocks", k, v, 2, ints(place, range(2, 8)))
    cos, sin = turns(place, 64, head_dim)

    def read(cache):
        return cache.transpose(1, 2).flatten(0, 1)[2:8].repeat_interleave(heads // kv_heads, 1)

    def write(layer, k_TKD, v_TKD, batch):
        from plugins.kv.kernels.write import write_kv_reference

        write_kv_reference(k_TKD, v_TKD, k, v, sink.slot_map, 2)

    def attend(layer, q_THD, batch):
        return (torch.tanh(q_THD * read(k)) + read(v)).flatten(1)

    kv = SimpleNamespace(write=write, attend=attend)
    sites = [Site(i, facts, model, w, cos, sin, kv, sink) for i, w in enumerate(layers)]
    head = Site(-1, facts, model, None, cos, sin, kv, None)
    batch = SimpleNamespace(
        shape=SimpleNamespace(lone=True),
        token_ids=ints(place, [4, -1, 29, 0, 8, 8]),
        token_slots=ints(place, [0, 1, 2, 2, 2, 3]),
        last_token=ints(place, [1, 17, 3, 2]),
        positions=ints(place, [5, 63, 0, 1, 2, 0]),
        logit_rows=ints(place, [0, 1, 4]),
        logits=None,
    )
    return facts, sink, decoder_chain(head, sites), batch


def covered_by(chain, facts, sink, place, num_tokens):
    """The chain under all spans that apply to a step of `num_tokens` tokens."""
    spans = TritonFusion().spans(facts, torch.device(place[0]))
    return cover(chain, [span for span in spans if span.when(num_tokens, facts, sink)], strict=True)


MANY = "qkv_proj qk_rope_write attention o_proj add_norm gate_up act_mul down add_norm"
PARTS = "qkv_proj qk_rope_write attention linear_add_norm gate_up act_mul linear_add_norm"
TALL = "linear qk_rope_write attention linear_add_norm gate_up act_mul linear_add_norm"
TILE = "linear qk_rope_write attention linear_add_norm linear_act linear_add_norm"
FEW = "linear qk_rope_write attention linear add_norm linear_act linear add_norm"
LONG = "linear qk_rope_write attention linear add_norm linear_act linear_add_norm"
ONE = "norm_linear qk_rope_write attention linear_add norm_linear linear_add"


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 64, 65, 128, 129, 256, 257])
def test_small_steps_have_kernels_for_products(place, num_tokens):
    """The first layer's norm goes with the embedding; the last addition of one row with a product,
    and the final norm is alone then. From 65 tokens on gate_up has none, and from 129 on only
    products that are shared out have one. Not in float32."""
    facts, sink, chain, _ = tiny(place, qk_norm=True)
    found = [op.name for op in covered_by(chain, facts, sink, place, num_tokens)]
    if num_tokens == 257 or place[1] == torch.float32:
        assert found == ["embed_norm", *MANY.split() * 2, "lm_head"]
    elif num_tokens > 128:
        assert found == ["embed_norm", *PARTS.split() * 2, "lm_head"]
    elif num_tokens > 64:
        assert found == ["embed_norm", *TALL.split() * 2, "lm_head"]
    elif num_tokens > 16:
        assert found == ["embed_norm", *TILE.split() * 2, "lm_head"]
    elif num_tokens > 1:
        assert found == ["embed_norm", *FEW.split() * 2, "lm_head"]
    else:
        first = ["embed_norm", "linear", *ONE.split()[1:]]
        assert found == [*first, *ONE.split(), "norm", "lm_head"]


@pytest.mark.parametrize("num_tokens", [2, 16])
def test_few_rows_share_a_long_k_too(place, num_tokens):
    facts, sink, chain, batch = tiny(place, qk_norm=True, inner=3072)
    covered = covered_by(chain, facts, sink, place, num_tokens)
    layer = MANY if place[1] == torch.float32 else LONG
    assert [op.name for op in covered] == ["embed_norm", *layer.split() * 2, "lm_head"]
    wanted = execute(cover(chain, []), batch, {})["logits"]
    found = execute(covered, batch, {})["logits"]
    tolerance = parity.CHAIN[place[1]]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(INTERPRETING, reason=HERE)
@pytest.mark.parametrize("num_tokens", [1, 8, 40])
def test_products_of_large_weights_are_left_to_the_library(num_tokens):
    """Of Qwen3-4B all but those of a lone row, of Qwen3-0.6B none."""
    found = {}
    for name in ("qwen3-0.6b", "qwen3-4b"):
        facts = facts_from_config(RANDOM_SHAPES[f"random:{name}"], torch.bfloat16)
        spans = TritonFusion().spans(facts, torch.device("cuda"))
        found[name] = {s.name for s in spans if s.when(num_tokens, facts, None)}
    products = {"norm_linear", "linear_add", "linear", "linear_act", "linear_add_norm"}
    assert found["qwen3-0.6b"] & products
    assert bool(found["qwen3-4b"] & products) == (num_tokens == 1)


def test_tall_products_run_at_once():
    """Outputs and inputs of o_proj and down of Qwen3-0.6B, Qwen2.5-0.5B, and Qwen3-1.7B."""
    from plugins.fusion.kernels.one_tile import suits_tall

    weights = [(1024, 2048), (1024, 3072), (896, 896), (896, 4864), (2048, 2048)]
    sizes = (64, 65, 128, 129, 256, 257)
    found = {rows: [suits_tall(rows, *w, 132, by_parts=True) for w in weights] for rows in sizes}
    assert found[65] == found[128] == [True, True, True, True, False]
    assert found[129] == found[256] == [True, True, True, False, False]
    assert not any(found[64] + found[257])
    assert not suits_tall(128, 1024, 2048, 108, by_parts=True)
    for rows, suits in {64: False, 65: True, 128: True, 129: False}.items():
        assert suits_tall(rows, 4096, 1024, 132, by_parts=False) == suits  # qkv of Qwen3-0.6B
    assert not suits_tall(128, 4096, 2048, 132, by_parts=False)  # of Qwen3-1.7B


@pytest.mark.parametrize(
    ("place", "num_tokens", "qk_norm"),
    every_pair(PLACES, [1, 6, 17, 65, 257], [False, True]),
    ids=str,
)
def test_the_covered_chain_computes_what_the_plain_one_does(place, num_tokens, qk_norm):
    """17, 65, 257: of the six tokens there are, by the kernels for one tile, for a few and for
    many."""
    facts, sink, chain, batch = tiny(place, qk_norm=qk_norm)
    if num_tokens == 1:
        for name in ("token_ids", "token_slots", "positions", "logit_rows"):
            setattr(batch, name, getattr(batch, name)[:1])
    covered = covered_by(chain, facts, sink, place, num_tokens)
    wanted = execute(cover(chain, []), batch, {})["logits"]
    sink.k.fill_(torch.nan)
    sink.v.fill_(torch.nan)
    found = execute(covered, batch, {})["logits"]
    tolerance = parity.CHAIN[place[1]]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_a_step_without_logits_ends_at_the_final_norm(place):
    """Chunks of a prompt, and scoring, run the chain up to its final hidden states."""
    facts, sink, chain, batch = tiny(place, qk_norm=True)
    covered = covered_by(chain[:-1], facts, sink, place, 6)
    wanted = execute(cover(chain[:-1], []), batch, {})["hidden"]
    found = execute(covered, batch, {})["hidden"]
    tolerance = parity.CHAIN[place[1]]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_the_sample_span(place):
    facts, sink, chain, batch = tiny(place, qk_norm=False)
    spans = TritonFusion(TritonFusion.Config(only=("sample",))).spans(facts, torch.device(place[0]))
    (span,) = spans
    logits = randn(place, 3, 70)
    batch.temperature = torch.tensor([0.0, 0.7, 0.0], device=place[0])
    batch.sample_keys = keys(place, 3)
    (sampled,) = span.run((chain[0].site,), batch, logits)
    assert sampled.dtype == torch.int32 and sampled.shape == (3,)
    assert sampled.equal(draw(logits, [0.0, 0.7, 0.0], batch.sample_keys))


# ------------------------------------------------------------------------------------------- offers


def test_keys_and_values_are_written_only_where_the_sink_is_known():
    spans = {span.name: span for span in TritonFusion().spans(None, torch.device("cuda"))}
    assert spans.keys() == set(NAMES)
    write = spans["qk_rope_write"]
    facts = SimpleNamespace(head_dim=64)
    for kind in ("int8_blocks", "blocks"):
        sink = SimpleNamespace(kind=kind)
        assert write.when(8, facts, sink)
    assert not write.when(8, facts, None)
    assert not write.when(8, facts, SimpleNamespace(kind="int8"))
    assert not write.when(8, SimpleNamespace(head_dim=80), sink)


def test_an_unknown_span_is_refused_with_the_known_ones():
    with pytest.raises(ValidationError) as caught:
        TritonFusion.Config(only=("add_norm", "qk_rope"))
    assert all(name in str(caught.value) for name in ("'qk_rope'", *NAMES))


@pytest.mark.skipif(INTERPRETING, reason="the interpreter runs the kernels on a CPU")
def test_a_cpu_is_refused():
    with pytest.raises(UserError, match="device is cpu: choose --fusion none"):
        TritonFusion().spans(None, torch.device("cpu"))


def test_no_fusion_offers_no_span():
    assert not NoFusion().spans(None, torch.device("cpu"))


def test_importing_the_offers_imports_neither_torch_nor_triton():
    code = (
        "import sys, plugins.fusion.none, plugins.fusion.triton\n"
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
