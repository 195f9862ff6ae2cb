"""The promise about half precision: as near to transformers in float32 as transformers itself is,
over compositions, in what is scored and in what is generated. On a CPU a few cases of the same."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from core import Engine, SamplingParams
from core.testing.parity import FACTOR, Error, Transformers, held_to, tokens_held_to
from core.testing.tiny import KINDS, save_tiny

NEW_TOKENS, NUM_TOP = 12, 20
LONG, NUM_LONG = 32_000, 8
GPU = {"device": "cuda", "dtype": "bfloat16"}

# Compiling takes half a minute a decoder, so that the kind with every node stands for all.
COMPOSITIONS = [
    (kind, kv, fusion, graphs)
    for fusion in ("none", "triton", "inductor")
    for kind in (KINDS if fusion != "inductor" else ("qwen3",))
    for kv in ("paged", "contiguous")
    for graphs in ("none", "full")
]


def prompts():
    """Around a block, a chunk and a rung of a ladder."""
    rng = np.random.default_rng(3)
    return [rng.integers(3, 290, n).tolist() for n in (1, 16, 17, 33, 100, 170)]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """(kind, device, dtype) -> the path of a tiny checkpoint, and its logits by transformers."""
    paths, models = {}, {}

    def get(kind, device="cuda", dtype=torch.bfloat16):
        if kind not in paths:
            paths[kind] = save_tiny(kind, tmp_path_factory.mktemp("parity") / kind)
        if (kind, device, dtype) not in models:
            model = Transformers(paths[kind], dtype, device)
            models[kind, device, dtype] = cache(lambda ids: model.logits(ids))
        return str(paths[kind]), models[kind, device, dtype]

    return get


def engine(model, **options):
    defaults = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return Engine(model=model, **{**defaults, "kv_cache_bytes": 1 << 24, **options})


def scored(made, reference):
    """Logits of all prompts, teacher-forced in chunks: ours and both of transformers."""
    rows = []
    for ids in prompts():
        ours = made.score(ids, lambda first, logits, targets: logits.clone())
        rows.append((torch.cat(ours), *reference(tuple(ids))))
    return [torch.cat(part) for part in zip(*rows, strict=True)]


def generated(made, reference):
    """Log-probabilities where greedy tokens were chosen, of the 20 likeliest there, best first,
    from prompts and decodes that share steps: ours and both of transformers after the same ids."""
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=NUM_TOP)
    rows = []
    for ids, output in zip(prompts(), made.generate(prompts(), params), strict=True):
        assert output.error is None
        # The id that was chosen is the first, also where another's logit is equal.
        for token, top in zip(output.token_ids, output.top_logprobs, strict=True):
            assert top[token] == max(top.values())
        tops = output.top_logprobs
        both = reference(tuple(ids + output.token_ids[:-1]))
        top_ids = torch.tensor([list(top) for top in tops], device=both[0].device)
        ours = torch.tensor([list(top.values()) for top in tops], device=both[0].device)
        theirs = [x[len(ids) - 1 :].float().log_softmax(-1).gather(1, top_ids) for x in both]
        rows.append((ours, *theirs))
    return [torch.cat(part) for part in zip(*rows, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "kv", "fusion", "graphs"), COMPOSITIONS)
def test_compositions_are_as_near_as_transformers(references, kind, kv, fusion, graphs):
    path, reference = references(kind)
    with engine(path, kv=kv, fusion=fusion, graphs=graphs, **GPU) as made:
        held_to(*scored(made, reference))
        held_to(*generated(made, reference))
        counters = made.counters
    assert (counters.num_graph_steps > 0) == (graphs == "full")


@pytest.mark.gpu
@pytest.mark.parametrize("fusion", ["none", "triton"])
def test_int8_adds_what_it_declares_and_no_more(references, fusion):
    """A lossy cache is not held to the promise, but a composition adds nothing to its own loss: the
    error beside that of the CPU's plain nodes over the same codes."""
    path, reference = references("qwen3")
    with engine(path, kv="paged_int8", fusion=fusion, **GPU) as made:
        ours, reference32, reference16 = scored(made, reference)
    with engine(path, kv="paged_int8", fusion="none", device="cpu", dtype="float32") as made:
        exact = scored(made, reference)[0].to(reference32)
    lossy, noise = (Error.of(x, reference32).rms for x in (exact, reference16))
    assert Error.of(ours, reference32).rms <= lossy + FACTOR * noise


