"""evals/speed/doctor.py: each fault is planted in a run, and nothing is found in clean ones."""

from __future__ import annotations

import copy
import io
import json
from contextlib import closing

import numpy as np
import pytest

from core import Engine, SamplingParams
from core.batch import Limits
from core.errors import UserError
from core.testing.clock import Arrival, VirtualEngine
from evals.speed import ablate, bench, doctor
from evals.speed.doctor import examined, main, runs_of
from evals.speed.ladder.progress import Bar
from evals.speed.symptoms import teeth
from plugins.sched.fifo import Fifo


def served(*, num=12, prompt=60, output=30, **fields):
    """The report of a run of a tiny model on the CPU: `num` requests at once."""
    common = {"model": "random:tiny", "device": "cpu", "max_model_len": 128, "max_num_seqs": 6,
              "max_num_batched_tokens": 256, "enable_prefix_caching": False}  # fmt: skip
    rng = np.random.default_rng(0)
    with Engine(**{**common, **fields}) as engine:
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        prompts = rng.integers(3, 200, (num, prompt)).tolist()
        assert not [o.error for o in engine.generate(prompts, params) if o.error]
        return json.loads(json.dumps(engine.report()))


def paged(blocks, size=8, **fields):
    return served(settings={"kv.block_size": size, "kv.num_blocks": blocks}, **fields)


@pytest.fixture(scope="module")
def clean():
    """Six sequences of up to 90 tokens, and room for them."""
    return paged(80)


def replayed(**options):
    """The report of a virtual run in which long prompts come while others decode."""
    limits = Limits(max_model_len=8192, max_num_seqs=16, max_num_batched_tokens=4096)
    engine = VirtualEngine(Fifo(), limits=limits, num_kv_tokens=40_000, **options)
    short = [Arrival(0.01 * i, 20, 60) for i in range(6)]
    log = engine.run([*short, *(Arrival(0.2 * i, 4000, 2) for i in range(1, 4))])
    gaps = [np.diff(s.token_times[s.num_prompt : s.num_known]) * 1e3 for s in log.sequences]
    return {"results": [{"metrics": {"itl_ms": g.tolist()}} for g in gaps]}


def on_cuda(report, *, graphs="full", counters=(), limits=(), **settings):
    """A report as an engine on CUDA gives it."""
    made = copy.deepcopy(report)
    made["config"] |= {"device": "cuda", "graphs": graphs, "overlap": True, "chunk_size": None}
    made["offers"]["graphs"] = {"name": graphs, "settings": settings}
    made["counters"] |= dict(counters)
    made["limits"] |= dict(limits)
    return made


def found_in(document, folder):
    return [(f.symptom, f.attempt) for f in examined(runs_of(document, folder))[0]]


def host_bound(clean, share, **fields):
    """A bench result of an engine on CUDA whose host takes a share of each step."""
    report = on_cuda(clean, **fields)
    steps = {"all": {"step_ms": {"mean": 2.0}}}
    run = {"raw": {}, "steps": {"decode 8": steps}}
    ours = {"repetitions": [run], "host": {"decode 8": {"ms_a_step": 2.0 * share}}}
    return {"engines": {"ours": report}, "workloads": {"w3": {"ours": ours}}}


