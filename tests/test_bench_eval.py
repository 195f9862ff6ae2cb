"""evals/speed/bench.py: definitions under a fake clock, work counted step by step, peers, a run."""

from __future__ import annotations

import importlib.machinery
import json
import os
import re
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from core import Engine, SamplingParams
from core.batch import Limits
from core.errors import RunError, UserError
from core.testing.clock import Arrival, StepCost, VirtualEngine
from evals import records
from evals.speed import bench, peers, roofline, vllm_peer, workloads
from evals.speed.bench_arguments import parse
from evals.speed.bench_tables import summary
from evals.speed.driving import Clock, Request
from evals.speed.peers import Call, News, Ours, Peer, Setup
from evals.speed.roofline import Ceilings, Step, floor_s, host_times, steps_of
from evals.speed.steps import decode_floor_ms, prefill_floor_ms
from evals.speed.workloads import arrivals, at_once, percentile
from plugins.sched.fifo import Fifo

ENGINE = "--model random:tiny --device cpu --max-model-len 96 --max-num-seqs 8"
ENGINE += " --max-num-batched-tokens 64 --kv-cache-bytes 16MiB --repetitions 2"
W1, W2 = "--num-requests 6 --tokens 4 12", "--prefill 16 96 --repeats 5"
W3, W4 = "--batch 1 16 --context 20 --steps 4", "--num-arrivals 12 --rate 500"
W4 += " --prompt-median 12 --max-prompt 32 --output-mean 4"
SMALL = f"{ENGINE} {W1} {W2} {W3} {W4}"
TICK = 1e-12  # s that a wait is too long, as on any clock: a sum may round down
COST = StepCost(1e-3, 1e-5, 1e-4)
SETUP = Setup("random:tiny", 320, 96, 8, 64, "float32", "cpu")


def arguments(text=SMALL, **changed):
    args = parse(text.split())
    for name, value in changed.items():
        setattr(args, name, value)
    return args


# -------- what the engines are given


def test_w1_has_the_lengths_of_the_published_benchmark():
    args = parse([])
    wanted = at_once(args, 151_936, 0)
    assert sum(len(r.prompt) for r in wanted) == 142_827
    assert sum(r.num_output for r in wanted) == 133_966


def test_later_repetitions_have_the_same_lengths_and_other_tokens():
    args = arguments()
    for draw in (at_once, lambda *given: arrivals(*given, 96)):
        first, again, second = draw(args, 320, 0), draw(args, 320, 0), draw(args, 320, 1)
        assert first == again
        assert [(len(r.prompt), r.num_output, r.at) for r in first] == [
            (len(r.prompt), r.num_output, r.at) for r in second
        ]
        assert all(a.prompt != b.prompt for a, b in zip(first, second, strict=True))


def test_a_rate_is_a_scale_of_time_and_lengths_fit():
    args = parse([])
    slow, fast = (
        arrivals(arguments("", rate=rate), 320, 0, args.max_model_len) for rate in (16.0, 64.0)
    )
    assert np.allclose([r.at for r in slow], [4 * r.at for r in fast])
    assert [r.prompt for r in slow] == [r.prompt for r in fast]
    assert fast[-1].at == pytest.approx(200 / 64, rel=0.25)
    assert np.median([len(r.prompt) for r in fast]) == pytest.approx(512, rel=0.25)
    assert np.mean([r.num_output for r in fast]) == pytest.approx(128, rel=0.25)
    tight = arrivals(args, 320, 0, 300)
    assert max(len(r.prompt) + r.num_output for r in tight) == 299
    assert min(len(r.prompt) for r in tight) >= 1


def test_a_percentile_needs_a_sample_beyond_it():
    assert percentile([1.0] * 99, 99) is None
    assert percentile([*range(100)], 99) == pytest.approx(98.01)
    assert percentile([1.0], 50) is None and percentile([1.0, 3.0], 50) == 2.0
    assert workloads.fewest_samples(99.9) == 1000


# -------- definitions under a fake clock