@pytest.mark.gpu
@pytest.mark.parametrize("fusion", ["none", "triton"])
def test_a_context_of_32_000_tokens(tmp_path, fusion):
    """Prefilled in chunks, then decoded: greedy tokens by the rule, and their log-probabilities."""
    path = save_tiny("qwen3", tmp_path / "long", max_position_embeddings=40_960)
    ids = np.random.default_rng(4).integers(3, 290, LONG).tolist()
    options = {"max_model_len": LONG + 64, "max_num_batched_tokens": 4096, "max_num_seqs": 4}
    options |= {"kv_cache_bytes": 1 << 28, "kv": "paged", "fusion": fusion, **GPU}
    params = SamplingParams(max_tokens=NUM_LONG, ignore_eos=True)
    with engine(str(path), **options) as made:
        (output,) = made.generate([ids], params)
        assert output.error is None and made.counters.num_steps >= LONG // 4096 + NUM_LONG
    # The noise of 1,000 places: that of 8 is what it happens to be.
    reference32, reference16 = Transformers(path, device="cuda").logits(
        ids + output.token_ids[:-1], last=1000
    )
    noise = Error.of(reference16, reference32)
    tokens_held_to(torch.tensor(output.token_ids), reference32[-NUM_LONG:], noise)


# ----------------------------------------------------------------------------------------- on a CPU


@pytest.mark.parametrize(
    ("kind", "kv", "fusion"), [("qwen3", "paged", "none"), ("qwen2", "contiguous", "onednn")]
)
def test_a_cpu_in_bfloat16_is_as_near_as_transformers(references, kind, kv, fusion):
    path, reference = references(kind, "cpu")
    given = {"kv": kv, "fusion": fusion, "device": "cpu", "dtype": "bfloat16"}
    with engine(path, **given) as made:
        assert held_to(*scored(made, reference)).rms > 0
        held_to(*generated(made, reference))


def rows(seed=0):
    """float32 logits, half-precision ones and what is as near: [100, 50] each."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(100, 50, generator=generator)
    return exact, *(exact + 0.01 * torch.randn(100, 50, generator=generator) for _ in range(2))


def test_what_is_as_near_is_held_to_it():
    reference32, reference16, ours = rows()
    error = held_to(ours, reference32, reference16)
    assert 0.009 < error.rms < 0.011 and error.rms < error.worst and error.margin > 0


def test_a_larger_error_is_not():
    """Three times as large everywhere, or far off in one place."""
    reference32, reference16, ours = rows()
    with pytest.raises(AssertionError, match="the rms error of the logits is 0.03.* and transfo"):
        held_to(reference32 + 3 * (ours - reference32), reference32, reference16)
    ours[17, 3] = reference32[17, 3] + 0.5
    with pytest.raises(AssertionError, match="the worst error of the logits is 0.5"):
        held_to(ours, reference32, reference16)
    ours[17, 3] = torch.nan
    with pytest.raises(AssertionError, match="not finite"):
        held_to(ours, reference32, reference16)


def test_a_token_may_differ_below_the_noise_only():
    reference32, reference16, _ = rows()
    noise = Error.of(reference16, reference32)
    top = reference32.topk(2)
    margins = top.values[:, 0] - top.values[:, 1]
    best, second = top.indices.unbind(1)
    assert tokens_held_to(best, reference32, noise) == 0
    near = margins <= FACTOR * noise.margin
    assert near.any() and not near.all()
    num_near = int(near.sum())
    assert tokens_held_to(torch.where(near, second, best), reference32, noise) == num_near
    with pytest.raises(AssertionError, match="less likely than the best in float32, where the noi"):
        tokens_held_to(second, reference32, noise)


def test_a_final_norm_that_is_off_breaks_the_promise(references):
    """By a tenth, which changes no greedy token."""
    path, reference = references("qwen3", "cpu")
    ids = tuple(prompts()[4])
    reference32, reference16 = reference(ids)
    with engine(path, device="cpu", dtype="bfloat16", fusion="none") as made:
        made._executor._chain[-1].site.model.final_norm.mul_(1.1)
        ours = torch.cat(made.score(list(ids), lambda first, logits, targets: logits.clone()))
    with pytest.raises(AssertionError, match="error of the logits is"):
        held_to(ours, reference32, reference16)
