"""Every option of every offer that ships changes what comes out.

Options of what needs a GPU are watched where they decide: in the shapes to capture, in the places
that spans claim.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from core import Engine, SamplingParams
from core.batch import Limits
from core.errors import UserError
from core.registry import Registry
from core.seams import SEAMS
from core.testing.tiny import save_tiny
from plugins.fusion.inductor import InductorFusion
from plugins.fusion.onednn import OneDnnFusion
from plugins.fusion.triton import TritonFusion
from plugins.fusion.verify import Verification
from plugins.kv.smoothing import record_keys

LIMITS = Limits(max_model_len=1024, max_num_seqs=20, max_num_batched_tokens=300)


def options():
    """(seam, name of the offer, field), of all that the project itself registers."""
    for seam in SEAMS:
        for name, offer in Registry().offers[seam].items():
            if offer.owner.distribution == "outweigh":
                yield from ((seam, name, field) for field in offer.load().Config.model_fields)


def prompt(num_tokens, seed=0):
    return np.random.default_rng(seed).integers(3, 290, num_tokens).tolist()


def params_of(max_tokens=4):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def engine(settings, **given):
    defaults = {"model": "random:tiny", "device": "cpu", "max_model_len": 128, "max_num_seqs": 2}
    return Engine(**{**defaults, **given, "settings": settings})


# -------- kv


def case_block_size(kv, tmp_path):
    for block_size, num_cached in ((4, 16), (16, 16), (19, 19), (32, 0)):
        with engine({"kv.block_size": block_size}, kv=kv) as made:
            first, second = (made.generate(prompt(20), params_of())[0] for _ in range(2))
            assert second.metrics.num_cached_tokens == num_cached
            assert first.token_ids == second.token_ids


def case_num_blocks(kv, tmp_path):
    for num_blocks, fits in ((2, False), (3, True)):
        with engine({"kv.num_blocks": num_blocks, "kv.block_size": 16}, kv=kv) as made:
            assert made.report()["kv_cache_tokens"] == 16 * num_blocks
            if fits:
                assert len(made.generate(prompt(40), params_of())[0].token_ids) == 4
            else:
                with pytest.raises(UserError, match="needs 3 blocks of 16 and the cache has 2"):
                    made.generate(prompt(40), params_of())


def logits(settings, model="random:tiny", kv="paged_int8"):
    """After each of 60 tokens, from what is stored."""
    with engine(settings, kv=kv, model=model) as made:
        return torch.cat(made.score(prompt(60), lambda first, logits, targets: logits.clone()))


def case_k_smoothing(kv, tmp_path):
    keys = tmp_path / "keys.safetensors"
    record_keys(keys, [prompt(100)], model="random:tiny", device="cpu")
    found = [
        logits({"kv.k_smoothing": "none"}),
        logits({"kv.k_smoothing": "weights"}),
        logits({"kv.k_smoothing": "calibrated", "kv.key_range": str(keys)}),
    ]
    assert torch.equal(found[1], logits({}))
    for i in range(3):
        assert not torch.equal(found[i], found[i - 1])


def case_k_scales(kv, tmp_path):
    """By channel nothing is smoothed, whatever k_smoothing says."""
    token, channel, raw = (
        logits({"kv.k_scales": scales, "kv.k_smoothing": smoothing})
        for scales, smoothing in (("token", "weights"), ("channel", "weights"), ("channel", "none"))
    )
    assert torch.equal(channel, raw) and not torch.equal(channel, token)
    assert torch.equal(token, logits({}))


def case_v_group(kv, tmp_path):
    """The finer, the nearer to what is not rounded, and the more bytes."""
    exact = logits({}, kv="paged")
    off, held = [], []
    for size in (1, 8, 32):
        settings = {"kv.v_group": size}
        off.append((logits(settings, kv=kv) - exact).abs().mean())
        with engine(settings, kv=kv, kv_cache_bytes="4MiB") as made:
            held.append(made.report()["kv_cache_tokens"])
    assert off == sorted(off) and off[0] < off[2] and held == sorted(held) and held[0] < held[2]


def case_k_shift(kv, tmp_path):
    """What it takes off is the mean of a bias, which Qwen2 has and Qwen3 has not."""
    biased = str(save_tiny("qwen2", tmp_path / "qwen2"))
    on, off = (logits({"kv.k_shift": shift}, biased) for shift in (True, False))
    assert torch.equal(on, logits({}, biased)) and not torch.equal(on, off)


def case_key_range(kv, tmp_path):
    found = []
    for seed in range(2):
        keys = tmp_path / f"{seed}.safetensors"
        record_keys(keys, [prompt(100, seed)], model="random:tiny", device="cpu")
        found.append(logits({"kv.k_smoothing": "calibrated", "kv.key_range": str(keys)}))
    assert not torch.equal(*found)
    with pytest.raises(UserError, match="holds no tensor key_range"):
        logits({"kv.k_smoothing": "calibrated", "kv.key_range": str(tmp_path / "none")})


# -------- fusion


class Unrun(TritonFusion):
    """As on CUDA, for engines that are built and not run."""

    def spans(self, facts, device):
        return super().spans(facts, torch.device("cuda"))


# inductor compiles what is run
SETS = {"triton": Unrun, "inductor": InductorFusion, "onednn": OneDnnFusion}
PLACES = {  # random:tiny has 2 layers: norms behind the embedding, in each and behind the last
    "triton": {"embed_norm": 1, "add_norm": 4, "qk_rope_write": 2, "act_mul": 2, "sample": 1},
    "inductor": {"embed_norm": 1, "add_norm": 4, "qk_rope": 2, "act_mul": 2},
    "onednn": {"qkv_proj": 2, "o_proj": 2, "gate_up": 2, "down": 2, "lm_head": 1},
}


def needs_its_backend(fusion):
    if fusion == "triton":
        pytest.importorskip("triton", reason="needs triton, which is not installed here")
    if fusion == "onednn" and not torch.backends.mkldnn.is_available():
        pytest.skip("needs a torch with oneDNN, which this one is without")


def claimed(fusion, settings, num_tokens=300):
    """Names of the spans in the operations of a step, from the start, then of sampling."""
    needs_its_backend(fusion)
    dtype = "bfloat16" if fusion == "triton" else "float32"
    with engine(settings, fusion=SETS[fusion], dtype=dtype) as made:
        executor = made._executor
        operations = executor._cover(executor._chain, num_tokens)
        operations += executor._cover(executor._sample_chain, num_tokens)
        return [operation.name for operation in operations if isinstance(operation.sites, tuple)]


def case_only(fusion, tmp_path):
    assert Counter(claimed(fusion, {})) == PLACES[fusion]
    assert claimed(fusion, {"fusion.only": []}) == []
    for name in SETS[fusion].Config.names:
        only = {"fusion.only": [name]}
        # Some are for one token, or for few; on a CPU no cache keeps a lone prompt's keys apart.
        wanted = {name} - {"last_layer"}
        assert {c for n in (300, 20, 1) for c in claimed(fusion, only, num_tokens=n)} == wanted
    given, two = "act_mul,embed_norm", ["embed_norm", "act_mul", "act_mul"]
    if fusion == "onednn":
        given, two = "lm_head,o_proj", ["o_proj", "o_proj", "lm_head"]
    assert claimed(fusion, {"fusion.only": given}) == two


def case_fuel(fusion, tmp_path):
    everything = claimed(fusion, {})
    places = [name for name in everything if name != "sample"]
    for fuel in range(len(places) + 1):
        sampled = everything[len(places) :] * (fuel > 0)
        assert claimed(fusion, {"fusion.fuel": fuel}) == places[:fuel] + sampled
    assert claimed(fusion, {"fusion.fuel": 100}) == everything


def case_verify(fusion, tmp_path):
    """What it finds is in test_fusion_verify.py."""
    needs_its_backend(fusion)
    for verify in (True, False):
        with engine({"fusion.verify": verify}, fusion=SETS[fusion]) as made:
            watched = {_is_watched(span) for span in made._executor._spans}
            assert watched == {verify}
            assert ("verified_spans" in made.report()["counters"]) == verify


def _is_watched(span):
    function = getattr(getattr(span.run, "func", None), "__func__", None)
    return function is Verification._run


def case_pack(fusion, tmp_path):
    """Whether oneDNN's own layout of each weight stands beside the weight, before any request: 4 in
    each of 2 layers, and the head. The tokens are the same, up to the order of sums."""
    needs_its_backend(fusion)
    with engine({"fusion.only": ["down"]}, fusion=fusion) as made:  # and none that nobody reads
        assert len(made._executor._spans[0].run.args[0]._packed) == 2
    found = {}
    for pack, num_packed in ((True, 9), (False, 0)):
        with engine({"fusion.pack": pack}, fusion=fusion) as made:
            assert len(made._executor._spans[0].run.args[0]._packed) == num_packed
            found[pack] = made.generate(prompt(20), params_of())[0].token_ids
    assert found[True] == found[False]


# -------- graphs


def shapes(graphs, **config):
    """The shapes that an offer captures: decode rows, lone prompts, mixed steps, by their size."""
    offer = Registry().find("graphs", graphs).load()
    found = offer(offer.Config(**config)).shapes(LIMITS)
    decode = [shape.num_seqs for shape in found if shape.decode_only]
    prompts = [shape.num_tokens for shape in found if shape.fresh]
    return decode, prompts, [s.num_tokens for s in found if not (s.decode_only or s.lone)]


def case_fine(graphs, tmp_path):
    """As many tokens as there may be rows: of decode steps, and of `piecewise` of all steps."""

    def by_length(**config):
        decode, prompts, mixed = shapes(graphs, **config)
        both = decode + mixed
        return [n for n in both if n <= 20], [n for n in both if n > 20], prompts

    usual = by_length()
    assert usual[0] == [1, 2, 4, 8, 16, 20] and by_length(fine=8) == usual
    for fine, rows in ((5, [1, 2, 4, 5, 10, 15, 20]), (20, [1, 2, 4, 20])):
        assert by_length(fine=fine) == (rows, *usual[1:])


def case_fine_tokens(graphs, tmp_path):
    usual, coarse = shapes(graphs), shapes(graphs, fine_tokens=64)
    assert usual[0] == coarse[0]
    fine = [32, 64, 96, 128, 144, 160, 176, 200, 224, 256, 288, 300]
    assert [n for n in usual[1] if n > 4] == fine
    assert [n for n in coarse[1] if n > 4] == [64, 128, 192, 256, 288, 300]
    mixed = [128, 256, 300], [256, 300]
    if graphs == "piecewise":
        mixed = [32, 64, 96, 128, 160, 192, 224, 256, 300], [64, 128, 192, 256, 300]
    assert tuple([n for n in found[2] if n > 20] for found in (usual, coarse)) == mixed


def case_coarse_tokens(graphs, tmp_path):
    usual, dense = shapes(graphs), shapes(graphs, coarse_tokens=50)
    assert usual == shapes(graphs, coarse_tokens=128) and usual[::2] == dense[::2]
    assert sorted(set(dense[1]) - set(usual[1])) == [50, 100, 150, 250]


def case_max_tokens(graphs, tmp_path):
    usual, few = shapes(graphs), shapes(graphs, max_tokens=100)
    assert usual[0] == few[0]
    assert (usual[1][-1], usual[2][-1], few[1][-1], few[2][-1]) == (300, 300, 100, 100)
    assert few[2] == [100] or graphs == "piecewise"


def case_mixed(graphs, tmp_path):
    usual, alone = shapes(graphs, mixed=True), shapes(graphs, mixed=False)
    assert usual == shapes(graphs) and usual[2] and alone == (*usual[:2], [])


# -------- sched


def order(sched, settings, *requests):
    """Names of (name, prompt tokens, arrival in seconds, priority) in the order in which they end,
    one at a time."""
    with engine(settings, sched=sched, max_num_seqs=1) as made:
        for i, (name, num_prompt, arrival, priority) in enumerate(requests):
            ids = prompt(num_prompt, i)
            made.add_request(ids, params_of(1), name, arrival=arrival, priority=priority)
        ended = []
        while made.has_unfinished():
            ended += [event.request_id for event in made.step() if event.output]
    return ended


def case_max_wait_s(sched, tmp_path):
    """What is better placed and comes 5 seconds later passes, but for a bound below that."""
    urgency = -1 if sched == "priority" else 0
    first, later = ("first", 50, 10.0, 0), ("later", 5, 15.0, urgency)
    rate = {"sched.rate": 1.0} if sched == "aging" else {}
    assert order(sched, rate, first, later) == ["later", "first"]
    for max_wait_s, ended in ((100.0, ["later", "first"]), (2.0, ["first", "later"])):
        assert order(sched, {**rate, "sched.max_wait_s": max_wait_s}, first, later) == ended


LONG, SHORT = ("long", 60, 10.0, 0), ("short", 10, 11.0, 0)  # 50 tokens less, a second later


def case_rate(sched, tmp_path):
    assert order(sched, {"sched.rate": 49}, LONG, SHORT) == ["short", "long"]
    assert order(sched, {"sched.rate": 51}, LONG, SHORT) == ["long", "short"]


def case_assumed_speed(sched, tmp_path):
    """A tenth of it, the usual fraction, is the rate until the speed has been measured."""
    assert order(sched, {"sched.assumed_speed": 490}, LONG, SHORT) == ["short", "long"]
    assert order(sched, {"sched.assumed_speed": 510}, LONG, SHORT) == ["long", "short"]


def case_rate_fraction(sched, tmp_path):
    for fraction, ended in ((0.49, ["short", "long"]), (0.51, ["long", "short"])):
        settings = {"sched.assumed_speed": 100, "sched.rate_fraction": fraction}
        assert order(sched, settings, LONG, SHORT) == ended


def case_warmup_steps(sched, tmp_path):
    """The assumed speed is next to nothing, so that the shortest goes first; any measured one makes
    a second of waiting worth more than a prompt."""
    settings = {"sched.assumed_speed": 1e-6, "sched.rate_fraction": 1e6}
    for warmup_steps, ended in ((1, ["long", "short"]), (3, ["short", "long"])):
        with engine(
            {**settings, "sched.warmup_steps": warmup_steps}, sched=sched, max_num_seqs=1
        ) as made:
            made.generate(prompt(9), params_of(1))  # a step with prompt work
            for i, (name, num_prompt, arrival, _) in enumerate((LONG, SHORT)):
                made.add_request(prompt(num_prompt, i), params_of(1), name, arrival=arrival)
            found = []
            while made.has_unfinished():
                found += [event.request_id for event in made.step() if event.output]
            assert found == ended


def case_priority_weight(sched, tmp_path):
    """A unit of it against 50 tokens more to do."""
    usual, urgent = ("usual", 10, 10.0, 0), ("urgent", 60, 10.0, -1)
    for weight, ended in ((0, ["usual", "urgent"]), (49, ["usual", "urgent"])):
        assert order(sched, {"sched.priority_weight": weight}, usual, urgent) == ended
    assert order(sched, {"sched.priority_weight": 51}, usual, urgent) == ["urgent", "usual"]


@pytest.mark.parametrize(("seam", "name", "field"), list(options()))
def test_every_option_changes_the_outcome(seam, name, field, tmp_path):
    globals()[f"case_{field}"](name, tmp_path)


def test_no_case_is_of_an_option_that_is_gone():
    cases = {name.removeprefix("case_") for name in globals() if name.startswith("case_")}
    assert cases == {field for _, _, field in options()}