class Timed(Peer):
    """Steps of a fixed cost: all prompts that wait at `prefill_s` a token, and one token for every
    other sequence at `decode_s`; the first `num_slow` steps take a second more."""

    name = "timed"

    def __init__(self, setup=SETUP, cost=COST, num_slow=0, eager_end=None):
        super().__init__(setup)
        self.now, self.cost, self.num_slow, self.eager_end = 0.0, cost, num_slow, eager_end
        self.waiting, self.left, self.sections = {}, {}, []

    @property
    def clock(self):
        return Clock(lambda: self.now, self.wait)

    def wait(self, seconds):
        self.now += seconds + TICK

    def add(self, key, prompt, max_tokens):
        assert 0 <= min(prompt) and max(prompt) < self.setup.vocab_size
        self.waiting[key] = len(prompt)
        self.left[key] = min(max_tokens, self.eager_end or max_tokens)

    def pending(self):
        return bool(self.left)

    def step(self):
        num_prompt, self.waiting = sum(self.waiting.values()), {}
        self.now += self.cost.seconds(num_prompt, len(self.left)) + (self.num_slow > 0)
        self.num_slow -= 1
        news = [News(key, 1, n == 1) for key, n in self.left.items()]
        self.left = {key: n - 1 for key, n in self.left.items() if n > 1}
        return news

    def section(self, name):
        self.sections.append(name)


def test_w1_is_all_tokens_over_all_of_the_time():
    args, engine = arguments(num_requests=3, tokens=[5, 5]), Timed()
    result = workloads.run("w1", engine, args, 0, engine.clock)
    seconds = 5 * 1e-3 + 15 * 1e-5 + 15 * 1e-4
    assert result.figures["output_throughput"] == pytest.approx(15 / seconds)
    assert result.figures["total_token_throughput"] == pytest.approx(30 / seconds)
    assert result.figures["request_throughput"] == pytest.approx(3 / seconds)
    assert result.raw["duration"] == pytest.approx(seconds)
    assert engine.sections == ["w1", None]


def test_tokens_that_are_missing_are_no_speed():
    engine = Timed(eager_end=3)
    for name in ("w1", "w4"):
        with pytest.raises(RunError, match=r"timed (wrote|owes)"):
            workloads.run(name, engine, arguments(), 0, engine.clock)


def test_w2_is_from_submission_to_the_first_token_once_warm():
    args = arguments(prefill=[20, 60, 96], repeats=7)
    engine = Timed(num_slow=workloads.WARM_UP_PROMPTS)
    result = workloads.run("w2", engine, args, 0, engine.clock)
    assert result.raw["ttft_ms 20"] == pytest.approx([1.0 + 0.2 + 0.1] * 7)
    assert result.figures["ttft_ms 60 min"] == pytest.approx(1.0 + 0.6 + 0.1)
    assert result.refused.keys() == {"prefill 96"}
    assert engine.sections == ["prefill 20", None, "prefill 60", None]


def test_a_slow_length_ends_early_but_not_at_once():
    args, engine = arguments(prefill=[20], repeats=50, lone_budget_s=1e-6), Timed()
    result = workloads.run("w2", engine, args, 0, engine.clock)
    assert len(result.raw["ttft_ms 20"]) == workloads.FEWEST


def test_w3_times_steps_of_the_full_batch_alone():
    args, engine = arguments(batch=[1, 4, 16], context=30, steps=6), Timed()
    result = workloads.run("w3", engine, args, 0, engine.clock)
    for batch in (1, 4):
        assert result.raw[f"step_ms {batch}"] == pytest.approx([1.0 + 0.1 * batch] * 6)
        assert result.figures[f"tpot_ms {batch} mean"] == pytest.approx(1.0 + 0.1 * batch)
    assert "larger --max-num-seqs than 8" in result.refused["decode 16"]
    args.context = 90
    refused = workloads.run("w3", engine, args, 0, engine.clock).refused
    assert "larger --max-model-len than 96" in refused["decode 1"]


def test_a_batch_that_is_not_full_is_no_figure():
    engine = Timed(eager_end=12)
    refused = workloads.run("w3", engine, arguments(batch=[2], steps=16), 0, engine.clock).refused
    assert "timed does not hold 2 sequences" in refused["decode 2"]
    assert not engine.pending()


class Virtual(Peer):
    """The virtual engine of core.testing.clock, request by request."""

    name = "virtual"

    def __init__(self, setup):
        super().__init__(setup)
        self.engine = virtual()
        self.seqs = {}

    @property
    def clock(self):
        def wait(seconds):
            self.engine.now += seconds + TICK

        return Clock(lambda: self.engine.now, wait)

    def add(self, key, prompt, max_tokens):
        self.engine._enqueue(Arrival(self.engine.now, len(prompt), max_tokens))
        self.seqs[key] = [self.engine.log.sequences[-1], 0]

    def pending(self):
        return bool(self.engine._live)

    def step(self):
        self.engine._step()
        news = []
        for key, (seq, seen) in self.seqs.items():
            if seq in self.engine._live:
                self.engine.slots.sync(seq)
            num = seq.num_output
            if num > seen:
                news.append(News(key, num - seen, seq not in self.engine._live))
                self.seqs[key][1] = num
        return news