WHOLE = {"num_steps": 100, "num_graph_steps": 100, "num_eager_steps": 0}
HALF = {"num_steps": 100, "num_graph_steps": 60, "num_eager_steps": 40}
PLANTED = {
    "whole rows for short sequences": (
        lambda _: served(kv="contiguous", prompt=20, output=8, kv_cache_bytes=1 << 20),
        ("fragmentation", "--kv paged"),
    ),
    "waves": (
        lambda _: paged(74, num=24, prompt=20, output=70),
        ("saw-tooth occupancy", "more --kv-cache-bytes, or --max-bypass 8"),
    ),
    "blocks of 64 for 30 tokens": (
        lambda _: paged(7, 64, prompt=24, output=8),
        ("block size", "--set kv.block_size=8"),
    ),
    "half the room, recompute": (
        lambda _: paged(40),
        (
            "recompute storm",
            "more --kv-cache-bytes, --max-num-seqs 4, or --preemption swap",
        ),
    ),
    "half the room, swap": (
        lambda _: paged(None, preemption="swap", kv_cache_bytes=470_000),
        ("swap storm", "more --kv-cache-bytes, --max-num-seqs 4, or --preemption recompute"),
    ),
    "prompts in one piece": (
        lambda clean: clean | replayed(),
        ("scheduling jitter", "--sched aging, or a smaller --chunk-size"),
    ),
    "prompts in one piece, a large budget": (
        lambda clean: (
            on_cuda(clean, graphs="none", counters=WHOLE)
            | {"config": {**clean["config"], "max_num_batched_tokens": 4096}}
            | replayed()
        ),
        ("scheduling jitter", "--chunk-size 512"),
    ),
    "unchunked": (
        lambda clean: (
            clean
            | {"config": {**clean["config"], "enable_chunked_prefill": False}}
            | replayed(chunked=False)
        ),
        ("scheduling jitter", "--enable-chunked-prefill"),
    ),
    "launches from the host": (
        lambda clean: host_bound(clean, 0.8, graphs="decode", counters=WHOLE),
        ("host-bound steps", "--graphs full"),
    ),
    "a host that is too slow": (
        lambda clean: host_bound(clean, 0.8, counters=WHOLE),
        ("host-bound steps", "--fusion triton, or more --max-num-seqs"),
    ),
    "prefill is not captured": (
        lambda clean: on_cuda(clean, graphs="decode", counters=HALF),
        ("uncaptured shapes", "--graphs full"),
    ),
    "long steps are not captured": (
        lambda clean: on_cuda(clean, counters=HALF, max_tokens=64),
        ("uncaptured shapes", "--set graphs.max_tokens=256"),
    ),
    "mixed steps are not captured": (
        lambda clean: on_cuda(clean, counters=HALF, mixed=False),
        ("uncaptured shapes", "--set graphs.mixed=true"),
    ),
    "rungs far apart": (
        lambda clean: on_cuda(clean, counters=WHOLE, limits={"max_num_seqs": 256}, fine=64),
        ("ladder gaps", "--set graphs.fine=8"),
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_each_planted_fault_is_found_and_no_other(clean, tmp_path, fault):
    make, expected = PLANTED[fault]
    assert found_in(make(clean), tmp_path) == [expected]


CLEAN = {
    "enough room": lambda clean: clean,
    "rows that are full": lambda _: served(kv="contiguous", prompt=100, output=26),
    "swap without need": lambda _: paged(80, preemption="swap"),
    "blocks of 16, room to spare": lambda _: paged(80, 16),
    "chunked": lambda clean: clean | replayed(chunk_size=256),
    "all captured": lambda clean: on_cuda(clean, counters=WHOLE, limits={"max_num_seqs": 256}),
    "decode captured": lambda clean: on_cuda(clean, graphs="decode", counters=WHOLE),
    "a fast host": lambda clean: host_bound(clean, 0.2, counters=WHOLE),
}


@pytest.mark.parametrize("run", CLEAN)
def test_nothing_is_found_in_a_clean_run(clean, tmp_path, run):
    assert found_in(CLEAN[run](clean), tmp_path) == []


def test_a_ladder_that_stops_below_the_largest_batch(clean, tmp_path):
    (tmp_path / "short_ladder.py").write_text(
        "from plugins.graphs.decode import DecodeGraphs\n\n\n"
        "class Short(DecodeGraphs):\n    '''Stops at 16.'''\n\n"
        "    def select(self, num_tokens, num_seqs, max_query, max_kv, start):\n"
        "        shape = super().select(num_tokens, num_seqs, max_query, max_kv, start)\n"
        "        return shape if num_seqs <= 16 else None\n\n\n"
        "def outweigh_register_graphs(register):\n    register('short', Short)\n"
    )
    made = on_cuda(clean, graphs="short", counters=WHOLE, limits={"max_num_seqs": 20})
    made["config"]["plugins"] = [str(tmp_path / "short_ladder.py")]
    (finding,), _ = examined(runs_of(made, tmp_path))
    assert finding.evidence == (
        "no graph holds 4 of 20 sizes of a decode step, 17 sequences to begin with"
    )
    assert finding.attempt == "--max-num-seqs 16"
    made["config"]["plugins"] = []
    findings, unknown = examined(runs_of(made, tmp_path))
    assert not findings and "there is no graphs called 'short'" in unknown["ladder gaps"][0]


def test_the_evidence_has_the_numbers(clean, tmp_path):
    made = on_cuda(clean, graphs="decode", counters=HALF)
    (finding,), unknown = examined(runs_of(made, tmp_path))
    assert finding.evidence == "40 of 100 steps ran eagerly under graphs=decode"
    assert set(unknown) == {"scheduling jitter", "host-bound steps"}


def test_teeth():
    assert teeth([0, 9, 0, 9, 0, 9, 0]) == 3
    assert teeth([0, 3, 6, 9, 9, 8, 9, 8, 7, 9]) == 0
    assert teeth([9, 9, 9]) == teeth([0, 0]) == 0


# -------- what other commands write


def test_a_ladder_is_read_with_its_runs_and_without(tmp_path, capsys):
    """One of which the first phase is through, as after Ctrl-C."""
    sizes = "--model random:tiny --device cpu --max-model-len 64 --max-num-seqs 4 --rounds 4"
    sizes += " --max-num-batched-tokens 64 --num-requests 5 --num-lone 1 --prompt-median 12"
    sizes += " --max-prompt 40 --output-mean 3 --prefix-tokens 4 --num-prefixes 2 --chunk 16"
    sizes += " --bandwidth 0.03 --flops 0.1 --load 0.5 --rungs paged --no-pressure"
    study = ablate.Ablation(ablate.parse([*sizes.split(), "--out", str(tmp_path)]))
    with Bar(io.StringIO()) as bar, closing(study.run(bar)) as phases:
        result = tmp_path / "result.json"
        result.write_text(json.dumps(next(phases), default=str))
    assert main([str(result), "--json", str(result)]) == 2
    assert main([str(result), "--json", str(tmp_path / "found.json")]) == 1
    assert "not known, host-bound steps: " in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert ("fragmentation", "capacity, baseline") in [
        (f["symptom"], f["where"]) for f in found["findings"]
    ]
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert main([str(result)]) == 0
    assert "not known, fragmentation: occupancy was not recorded" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        '{"counters": 3, "config": {}}',
        '{"counters": {}, "config": []}',
        '{"counters": {}, "config": {}, "kv_use": {"over_time": [1]}}',
        '{"workloads": [], "engines": {"ours": {"counters": {}, "config": {}}}}',
    ],
)
def test_a_result_that_somebody_has_changed_is_one_sentence(tmp_path, capsys, text):
    file = tmp_path / "x.json"
    file.write_text(text)
    assert main([str(file)]) == 2
    error = capsys.readouterr().err
    assert "not as it was written" in error and error.count("\n") == 1


