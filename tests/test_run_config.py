"""Every field of RunConfig changes what comes out, and every one has a flag that reaches it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from core import Engine, SamplingParams
from core.config import OfferConfig, RunConfig
from core.errors import UserError
from core.run import main
from core.seams import Span
from core.testing.tiny import save_tiny
from plugins.sched.fifo import Fifo

BYTES_PER_TOKEN = 1024  # of random:tiny in float32: keys and values, 2 layers, 2 heads of 32


def prompt(num_tokens, seed=0):
    return np.random.default_rng(seed).integers(3, 290, num_tokens).tolist()


def params_of(max_tokens=8, **given):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **given)


def engine(**options):
    defaults = {"model": "random:tiny", "device": "cpu", "max_model_len": 128, "max_num_seqs": 4}
    return Engine(**{**defaults, **options})


def tokens(given=None, params=None, **options):
    """What one request writes."""
    with engine(**options) as made:
        return made.generate(given or prompt(20), params or params_of())[0].token_ids


def order_of_ends(requests, **options):
    """Names of (name, prompt, max_tokens) in the order in which they end; the first has a step of
    its own before the others come."""
    ended = []
    with engine(**options) as made:
        for name, ids, max_tokens in requests:
            made.add_request(ids, params_of(max_tokens), name)
            if name == requests[0][0]:
                made.step()
        while made.has_unfinished():
            ended += [event.request_id for event in made.step() if event.output]
    return ended


def num_steps(num_prompt, **options):
    """Steps of a prompt and one token."""
    with engine(enable_prefix_caching=False, **options) as made:
        made.generate(prompt(num_prompt), params_of(1))
        return made.counters.num_steps


def num_cached(num_prompt=20, **options):
    """Tokens that the second of two equal requests finds in the cache."""
    with engine(**options) as made:
        first, second = (made.generate(prompt(num_prompt), params_of(2))[0] for _ in range(2))
    assert first.token_ids == second.token_ids and first.metrics.num_cached_tokens == 0
    return second.metrics.num_cached_tokens


def room(**options):
    """Tokens that the KV cache holds."""
    with engine(**options) as made:
        return made.report()["kv_cache_tokens"]


# -------- the outcome of each field


def case_model(tmp_path):
    save_tiny("llama", tmp_path / "llama")
    assert tokens(model=str(tmp_path / "llama")) != tokens(model="random:tiny")
    with pytest.raises(UserError, match="no random weights; did you mean random:tiny"):
        engine(model="random:tini")


def case_kv(tmp_path):
    """Which is there shows in what it can do: share prefixes, and hold more in the same bytes."""
    assert tokens(kv="contiguous") == tokens(kv="paged")
    assert (num_cached(kv="contiguous"), num_cached(kv="paged")) == (0, 16)
    exact, int8 = (room(kv=kv, kv_cache_bytes="4MiB") for kv in ("paged", "paged_int8"))
    assert int8 > 2 * exact


def case_fusion(tmp_path):
    class Silent:
        """An activation that lets nothing through."""

        api, lossless, Config = 1, False, OfferConfig

        def __init__(self, config):
            self.config = config

        def spans(self, facts, device):
            def silent(sites, batch, gate_up):
                return (torch.zeros_like(gate_up.chunk(2, -1)[0]),)

            return [Span("silent", ("act_mul",), silent, lambda *_: True)]

    assert tokens(fusion=Silent) != tokens(fusion="none")


def case_graphs(tmp_path):
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="graphs 'decode' captures CUDA graphs"):
            engine(graphs="decode")
    for graphs in ("none", "decode") if torch.cuda.is_available() else ("none",):
        device = "cpu" if graphs == "none" else "cuda"
        with engine(graphs=graphs, device=device, kv_cache_bytes="16MiB") as made:
            made.generate(prompt(20), params_of())
            assert (made.counters.num_graph_steps, made.counters.num_eager_steps) == (
                (0, 8) if graphs == "none" else (7, 1)
            )


def case_sched(tmp_path):
    requests = [("runs", prompt(5), 3), ("long", prompt(40), 1), ("short", prompt(4), 1)]
    assert order_of_ends(requests, max_num_seqs=1, sched="fifo") == ["runs", "long", "short"]
    assert order_of_ends(requests, max_num_seqs=1, sched="shortest") == ["runs", "short", "long"]


def case_settings(tmp_path):
    assert num_cached(settings={"kv.block_size": 4}) == 16
    assert num_cached(settings={"kv.block_size": 19}) == 19
    assert num_cached(settings={"kv.block_size": 32}) == 0


def case_plugins(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from plugins.sched.fifo import Fifo\n"
        "class Last(Fifo):\n"
        "    def key(self, seq, clock): return -seq.order\n"
        "def outweigh_register_sched(register): register('last_first', Last)\n"
    )
    requests = [("runs", prompt(5), 3), ("second", prompt(4), 1), ("third", prompt(4), 1)]
    ended = order_of_ends(requests, max_num_seqs=1, sched="last_first", plugins=(str(file),))
    assert ended == ["runs", "third", "second"]
    with pytest.raises(UserError, match="last_first"):
        engine(sched="last_first")


def case_device(tmp_path):
    with engine(device="cpu") as made:
        assert made.report()["device_name"] == "cpu"
    num_gpus = torch.cuda.device_count()
    with pytest.raises(UserError, match=f"no device 'cuda:{num_gpus}'.*sees {num_gpus} CUDA dev"):
        engine(device=f"cuda:{num_gpus}")
    if num_gpus:
        before = torch.cuda.memory_allocated()
        with engine(device="cuda", kv_cache_bytes="64MiB") as made:
            assert made.report()["device_name"] == torch.cuda.get_device_name()
            assert torch.cuda.memory_allocated() - before > 60 << 20
            assert len(made.generate(prompt(20), params_of())[0].token_ids) == 8
    else:
        with pytest.raises(
            UserError, match="there is no device 'cuda', torch .* choose one of cpu"
        ):
            engine(device="cuda")


def case_dtype(tmp_path):
    found = {}
    for dtype in ("float32", "bfloat16", "float16"):
        with engine(dtype=dtype, kv_cache_bytes="4MiB") as made:
            made.score(prompt(30), lambda _, logits, __, d=dtype: found.update({d: logits.clone()}))
    exact = found["float32"]
    assert {name: logits.dtype for name, logits in found.items()} == {
        name: getattr(torch, name) for name in found
    }
    off = {name: (logits.float() - exact).abs().max().item() for name, logits in found.items()}
    assert 0 == off["float32"] < off["float16"] < off["bfloat16"] < 0.5
    assert room(dtype="float16", kv_cache_bytes="4MiB") > 1.9 * room(kv_cache_bytes="4MiB")


def case_max_model_len(tmp_path):
    for longest, num_tokens in ((24, 4), (25, 5), (128, 8)):
        assert len(tokens(max_model_len=longest)) == num_tokens
    with pytest.raises(UserError, match="20 tokens and max_model_len is 20"):
        tokens(max_model_len=20)


def case_max_num_seqs(tmp_path):
    for seats in (1, 3):
        with engine(max_num_seqs=seats) as made:
            for i in range(4):
                made.add_request(prompt(5, i), params_of())
            together = 0
            while made.has_unfinished():
                together = max(together, len(made.step()))  # an event of each that got a token
        assert together == seats


def case_max_num_batched_tokens(tmp_path):
    for limit, steps in ((16, 4), (32, 2), (64, 1)):
        assert num_steps(64, max_num_batched_tokens=limit) == steps


def case_chunk_size(tmp_path):
    for chunk_size, steps in ((16, 4), (40, 2), (None, 1)):
        assert num_steps(64, chunk_size=chunk_size) == steps

    class HoldsEverybodyBack(Fifo):
        def chunk(self, seq, budget):
            return 0

    # A chunk is never more than a step holds, not even of whom the core pushes on by itself.
    wide = {"chunk_size": 64, "max_num_batched_tokens": 16, "sched": HoldsEverybodyBack}
    assert tokens(prompt(50), **wide) == tokens(prompt(50))


def case_enable_chunked_prefill(tmp_path):
    few = {"max_num_batched_tokens": 16}
    assert num_steps(17, enable_chunked_prefill=True, **few) == 2
    assert num_steps(16, enable_chunked_prefill=False, **few) == 1
    with pytest.raises(UserError, match="17 tokens, one step holds 16"):
        num_steps(17, enable_chunked_prefill=False, **few)
    for chunked, num_tokens in ((True, 16), (False, 10)):  # of two prompts of 10, in the first step
        with engine(enable_chunked_prefill=chunked, **few) as made:
            for i in range(2):
                made.add_request(prompt(10, i), params_of(1))
            made.step()
            assert made.counters.num_prefill_tokens == num_tokens


def case_max_bypass(tmp_path):
    """The big one waits for room that the first one holds, beside which each small one fits."""
    requests = [("runs", prompt(60), 20), ("big", prompt(100, 9), 1)]
    requests += [(name, prompt(5, i), 9) for i, name in enumerate("abc")]
    for max_bypass in (0, 2):
        ended = order_of_ends(requests, settings={"kv.num_blocks": 8}, max_bypass=max_bypass)
        assert len(set(ended[: ended.index("big")]) - {"runs"}) == max_bypass, ended


def case_preemption(tmp_path):
    found = {}
    for preemption in ("recompute", "swap"):
        with engine(preemption=preemption, settings={"kv.num_blocks": 7}) as made:
            outputs = made.generate([prompt(31, i) for i in range(3)], params_of(30))
            assert made.counters.num_preemptions > 0
            assert (made.counters.num_swapped_bytes > 0) == (preemption == "swap")
            assert (made.counters.num_recomputed_tokens > 0) == (preemption == "recompute")
        found[preemption] = [output.token_ids for output in outputs]
    assert found["recompute"] == found["swap"]


def case_kv_cache_bytes(tmp_path):
    few = {"max_num_batched_tokens": 16}
    small, large = (room(kv_cache_bytes=size, **few) for size in ("64KiB", "128KiB"))
    assert large - small == (64 << 10) // BYTES_PER_TOKEN
    with pytest.raises(UserError, match=r"blocks of 16 and the cache has 2 .*--kv-cache-bytes"):
        tokens(prompt(40), kv_cache_bytes="64KiB", **few)
    assert tokens(prompt(40), kv_cache_bytes="128KiB", **few) == tokens(prompt(40))
    with pytest.raises(UserError, match="hold no sequence of kv 'paged'"):
        engine(kv_cache_bytes="1KiB")


def case_gpu_memory_utilization(tmp_path):
    """It fills a GPU; on a CPU, which has none of it, it is refused and not passed over."""
    with pytest.raises(UserError, match="gpu_memory_utilization is 0.5 and the device is cpu"):
        engine(gpu_memory_utilization=0.5)
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        sizes = []
        for share in (0.3, 0.4):
            with engine(device="cuda", gpu_memory_utilization=share) as made:
                sizes.append(made.config.kv_cache_bytes)
        assert abs(sizes[1] - sizes[0] - 0.1 * total) < 1 << 30


def case_enable_prefix_caching(tmp_path):
    assert (num_cached(enable_prefix_caching=True), num_cached(enable_prefix_caching=None)) == (
        16,
    ) * 2
    assert num_cached(enable_prefix_caching=False) == 0
    with pytest.raises(UserError, match="kv 'contiguous' cannot share prefixes"):
        engine(kv="contiguous", enable_prefix_caching=True)


def case_seed(tmp_path):
    """Of random weights, and of requests that have none of their own."""
    assert tokens(seed=1) == tokens(seed=1) != tokens(seed=2)
    path = str(save_tiny("qwen3", tmp_path / "qwen3"))
    for params, differ in (
        (params_of(), False),
        (params_of(temperature=1.0), True),
        (params_of(temperature=1.0, seed=5), False),
    ):
        one, again, other = (tokens(params=params, model=path, seed=seed) for seed in (1, 1, 2))
        assert one == again and (one != other) == differ


def case_overlap(tmp_path):
    """The same tokens, a step later; and past a stop that only the token tells, one step more."""
    wanted = tokens()
    stop = params_of(stop_token_ids=(wanted[3],))
    for overlap in (False, True):
        with engine(overlap=overlap) as made:
            made.add_request(prompt(20), stop)
            assert [len(event.token_ids) for event in made.step()] == [1] * (not overlap)
            while made.has_unfinished():
                events = made.step()
            assert events[-1].output.token_ids == wanted[: wanted.index(wanted[3]) + 1]
            assert made.counters.num_steps == len(events[-1].output.token_ids) + overlap


@pytest.mark.parametrize("field", RunConfig.model_fields)
def test_every_field_changes_the_outcome(field, tmp_path):
    globals()[f"case_{field}"](tmp_path)


def test_no_case_is_of_a_field_that_is_gone():
    cases = {name.removeprefix("case_") for name in globals() if name.startswith("case_")}
    assert cases == set(RunConfig.model_fields)


# -------- the flag of each field

# Field -> what is written, and what the run is then told: never what it is told without.
FLAGS = {
    "model": ("--model random:qwen3-0.6b", "random:qwen3-0.6b"),
    "kv": ("--kv contiguous", "contiguous"),
    "fusion": ("--fusion mine", "mine"),
    "graphs": ("--graphs mine", "mine"),
    "sched": ("--sched shortest", "shortest"),
    "settings": ("--set kv.block_size=8", {"kv.block_size": 8}),
    "plugins": ("-p PLUGIN", ["PLUGIN"]),
    "device": ("--device cuda", "cuda"),
    "dtype": ("--dtype float16", "float16"),
    "max_model_len": ("--max-model-len 77", 77),
    "max_num_seqs": ("--max-num-seqs 5", 5),
    "max_num_batched_tokens": ("--max-num-batched-tokens 999", 999),
    "chunk_size": ("--chunk-size 7", 7),
    "enable_chunked_prefill": ("--no-enable-chunked-prefill", False),
    "max_bypass": ("--max-bypass 3", 3),
    "preemption": ("--preemption swap", "swap"),
    "kv_cache_bytes": ("--kv-cache-bytes 2MiB", 2 << 20),
    "gpu_memory_utilization": ("--gpu-memory-utilization 0.5", 0.5),
    "enable_prefix_caching": ("--no-enable-prefix-caching", False),
    "seed": ("--seed 11", 11),
    "overlap": ("--no-overlap", False),
}

PLUGIN = """
from plugins.fusion.none import NoFusion
from plugins.graphs.none import NoGraphs
def outweigh_register_fusion(register): register("mine", NoFusion)
def outweigh_register_graphs(register): register("mine", NoGraphs)
"""


@pytest.mark.parametrize("field", RunConfig.model_fields)
def test_every_field_has_a_flag_that_reaches_it(field, tmp_path, capsys, monkeypatch):
    """As `--dry-run` shows the run, on a machine with a GPU, where there is most to choose."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    (tmp_path / "mine.py").write_text(PLUGIN)
    plugin = str(tmp_path / "mine.py")
    asked, wanted = FLAGS[field]
    usual = ["--dry-run", "-o", "json", "--device", "cuda:1"]
    usual += [] if field == "plugins" else ["-p", plugin]
    told = {}
    for more in ([], asked.replace("PLUGIN", plugin).split()):
        assert main(["run", *usual, *more]) == 0, capsys.readouterr().err
        told[bool(more)] = json.loads(capsys.readouterr().out)["config"]
    wanted = [plugin] if field == "plugins" else wanted
    assert told[True][field] == wanted != told[False][field]
    changed = {name for name, value in told[True].items() if value != told[False][name]}
    follows = {"kv": {"enable_prefix_caching"}, "graphs": {"overlap"}}
    assert changed == {field} | follows.get(field, set())


def test_what_was_left_open_is_resolved():
    """But for a chunk, which is what a step has left, and for the share of a GPU on a CPU."""
    with engine() as made:
        left_open = [name for name, value in made.config if value is None]
    assert left_open == ["chunk_size", "gpu_memory_utilization"]