def virtual():
    limits = Limits(SETUP.max_model_len, SETUP.max_num_seqs, SETUP.max_num_batched_tokens)
    return VirtualEngine(Fifo(), limits=limits, num_kv_tokens=2048, cost=StepCost(2e-3, 1e-5, 1e-4))


def test_w4_counts_from_the_scheduled_arrival_as_the_virtual_clock_does():
    args, engine = arguments(num_arrivals=100, rate=900.0), Virtual(SETUP)
    result = workloads.run("w4", engine, args, 0, engine.clock)
    wanted = arrivals(args, SETUP.vocab_size, 0, SETUP.max_model_len)
    log = virtual().run([Arrival(r.at, len(r.prompt), r.num_output) for r in wanted])
    assert result.raw["ttft_ms"] == pytest.approx(log.ttft_s() * 1e3)
    assert result.figures["ttft_ms p99"] == pytest.approx(np.percentile(log.ttft_s() * 1e3, 99))
    gaps = [np.diff(s.token_times[s.num_prompt : s.num_known]) * 1e3 for s in log.sequences]
    assert result.figures["itl_ms max"] == pytest.approx(max(g.max() for g in gaps if len(g)))
    assert result.figures["itl_ms p50"] == pytest.approx(np.median(np.concatenate(gaps)))
    assert result.raw["duration"] == pytest.approx(log.end_s)
    assert max(result.raw["ttft_ms"]) > 20, "requests queue"


def test_goodput_is_the_rate_of_those_within_bounds():
    args, engine = arguments(goodput=[("ttft", 1e-3)]), Timed()
    assert workloads.run("w4", engine, args, 0, engine.clock).figures["request_goodput"] == 0
    args.goodput = [("ttft", 1e6)]
    found = workloads.run("w4", engine, args, 0, engine.clock).figures
    assert found["request_goodput"] == found["request_throughput"] > 0


# -------- the work of a step