def test_where_the_ttft_of_a_lone_prompt_goes(clean, tmp_path):
    parts = {"host": 3.0, "launch gaps": 4.0}
    split = {"top": {"ttft_ms": 10.0, "parts": parts}, "odd": {"not_known": "it failed"}}
    found = {"blocks": {}, "split": split, "engines": {"top": on_cuda(clean, graphs="none")}}
    (finding,), _ = examined(runs_of(found, tmp_path))
    assert finding.where == "a lone prompt, top" and finding.attempt == "--graphs full"
    assert finding.evidence == "host and launch gaps take 7 ms of a TTFT of 10 ms, 70%"
    _, unknown = examined(runs_of({**found, "engines": {"top": clean}}, tmp_path))
    assert "there is no device part" in unknown["host-bound steps"][0]


def test_what_is_seen_alike_is_said_once(clean, tmp_path):
    split = {n: {"ttft_ms": 10.0, "parts": {"host": 3.0, "launch gaps": 4.0}} for n in "abc"}
    engines = dict.fromkeys("abc", on_cuda(clean))
    document = {"blocks": {}, "split": split, "engines": engines}
    (finding,), _ = examined(runs_of(document, tmp_path))
    assert finding.where == "a lone prompt, a, and 2 more"


def test_a_bench_is_read(tmp_path, capsys):
    sizes = "--model random:tiny --device cpu --max-model-len 96 --max-num-seqs 8"
    sizes += " --max-num-batched-tokens 64 --kv-cache-bytes 16MiB --workload w1 w3"
    sizes += " --num-requests 6 --tokens 4 12 --batch 4 --context 20 --steps 4 --repetitions 1"
    file = tmp_path / "bench.json"
    assert bench.main([*sizes.split(), "--json", str(file)]) == 0
    capsys.readouterr()
    assert [seen.where for seen in doctor.read(file)] == [
        "ours",
        "ours, w1, w1",
        "ours, w3, decode 4",
    ]
    assert main([str(file)]) == 0
    assert "0 findings in 3 runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "cannot be read"), ("{", "cannot be read"), ("[]", "no result of"), ("{}", "report")],
)
def test_what_is_no_result_is_refused(tmp_path, capsys, text, said):
    file = tmp_path / "x.json"
    if text is not None:
        file.write_text(text)
    assert main([str(file)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    with pytest.raises(UserError, match=said):
        doctor.read(file)
