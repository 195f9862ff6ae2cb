"""`triton:last_layer`: a lone prompt's last layer beside its nodes, and what it leaves out."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from core import Engine, SamplingParams
from core.chain import Placed, cover, execute
from core.testing import decoder, parity
from core.testing.decoder import DecoderRig
from core.testing.fusion import memory_filled_with
from core.testing.interpreter import FEWER_PLACES, HERE, INTERPRETING, run_in_the_interpreter
from core.testing.spans import verify

pytest.importorskip("triton", reason="needs triton, which is not installed here")

from plugins.fusion.kernels.last_layer import LAST_LAYER
from plugins.fusion.triton import MIN_LONG, TritonFusion

LONG = MIN_LONG + 2
RUNS = (("none", False), ("triton", True), ("triton", False))  # of which the second is verified
CACHES = ["paged"] if INTERPRETING else ["paged", "contiguous", "paged_int8"]


@pytest.fixture(params=FEWER_PLACES, ids=str)
def place(request):
    return request.param


@pytest.mark.skipif(INTERPRETING, reason=HERE)
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)


def last_layer(made, device):
    (span,) = [s for s in TritonFusion().spans(made.facts, device) if s.name == "last_layer"]
    return span


def rig(kind, cache, dtype, device):
    """A decoder; without a GPU with scratch for the keys of a lone prompt, which plain torch needs
    not."""
    made = DecoderRig(kind, cache, dtype, device)
    if not INTERPRETING:
        return made
    facts, kv, write = made.facts, made.rig.kv, made.rig.kv.write
    shape = decoder.LIMITS.max_num_batched_tokens, facts.num_kv_heads, facts.head_dim
    fresh = torch.full((2, *shape), torch.nan, dtype=dtype).unbind()

    def keeping(layer, k, v, batch):
        write(layer, k, v, batch)
        if batch.shape.lone:
            fresh[0][: len(k)], fresh[1][: len(v)] = k, v

    kv.write = keeping
    made.sink = dataclasses.replace(made.sink, fresh=fresh)
    for i, (node, site) in enumerate(made.chain):
        if site.sink is not None:
            sink = dataclasses.replace(site.sink, fresh=fresh)
            made.chain[i] = Placed(node, dataclasses.replace(site, sink=sink))
    return made


@pytest.mark.parametrize("padding", [(0, 0), (3, 0), (3, 1)], ids=["whole", "padded", "two rows"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", ["qwen2.5-yarn", "qwen3"])
def test_it_is_what_its_nodes_are(place, kind, cache, padding, monkeypatch):
    """With one row of logits, as engines have it, and with more; in a step of several sequences,
    too, where every token takes the way."""
    device, dtype = place
    sizes = dict(zip(("num_padding_tokens", "num_padding_rows"), padding, strict=True))
    monkeypatch.setattr(decoder, "_PADDING", sizes)
    made, seen = rig(kind, cache, dtype, device), []
    span = last_layer(made, torch.device(device))
    if dtype == torch.float32:
        assert not span.when(LONG, made.facts, made.sink)
        return

    def check(chain, batch):
        compared = verify(cover(chain, [span]), chain, batch, tolerance=parity.CHAIN[dtype])
        seen.append((batch.shape.fresh, len(batch.logit_rows), compared))

    with memory_filled_with(torch.nan):
        made.steps(LONG, check)
    rows = 1 + padding[1]
    wanted = [(True, rows, []), (True, rows, ["last_layer"]), (False, 2 + rows, ["last_layer"])]
    assert seen == wanted


def test_of_a_lone_prompt_one_query_is_all_that_is_read(place):
    """Residual and queries of the other tokens, and keys of padding, are NaN here."""
    device, dtype = place
    made = rig("qwen3", "paged", dtype, device)
    span, found = last_layer(made, torch.device(device)), []
    if dtype == torch.float32:
        assert not span.when(LONG, made.facts, made.sink)
        return

    @torch.inference_mode()
    def check(chain, batch):
        live = execute(cover(chain[: -len(LAST_LAYER)], []), batch, {})
        if not (batch.shape.fresh and chain[-1].node.name == "lm_head"):
            execute(cover(chain[-len(LAST_LAYER) :], []), batch, live)
            return
        sites = tuple(placed.site for placed in chain[-len(LAST_LAYER) :])
        wanted = span.run(sites, batch, live["residual"].clone(), live["q"].clone())[0].clone()
        others = torch.ones(batch.shape.num_tokens, dtype=torch.bool, device=device)
        others[batch.logit_rows.long()] = False
        for name in ("residual", "q"):
            live[name][others] = torch.nan
        for scratch in sites[0].sink.fresh:  # of the last layer, which has written last
            scratch[batch.host.num_tokens :] = torch.nan
        found.append((wanted, span.run(sites, batch, live["residual"], live["q"])[0]))

    made.steps(LONG, check)
    ((wanted, got),) = found
    assert wanted.isfinite().all() and wanted.equal(got)


def test_a_cache_that_attends_in_its_own_way_is_asked(place):
    """It has inherited the sink, with the keys of a lone prompt in it."""
    device, dtype = place
    made = rig("qwen3", "paged", dtype, device)
    span, kv, seen = last_layer(made, torch.device(device)), made.rig.kv, []
    if dtype == torch.float32:
        assert not span.when(LONG, made.facts, made.sink)
        return

    class Halved(type(kv)):
        def attend(self, layer, q, batch):
            return super().attend(layer, q, batch) / 2

    def check(chain, batch):
        seen.append(verify(cover(chain, [span]), chain, batch, tolerance=parity.CHAIN[dtype]))

    kv.__class__ = Halved
    made.steps(LONG, check)
    assert seen == [[], ["last_layer"], ["last_layer"]]


def test_short_steps_and_unknown_caches_are_left_to_the_other_spans(place):
    device, dtype = place
    made = rig("qwen3", "paged", dtype, device)
    span = last_layer(made, torch.device(device))
    assert span.when(MIN_LONG, made.facts, made.sink) is (dtype.itemsize == 2)
    assert not span.when(MIN_LONG - 1, made.facts, made.sink)
    assert not span.when(LONG, made.facts, None)
    hidden = DecoderRig("qwen3", decoder.UNKNOWN, dtype, device)
    assert not span.when(LONG, hidden.facts, hidden.sink)


@pytest.mark.skipif(INTERPRETING, reason="on a CPU an engine keeps no keys of a lone prompt apart")
@pytest.mark.parametrize("kv", CACHES)
def test_an_engine_says_what_it_says_without(place, kv):
    """Prompts one by one and at once, of lengths around the edge; by their log-probabilities."""
    device, dtype = place
    prompts = [[(i * 37 + n) % 250 for i in range(n)] for n in (MIN_LONG - 1, MIN_LONG, 300, 700)]
    params = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=5)
    said = {}
    for fusion, verified in RUNS:
        options = {"kv": kv, "fusion": fusion, "max_num_batched_tokens": 1024, "max_num_seqs": 4}
        options |= {"graphs": "none" if verified else "full", "kv_cache_bytes": 1 << 24, "seed": 3}
        options |= {"device": device, "dtype": str(dtype).removeprefix("torch.")}
        options |= {"settings": {"fusion.verify": True} if verified else {}}
        options["enable_prefix_caching"] = False  # the prompts at once are one long step
        with Engine(model="random:tiny", max_model_len=1024, **options) as engine:
            alone = [engine.generate([prompt], params)[0] for prompt in prompts]
            said[fusion, verified] = alone + engine.generate(prompts, params)
            if verified:
                found = engine.report()["counters"]["verified_spans"].get("last_layer")
                assert (found is not None) is (dtype.itemsize == 2)
                assert found is None or (found["num_right"] and not found["num_deviating"])
    for outputs in zip(*said.values(), strict=True):
        assert not any(output.error for output in outputs)
        wanted, *others = (output.top_logprobs[0] for output in outputs)
        for got in others:
            both = wanted.keys() & got.keys()
            assert len(both) >= 4
            assert all(abs(wanted[t] - got[t]) <= 10 * parity.CHAIN[dtype] for t in both)