def engine_of(**fields):
    given = {"kv_cache_bytes": "16MiB", "max_model_len": 96, "max_num_seqs": 4}
    return Engine(
        model="random:tiny",
        device="cpu",
        max_num_batched_tokens=24,
        enable_prefix_caching=False,
        **{**given, **fields},
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_the_work_of_each_step_is_that_of_its_plan(overlap):
    plans, rng = [], np.random.default_rng(0)
    with engine_of(overlap=overlap) as engine:
        plan = engine._schedule.plan
        engine._schedule.plan = lambda: plans.append(plan()) or plans[-1]
        ours = Ours(engine, "random:tiny")
        for num_prompt, num_output in ((5, 6), (40, 3), (30, 9), (7, 1), (11, 4), (60, 5)):
            ours.submit(rng.integers(0, 320, num_prompt).tolist(), num_output)
            ours.step()
        ours.section("rest")
        while ours.pending():
            ours.step()
        steps = steps_of(ours.calls, ours.prompt_lens, ours.depth)
    plans = [one for one in plans if one is not None]
    assert len(steps) == len(plans)
    for step, one in zip(steps, plans, strict=True):
        n, starts, lens = one.num_decodes, one.starts.astype(int), one.query_lens.astype(int)
        assert (step.num_decodes, step.num_prefill) == (n, lens[n:].sum())
        assert step.num_sampled == one.samples.sum()
        assert step.num_pairs == sum(starts * lens + lens * (lens + 1) // 2)
        assert step.num_read == sum(starts[:n] + 1) + sum(starts[n:])
    assert {step.kind for step in steps} == {"prefill", "decode", "mixed"}
    assert {step.section for step in steps} == {None, "rest"}
    assert all(a.end_s <= b.begin_s < b.end_s for a, b in zip(steps, steps[1:], strict=False))


def test_floors_are_those_of_lone_steps():
    with engine_of() as engine:
        facts = engine.facts
    rates = Ceilings(1e9, 1e12)
    decode = Step("s", 0.0, 1.0, 0)
    for _ in range(4):
        decode.decode(100)
    found = floor_s(facts, decode, rates, 1024.0) * 1e3
    assert found == pytest.approx(decode_floor_ms(facts, 4, 100, 1e9, 1024.0))
    prefill = Step("s", 0.0, 1.0, 4000, num_sampled=1)
    prefill.chunk(0, 4000)
    slow = Ceilings(1e15, 1e12)
    found = floor_s(facts, prefill, slow, 1024.0) * 1e3
    assert found == pytest.approx(prefill_floor_ms(facts, 4000, 1e15, 1e12), rel=1e-3)


def test_shares_are_floors_over_times_by_section_and_kind():
    steps = [Step("a", 0.0, 1.0, 0), Step("a", 1.0, 4.0, 5), Step(None, 4.0, 9.0, 5)]
    found = roofline.shares(steps, lambda step: 0.5)
    assert found.keys() == {"a"}
    assert found["a"]["all"]["share_of_roofline"] == pytest.approx(1 / 4)
    assert found["a"]["prefill"]["share_of_roofline"] == pytest.approx(0.5 / 3)
    assert found["a"]["all"]["total_ms"] == 4000
    assert "floor_ms" not in roofline.shares(steps, None)["a"]["all"]


def test_the_hosts_time_is_of_calls_that_launch():
    calls = [
        Call(0.0, 0.002, 1, 5, 0, [], "a"),
        Call(1.0, 1.001, 0, 0, 0, [(1, 1)], "a"),
        Call(2.0, 2.004, 1, 0, 1, [], "a"),
        Call(3.0, 3.5, 1, 0, 1, [], None),
    ]
    found = host_times(calls)
    assert found.keys() == {"a"}
    assert found["a"]["call_ms"]["p50"] == pytest.approx(3.0)
    assert found["a"]["ms_a_step"] == pytest.approx(3.5)


def test_bandwidth_is_measured():
    found = roofline.measured_bandwidth("cpu", 1 << 22, samples=2)
    assert found.keys() == {"read", "copy"} and min(found.values()) > 1e7


# -------- peers


def test_a_peer_is_found_by_name_or_class(tmp_path, monkeypatch):
    source = "from tests_of_bench import Timed as Base\nclass One(Base): pass\nother = 3\n"
    (tmp_path / "a_peer.py").write_text(source)
    monkeypatch.setitem(sys.modules, "tests_of_bench", SimpleNamespace(Timed=Timed))
    monkeypatch.syspath_prepend(tmp_path)
    made = peers.find('a_peer:One:num_slow=3,eager_end="x"')(SETUP)
    assert (made.num_slow, made.eager_end, made.setup) == (3, "x", SETUP)
    assert peers.find("a_peer:One:eager_end=random:tiny")(SETUP).eager_end == "random:tiny"
    for spec, said in {
        "vlm": "there is no peer 'vlm'; did you mean vllm",
        "a_peer:Two": "the peer a_peer:Two cannot be imported",
        "a_peer:other": "a_peer:other is no subclass of evals.speed.peers.Peer",
        "a_peer:One:num_slow=1,x": "the option 'x' of a peer has no value",
    }.items():
        with pytest.raises(UserError, match=said):
            peers.find(spec)
    with pytest.raises(RunError, match="a_peer:One:nope=1 could not be built: TypeError"):
        peers.find("a_peer:One:nope=1")(SETUP)
    sys.modules.pop("a_peer")


def test_vllm_that_is_not_installed_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(vllm_peer.importlib.util, "find_spec", lambda name: None)
    assert bench.main(f"{SMALL} --peer vllm".split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("outweigh: error: vLLM is not installed") and said.count("\n") == 1


class FakeLLM:
    """What of vLLM the adapter touches; a step writes two tokens for each request."""

    built = {}

    def __init__(self, **options):
        self.built.clear()
        self.built.update(options)
        self.llm_engine, self.left = self, {}
        # Somebody refers to these for ever.
        self.built["cache"], self.built["cosines"] = torch.zeros(64), torch.zeros(32)
        self.built["lent"] = torch.frombuffer(bytearray(256), dtype=torch.float32)
        scheduler = SimpleNamespace(async_scheduling=True, max_num_batched_tokens=64)
        compilation = SimpleNamespace(cudagraph_mode="FULL", cudagraph_capture_sizes=[1, 2])
        self.vllm_config = SimpleNamespace(
            scheduler_config=scheduler, compilation_config=compilation
        )
        self.engine_core = SimpleNamespace(shutdown=lambda: self.built.update(is_down=True))

    def add_request(self, request_id, prompt, params):
        assert params.output_kind == "delta" and params.ignore_eos and not params.detokenize
        self.left[request_id] = (len(prompt["prompt_token_ids"]), params.max_tokens)

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        found = []
        for key, (n, left) in list(self.left.items()):
            ids = [0] * min(2, left)
            self.left[key] = (n, left - len(ids))
            if left <= 2:
                del self.left[key]
            out = SimpleNamespace(token_ids=ids)
            found.append(SimpleNamespace(request_id=key, outputs=[out], finished=left <= 2))
        return found

    def generate(self, prompts, params, use_tqdm):
        assert {one.output_kind for one in params} == {"final"} and not use_tqdm
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * one.max_tokens)])
            for one in params
        ]


@pytest.fixture
def vllm(monkeypatch):
    module = ModuleType("vllm")
    module.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    module.LLM, module.__version__ = FakeLLM, "0.0"
    module.SamplingParams = lambda **fields: SimpleNamespace(**fields)
    kinds = SimpleNamespace(DELTA="delta", FINAL_ONLY="final")
    state = SimpleNamespace(cleanup_dist_env_and_memory=lambda: None)
    for name, content in {
        "vllm": module,
        "vllm.sampling_params": SimpleNamespace(RequestOutputKind=kinds),
        "vllm.distributed.parallel_state": state,
    }.items():
        monkeypatch.setitem(sys.modules, name, content)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(vllm_peer, "LARGE_BYTES", 256)


def test_vllm_is_built_like_ours_and_counted_token_by_token(vllm):
    setup = SETUP._replace(kv_cache_bytes=1 << 20)
    engine = peers.find("vllm:max_capture=100,async_scheduling=false")(setup)
    built = FakeLLM.built
    assert built["max_model_len"] == 96 and built["max_num_seqs"] == 8
    assert built["max_num_batched_tokens"] == 64 and built["enable_prefix_caching"] is False
    assert built["kv_cache_memory_bytes"] == 1 << 20 and built["async_scheduling"] is False
    assert built["cudagraph_capture_sizes"][-1] == 100 and "max_capture" not in built
    assert built["load_format"] == "dummy"
    config = json.loads(open(f"{built['model']}/config.json").read())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["vocab_size"] == 320
    key = engine.submit([1, 2, 3], 5)
    assert engine.step() == [News(key, 2, False)]
    assert engine.step() == [News(key, 2, False)] and engine.pending()
    assert engine.step() == [News(key, 1, True)] and not engine.pending()
    assert engine.generate([Request([1], 4), Request([2], 6)]) == 10
    json.dumps(engine.describe())
    ours = torch.zeros(64)
    engine.close()
    assert built["is_down"]
    kept = ours, built["cosines"], built["lent"]
    assert [one.untyped_storage().nbytes() for one in (built["cache"], *kept)] == [0, 256, 128, 256]


def test_a_share_of_memory_that_vllm_does_not_start_with_is_refused():
    peer = vllm_peer.Vllm.__new__(vllm_peer.Vllm)
    setup = SETUP._replace(model="somewhere", gpu_memory_utilization=0.9)
    with pytest.raises(
        UserError, match=r"is 0\.9, and vLLM refuses to start .* give 0\.85 or less"
    ):
        peer._arguments(setup)
    found = [
        peer._arguments(setup._replace(gpu_memory_utilization=share))["gpu_memory_utilization"]
        for share in (None, 0.5)
    ]
    assert found == [0.85, 0.5]
    sized = peer._arguments(setup._replace(kv_cache_bytes="1000"))
    assert sized["kv_cache_memory_bytes"] == 1000 and sized["gpu_memory_utilization"] == 0.05


def test_captured_sizes_end_where_they_are_told_to():
    for most in (1, 64, 100, 4096):
        sizes = vllm_peer.capture_sizes(most)
        assert sizes[-1] == most and sizes == sorted(set(sizes))
    assert all(b - a <= b / 8 for a, b in zip(sizes, sizes[1:], strict=False) if a >= 64)


# -------- a run


class Instant(Timed):
    """A peer for a real clock; `breaks` names a section in which it raises."""

    name = "instant"
    log: list[str] = []

    def __init__(self, setup, breaks=None):
        super().__init__(setup)
        self.breaks = breaks
        self.log.append("+peer")

    def section(self, name):
        if name is not None and name == self.breaks:
            self.breaks = None
            raise ValueError("no more")

    def close(self):
        self.log.append("-peer")


@pytest.fixture
def log(monkeypatch):
    """Who is built and closed, in order."""
    found = Instant.log
    found.clear()
    monkeypatch.setitem(sys.modules, "instant", SimpleNamespace(Instant=Instant))
    monkeypatch.setitem(peers.KNOWN, "instant", "instant:Instant")
    init, close = Ours.__init__, Ours.close
    monkeypatch.setattr(Ours, "__init__", lambda *a: (found.append("+ours"), init(*a))[1])
    monkeypatch.setattr(Ours, "close", lambda self: (found.append("-ours"), close(self))[1])
    return found


@pytest.mark.parametrize("rebuild", ["", "--rebuild"])
def test_a_run_compares_every_workload(tmp_path, capsys, log, rebuild):
    argv = f"{SMALL} --peer instant {rebuild} --bandwidth 0.01 --flops 0.01 --goodput ttft:9"
    assert bench.main(f"{argv} --json {tmp_path}/x.json".split()) == 0
    said = capsys.readouterr().out
    ours, peer = ["+ours", "-ours"], ["+peer", "-peer"]
    together = ["+ours", "+peer", "+ours", "-ours", "-peer", "-ours"]
    assert log == (ours + peer + ours if rebuild else together)
    result = json.loads((tmp_path / "x.json").read_text())
    arms = {"ours", "instant", "ours again"}
    assert result["workloads"].keys() == {"w1", "w2", "w3", "w4"}
    for by_arm in result["workloads"].values():
        assert by_arm.keys() == arms
        assert all(len(one["repetitions"]) == 2 for one in by_arm.values())
        steps = by_arm["ours"]["repetitions"][0]["steps"]
        assert all(0 < one["all"]["share_of_roofline"] < 1 for one in steps.values())
        assert "there is no device part" in by_arm["ours"]["host"]["not_known"]
    rows = {(row["workload"], row["figure"], row["arm"]): row for row in result["rows"]}
    speed = rows["w1", "output_throughput", "instant"]
    assert speed["verdict"] == "faster" and speed["ratio_to_ours"] > 1 and speed["control"] >= 1
    assert rows["w1", "output_throughput", "ours again"]["verdict"] == "control"
    assert rows["w4", "ttft_ms p99", "ours"]["p50"] is None
    assert rows["w4", "ttft_ms p99", "ours"]["samples"] == 12
    assert rows["w2", "ttft_ms 16 p50", "instant"]["samples"] == 5
    assert rows["w4", "itl_ms p50", "ours"]["samples"] > 20
    assert rows["w1", "output_throughput", "ours"]["samples"] is None
    named = {figure.partition(" ")[0] for _, figure, _ in rows}
    assert named <= result["definitions"].keys()
    assert result["engines"]["ours"]["counters"]["num_steps"] > 0
    assert result["engines"]["instant"] == {"name": "instant", "version": ""}
    assert "not measured, instant, decode 16: 16 x " in said
    assert "-: p99 takes 100 samples or more in each repetition" in said
    assert "% of roofline" in said


def test_serve_gives_every_engine_the_same_requests(tmp_path, capsys, log):
    argv = f"{ENGINE} --peer instant --workload serve --input-len uniform:4:9 --output-len 3"
    argv += " --num-prompts 20 --num-warmups 1 --utilisation 0.5 --repetitions 1"
    argv += f" --json {tmp_path}/x.json"
    assert bench.main(argv.split()) == 0
    found = json.loads((tmp_path / "x.json").read_text())
    by_arm = found["workloads"]["serve"]
    raws = {arm: one["repetitions"][0]["raw"] for arm, one in by_arm.items()}
    for name in ("request_rate", "total_input_tokens", "total_output_tokens", "num_prompts"):
        assert len({raw[name] for raw in raws.values()}) == 1, name
    assert raws["ours"]["utilisation"] == pytest.approx(0.5)
    assert raws["instant"]["utilisation"] < 0.05
    rows = {(row["figure"], row["arm"]): row for row in found["rows"]}
    assert rows["median_ttft_ms", "instant"]["verdict"] == "faster"
    assert rows["median_ttft_ms", "ours"]["samples"] == 20
    assert rows["p90_ttft_ms", "ours"]["p50"] is None
    said = capsys.readouterr().out
    assert "p90_ttft_ms, p99_ttft_ms" not in said, "each has its own number of samples"
    assert re.search(r"not measured, ours, p90_ttft_ms, .*: 20 samples do not carry it, 70", said)
    assert found["engines"]["ours"]["config"]["enable_prefix_caching"] is False


def test_another_composition_has_our_plugins_and_not_the_floors_of_our_cache(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from plugins.sched.fifo import Fifo\n\n"
        "class Mine(Fifo):\n    pass\n\n\n"
        "def outweigh_register_sched(register):\n    register('mine', Mine)\n"
    )
    peer, argv = (
        "outweigh:sched=mine,kv=contiguous",
        f"{ENGINE} --repeats 5 --workload w2 --prefill 16",
    )
    argv += f" -p {tmp_path}/mine.py --peer {peer} --bandwidth 1 --flops 1 --repetitions 1"
    assert bench.main(f"{argv} --json {tmp_path}/x.json".split()) == 0
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["left_out"] == {}
    assert found["engines"][peer]["offers"]["sched"]["name"] == "mine"
    steps = {arm: one["repetitions"][0]["steps"] for arm, one in found["workloads"]["w2"].items()}
    has_share = {arm: "share_of_roofline" in of["prefill 16"]["all"] for arm, of in steps.items()}
    assert has_share == {"ours": True, peer: False, "ours again": True}


def test_prefix_caching_is_asked_for_and_then_found(tmp_path, capsys):
    rows = [{"timestamp": 50 * i, "input_length": 40, "output_length": 2, "hash_ids": [0, 1, i + 2]}
            for i in range(12)]  # fmt: skip
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    argv = f"{ENGINE} --workload serve --trace {tmp_path}/m.jsonl --hash-block-size 16 --speed 0.5"
    argv += f" --enable-prefix-caching --num-warmups 0 --repetitions 1 --json {tmp_path}/x.json"
    assert bench.main(f"{argv} --bandwidth 1 --flops 1".split()) == 0
    found = json.loads((tmp_path / "x.json").read_text())
    (one,) = found["workloads"]["serve"]["ours"]["repetitions"]
    assert 0.5 < one["raw"]["prefix_hit_share"] <= 32 / 40
    assert one["raw"]["trace"]["shared_blocks"] == pytest.approx(11 * 2 / 36)
    said = capsys.readouterr().out
    assert "not measured, shares of the roofline: which tokens of a prompt" in said
    assert bench.main(f"{argv} --kv contiguous".split()) == 2
    assert "prefix caching was asked for" in capsys.readouterr().err


def test_a_peer_that_breaks_is_left_out_of_that_workload(tmp_path, capsys, log):
    argv = f"{ENGINE} {W1} {W2} --peer instant:breaks=w1 --rebuild --workload w1 w2"
    argv += f" --json {tmp_path}/x.json"
    assert bench.main(argv.split()) == 0
    said = capsys.readouterr().out
    assert "instant:breaks=w1, w1: instant:breaks=w1 failed: ValueError: no more" in said
    assert "no share of a roofline: give --bandwidth or --measure-bandwidth, and --flops" in said
    found = json.loads((tmp_path / "x.json").read_text())["workloads"]
    assert "instant:breaks=w1" not in found["w1"] and "instant:breaks=w1" in found["w2"]


def test_what_is_measured_is_kept_when_the_run_is_interrupted(tmp_path, monkeypatch, capsys):
    run = workloads.run

    def killed(name, *rest):
        if name == "w2":
            raise KeyboardInterrupt
        return run(name, *rest)

    monkeypatch.setattr(workloads, "run", killed)
    argv = f"{ENGINE} {W1} {W2} --workload w1 w2"
    assert bench.main(f"{argv} --json {tmp_path}/x.json".split()) == 130
    assert f"interrupted; {tmp_path}/x.json has what there is" in capsys.readouterr().err
    assert bench.main(argv.split()) == 130
    assert "interrupted; nothing was written" in capsys.readouterr().err
    assert json.loads((tmp_path / "x.json").read_text())["workloads"].keys() == {"w1"}


def test_a_failure_of_ours_is_an_error_and_the_rest_is_kept(tmp_path, monkeypatch, capsys):
    real = Engine.step
    told = iter([True])

    def step(self):
        if self.counters.num_steps > 20 and next(told, False):
            raise RunError("the device is gone")
        return real(self)

    monkeypatch.setattr(Engine, "step", step)
    written = []
    monkeypatch.setattr(records, "write", lambda path, document: written.append(document))
    assert bench.main(f"{ENGINE} {W1} {W2} --workload w1 w2 --json {tmp_path}/x.json".split()) == 1
    assert "the device is gone" in capsys.readouterr().err
    assert len(written) == 2
    assert "ours" not in written[-1]["workloads"]["w1"]
    assert len(written[-1]["workloads"]["w2"]["ours"]["repetitions"]) == 2


@pytest.mark.parametrize(
    "options",
    ["w2 --prefill 200", "w3 --batch 2 --context 95 --steps 9", "grid --grid-input-lens 200"],
)
def test_where_nothing_could_be_measured_that_is_no_success(options, capsys):
    assert bench.main(f"{ENGINE} --workload {options}".split()) == 1
    assert (
        "nothing was measured: what was refused, and why, stands above" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--workload w1 --tokens 8 4", "--tokens goes from 8 to 4: give the fewer first"),
        ("--workload w2 --prefill 16 16", "--prefill names a size twice"),
        ("--workload grid --grid-concurrency 2 2", "--grid-concurrency names a size twice"),
        ("--workload serve --request-rate 5 --burstiness 1e-5", "leaves no time between requests"),
        ("--workload w4 --max-prompt 80", "w4 has prompts of up to 80 tokens and outputs of up to"),
        ("--workload w4 --output-mean 40", "lower --max-prompt or --output-mean, or raise"),
        ("--workload w2 --peer outweigh:", "the peer outweigh: has an option without a value"),
        ("--workload w2 --peer outweigh:foo", "write outweigh:KEY=VALUE"),
        ("--workload w2 --peer outweigh:kv=nope", "there is no kv called 'nope'"),
        ("--workload w2 --peer outweigh:foo=1", "foo"),
        ("--workload w2 --peer outweigh:kv=paged,kv=contiguous", "has an option twice"),
        ("--workload w1 --json /dev/null", "/dev/null cannot be written, it is no file"),
    ],
)
def test_what_would_fail_later_or_mislead_is_refused_at_once(options, says, capsys):
    assert bench.main(f"{ENGINE} {options}".split()) == 2
    said = capsys.readouterr()
    assert says in said.err and len(said.err.splitlines()) == 1 and not said.out


def test_w4_draws_no_longer_prompts_than_fit():
    assert parse(["--max-model-len", "16640"]).max_prompt == 8192
    args = parse("--max-model-len 96 --output-mean 4".split())
    assert args.max_prompt == 96 - 1 - 8 * 4
    drawn = workloads.arrivals(args, 320, 0, 96)
    assert max(len(r.prompt) + r.num_output for r in drawn) < 96


def test_a_record_that_is_linked_to_is_written_and_stays_one_file(tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    records.write(link, {"n": 1})
    assert link.is_symlink() and json.loads(real.read_text()) == {"n": 1}
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="it is no file: name another"):
        records.write(tmp_path / "pipe", {})
    assert {p.name for p in tmp_path.iterdir()} == {"real.json", "link.json", "pipe"}
    with pytest.raises(UserError, match=r"--out and --json are both .*: name two files"):
        records.check_apart(**{"--out": real, "--json": link})


def test_several_engines_need_a_size_each(capsys):
    assert bench.main("--model random:tiny --peer vllm".split()) == 2
    assert "3 engines live at once: give --kv-cache-bytes, or --rebuild" in capsys.readouterr().err


def test_a_cache_that_hides_its_bytes_has_no_share_of_the_roofline(capsys):
    argv = f"{ENGINE} {W2} --workload w2 --bandwidth 1 --flops 1 --set kv.num_blocks=40"
    assert bench.main(argv.split()) == 0
    assert "not measured, shares of the roofline: kv 'paged' has room" in capsys.readouterr().out


def test_a_ratio_is_of_figures_that_are_there():
    rows = summary("w4", "ttft_ms p99", {"ours": [None, 1.0], "peer": [2.0, 4.0]})
    assert [(row["p50"], row["ratio_to_ours"]) for row in rows] == [(None, None), (3.0, None)]
    rows = summary("w4", "itl_ms p50", {"ours": [2.0, 2.0], "peer": [0.0, 1.0], "x": [4.0, 4.0]})
    assert [row["ratio_to_ours"] for row in rows] == [1.0, None, 2.0]
    assert rows[2]["verdict"] == "no control"


def test_requests_are_sampled_at_the_declared_temperature():
    with engine_of() as engine:
        ours, seen = Ours(engine, "random:tiny"), []
        add = engine.add_request
        engine.add_request = lambda ids, params, *rest, **more: (
            seen.append(params) or add(ids, params)
        )
        ours.submit([1, 2], 3)
    assert seen == [SamplingParams(max_tokens=3, temperature=0.6, ignore_eos=True)]


@pytest.mark.gpu
def test_on_cuda_the_hosts_time_is_known(tmp_path):
    argv = f"{SMALL} --measure-bandwidth --json {tmp_path}/x.json".replace("cpu", "cuda")
    assert bench.main(argv.split()) == 0
    result = json.loads((tmp_path / "x.json").read_text())
    for by_arm in result["workloads"].values():
        for one in by_arm["ours"]["host"].values():
            assert 0 < one["ms_a_step"] < 100
    assert result["bandwidth"]["measured"]["read"] > 1e11
