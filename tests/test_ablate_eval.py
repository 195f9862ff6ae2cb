"""evals/speed/ablate.py on a CPU: a short ladder, killed, resumed, interrupted, its documents."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from core.errors import UserError
from evals.speed import ablate, results
from evals.speed.ablate import Ablation, main, parse
from evals.speed.ladder import charts, lossy, markdown, report, study
from evals.speed.ladder.loads import Load
from evals.speed.ladder.progress import Bar
from evals.speed.ladder.runner import Engines
from evals.speed.ladder.split import part_of
from evals.speed.ladder.study import Store

ROOT = Path(__file__).parents[1]
SIZES = "--device cpu --max-model-len 64 --max-num-seqs 4 --max-num-batched-tokens 64"
SIZES += " --num-requests 5 --num-lone 2 --prompt-median 12 --max-prompt 40 --output-mean 3"
SIZES += " --prefix-tokens 4 --num-prefixes 2 --chunk 16 --lone-prompts 8 30"
SIZES += " --bandwidth 0.03 --flops 0.1"
SHORT = f"--model random:tiny {SIZES} --rounds 4"
# A fifth of the capacity: on a busy machine an arm may seem several times as slow as it is.
FEW = f"{SHORT} --load 0.2 --rungs paged --leave-one-out 0 --no-pressure"


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def ladder(tmp_path_factory):
    """From the bottom to the top."""
    out = tmp_path_factory.mktemp("ablation")
    rungs = "--rungs paged fusion=* graphs=full swap paged_int8 --load 0.2 --leave-one-out 1"
    assert main([*f"{SHORT} {rungs}".split(), "--out", str(out)]) == 0
    return out


def test_the_embedded_model_is_what_is_measured_on_a_cpu(tmp_path):
    few = "--rounds 4 --load 0.2 --rungs fusion=* --leave-one-out 0 --no-pressure"
    few += " --num-requests 3 --num-lone 1"
    assert main([*SIZES.split(), *few.split(), "--out", str(tmp_path)]) == 0
    found = result_of(tmp_path)
    assert found["complete"] and found["common"]["model"] == "tiny"
    assert found["blocks"]["load-0.2"]["figures"]["ttft_ms p50"]["steps"].keys() == {
        "fusion=onednn"
    }


def test_a_short_ladder(ladder):
    found = result_of(ladder)
    assert found["complete"] and found["seconds"] > 0
    assert found["left_out"]["graphs=full"] == "needs cuda, and the device is cpu"
    names = [arm["name"] for arm in found["ladder"]]
    assert names == ["baseline", "paged", "fusion=onednn", "swap", "paged_int8"]
    assert set(found["blocks"]) == {
        "capacity", "load-0.2", "lone", "pressure--swap", "burst--swap", "scarce--swap",
        "leave-one-out",
    }  # fmt: skip
    assert set(found["engines"]) >= set(names)
    for name in names:
        arm = found["blocks"]["load-0.2"]["arms"][name]
        assert arm["num_runs"] == 4 and arm["figures"]["ttft_ms p50"] > 0
        assert 0 < arm["share_of_roofline"] and 0 < arm["busy"] <= 1
        assert arm["peak_held_bytes"] > 0
    assert found["question"].startswith("repeatability: one trace (seed 0) 4 times")


def test_the_steps_of_a_ladder_have_intervals_and_verdicts(ladder):
    found = result_of(ladder)["blocks"]
    step = found["load-0.2"]["figures"]["ttft_ms p50"]["steps"]["paged"]
    assert step["low"] < step["ratio"] < step["high"] and step["num_units"] == 4
    assert step["verdict"] in ("faster", "slower", "no change", "inconclusive")
    refused = found["load-0.2"]["figures"]["ttft_ms p99"]["refused"]
    assert refused["paged"] == "its runs have too few requests for ttft_ms p99"
    scarce, burst = (
        found[f"{kind}--swap"]["arms"]["fusion=onednn"] for kind in ("scarce", "burst")
    )
    assert scarce["room_tokens"] < burst["room_tokens"]


def test_what_a_lossy_rung_does_to_the_text(ladder):
    found = result_of(ladder)["quality"]["paged_int8"]
    assert found["below"] == "swap" and found["num_documents"] == 8
    assert 0 < found["mean_kl"] < 1e-2 and found["verdict"] == "not shown"
    finite, *others = found["findings"]
    assert finite["metric"] == "not_finite" and finite["verdict"] == "pass"
    assert {one["why"] for one in others} == {lossy.RANDOM}
    assert f"- not shown: {lossy.RANDOM}" in (ladder / "result.md").read_text()


def test_where_the_ttft_of_a_lone_prompt_goes(ladder):
    for one in result_of(ladder)["split"].values():
        parts = one["parts"]
        assert parts["attention"] > 0 and parts["FFN"] > 0 and parts["KV write"] > 0
        assert parts["launch gaps"] == 0  # there is no device to launch to
        assert one["ttft_ms"] <= sum(parts.values()) + 1e-6
        assert 0 < one["lengths"]["8"] and 0 < one["lengths"]["30"]


def test_spans_count_as_what_most_of_them_is():
    assert part_of(("qk_norm", "rope", "kv_write")) == "KV write"
    assert part_of(("mlp_norm", "gate_up", "act_mul")) == "FFN"
    assert part_of(("qkv_proj",)) == "other nodes"


def test_the_page_loads_nothing(ladder):
    page = (ladder / "report.html").read_text()
    assert page.count("<svg") == 4 and page.count("</svg>") == 4
    assert not re.search(r"https?:|\bsrc\s*=|<script|<link|<iframe|@import|url\((?!#)", page)
    assert not re.search(r'href="(?!#)', page)
    for word in (
        "at 0.2 of the baseline", "TTFT from the bottom to the top", "KV occupancy over time",
        "Where the TTFT goes", "fusion=onednn", "needs cuda", "kv_cache_bytes",
        "Configuration and environment", "torch",
    ):  # fmt: skip
        assert word in page, word


def test_a_study_is_kept_small_and_whole(ladder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert results.main([str(ladder), "mine"]) == 0 and results.names() == ["mine"]
    kept, whole = results.result("mine"), result_of(ladder)
    assert set(whole) - set(kept) == {"charts", "engines"}
    assert str(ladder) not in (tmp_path / "mine" / "result.json").read_text()
    capacity, load, left_out = results.tables("mine")
    assert left_out.startswith("| rung | TTFT p50, top over top without it |")
    arm = whole["blocks"]["load-0.2"]["arms"]["paged"]["figures"]["ttft_ms p50"]
    assert (
        f"| paged | baseline | {arm:,.4g} |" in load and "| the whole ladder | baseline |" in load
    )
    assert "| swap | `preemption=swap` |" in capacity
    capsys.readouterr()
    (tmp_path / "half").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "result.json").write_text('{"complete": true}')
    (tmp_path / "half" / "result.json").write_text(json.dumps({**whole, "complete": False}))
    for folder, name, said in (
        (tmp_path / "nowhere", "a", "result.json is not there: give the --out of an ablation"),
        (tmp_path / "half", "a", "not complete: finish it with --resume"),
        (tmp_path / "other", "a", "is of no ablation"),
        (ladder, "a/b", "'a/b' is no name of a folder"),
        (ladder, ".a", "'.a' is no name of a folder"),
        (ladder, "mine", "mine is kept already: give another name, or remove it first"),
    ):
        assert results.main([str(folder), name]) == 2
        assert said in capsys.readouterr().err
    assert results.names() == ["half", "mine", "other"]


def test_a_study_is_kept_with_the_whole_of_its_command():
    whole = (
        "python -m a --load 0.5 --out 'my ladder' --rungs paged 'fusion=*' --resume --out=b -p x"
    )
    kept = results.small({"command": whole})["command"]
    assert kept == "python -m a --load 0.5 --rungs paged 'fusion=*' -p x"


def test_what_is_kept_says_in_markdown_what_it_says_in_json():
    assert results.names()
    for name in results.names():
        path = results.RESULTS / name
        assert (path / "result.md").read_text() == markdown.text(results.result(name))
        assert sum(file.stat().st_size for file in path.iterdir()) < 1 << 18


def test_the_markdown_has_every_section(ladder):
    text = (ladder / "result.md").read_text()
    assert text.startswith("# Ablation of random:tiny on cpu\n")
    for title in (
        "The ladder", "Capacity (closed loop)", "At 0.2 of the baseline's capacity",
        "One request at a time", "In a burst", "Left out of the whole ladder",
        "What lossy rungs do to the text", "Where the TTFT of a lone prompt goes",
    ):  # fmt: skip
        assert f"## {title}" in text
    assert "- not available, `graphs=full`: needs cuda" in text


def test_nothing_is_left_half_written(ladder):
    assert not list(ladder.rglob("*.partial"))
    assert {path.name for path in ladder.iterdir()} == {
        "result.json", "result.md", "report.html", "runs",
    }  # fmt: skip


def test_a_dry_run_says_what_it_would_do_and_does_nothing(tmp_path, capsys):
    out = tmp_path / "never"
    assert main([*SHORT.split(), "--dry-run", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert not out.exists()
    assert "| chunk=16 | chunked | `chunk_size=16`" in said
    assert "- not available, `graphs=full`: needs cuda" in said
    assert "| capacity | closed | 11 | 44 |" in said
    assert re.search(r"^[\d,]+ runs, about \d+\.\d minutes or less; repeatability", said, re.M)


def test_a_killed_run_is_resumed(tmp_path):
    """By a signal that nothing can catch, in the middle of the ladder."""
    argv = [*FEW.split(), "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "evals.speed.ablate", *argv], cwd=tmp_path, env=environment
    )
    runs, deadline = tmp_path / "runs", time.monotonic() + 120
    while len(list(runs.glob("*--*.json"))) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {path.name: path.stat().st_mtime_ns for path in runs.glob("*--*.json")}
    assert main(argv) == 2  # it does not overwrite
    assert main([*argv, "--resume"]) == 0
    after = {path.name: path.stat().st_mtime_ns for path in runs.glob("*--*.json")}
    assert {name: after[name] for name in before} == before
    assert len(after) == 4 * 3 * 3
    found = result_of(tmp_path)
    assert found["complete"] and {"baseline", "paged"} <= set(found["engines"])
    other = [*argv, "--resume", "--seed", "5"]
    assert main(other) == 2


def test_ctrl_c_writes_what_there_is(tmp_path, monkeypatch, capsys):
    measure, num = Engines.measure, 0

    def interrupted(self, *args, **fields):
        nonlocal num
        num += 1
        if num == 16:
            raise KeyboardInterrupt
        return measure(self, *args, **fields)

    monkeypatch.setattr(Engines, "measure", interrupted)
    argv = [*FEW.split(), "--out", str(tmp_path)]
    assert main(argv) == 130
    assert "--resume goes on" in capsys.readouterr().err
    found = result_of(tmp_path)
    assert not found["complete"] and set(found["blocks"]) == {"capacity", "load-0.2"}
    assert sum(arm["num_runs"] for arm in found["blocks"]["load-0.2"]["arms"].values()) == 3
    assert "Not complete" in (tmp_path / "report.html").read_text()
    monkeypatch.undo()
    before_s = found["seconds"] + 1000  # as if it had taken long
    (tmp_path / "result.json").write_text(json.dumps({**found, "seconds": before_s}))
    assert main([*argv, "--resume"]) == 0
    found = result_of(tmp_path)
    assert found["complete"] and found["seconds"] > before_s


def test_an_arm_may_be_what_a_plugin_brings(tmp_path, capsys):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from core import hookimpl\nfrom plugins.sched.fifo import Fifo\n\n\n"
        "class Newest(Fifo):\n    def key(self, seq, clock):\n        return -seq.order\n\n\n"
        "@hookimpl\ndef outweigh_register_sched(register):\n    register('newest', Newest)\n"
    )
    argv = [*SHORT.split(), "-p", str(plugin), "--arm", "n=sched=newest", "--dry-run"]
    assert main(argv) == 0
    assert "| n | baseline | `sched=newest` |" in capsys.readouterr().out


def test_an_arm_of_ones_own_and_the_ends(tmp_path):
    own = f"{SHORT} --load 0.2 --no-pressure --base kv=paged"
    own += " --arm wide=kv.block_size=32 --arm eight=kv=paged_int8 --ends --question generality"
    own += " --rebuild"
    assert main([*own.split(), "--out", str(tmp_path)]) == 0
    found = result_of(tmp_path)
    assert [arm["name"] for arm in found["ladder"]] == ["baseline", "wide", "eight"]
    assert list(found["blocks"]["load-0.2"]["arms"]) == ["baseline", "baseline again", "eight"]
    assert "whole ladder" in found["blocks"]["load-0.2"]["figures"]["ttft_ms p50"]["steps"]
    assert found["question"].startswith("generality: 4 traces (seeds 0 to 3)")
    assert found["quality"]["eight"]["below"] == "wide"


def test_engines_share_weights_where_they_are_the_same_and_warm_up_once(tmp_path, monkeypatch):
    ablation = Ablation(
        parse([*FEW.split(), "--arm", "half=dtype=float16", "--out", str(tmp_path)])
    )
    base, paged, half = ablation.ladder.arms
    served, serve = [], Engines._serve
    monkeypatch.setattr(
        Engines, "_serve",
        lambda self, engine, load, seed, label: (
            served.append((load.kind, label)), serve(self, engine, load, seed, label)
        )[1],
    )  # fmt: skip
    with closing(ablation.engines(Bar(io.StringIO()))) as engines:
        embeds = [
            engines.engine(arm).engine._parts.model.weights.embed for arm in (base, paged, half)
        ]
        assert embeds[0] is embeds[1] and embeds[2].dtype == torch.float16
        for kind in ("closed", "burst", "lone", "lone"):
            engines.measure(base, Load(kind), seed=0, label="run")
        engines.retain([paged])
        engines.measure(paged, Load("burst"), seed=0, label="run")
    assert served == [
        ("closed", "warm-up"), ("closed", "run"), ("burst", "run"), ("lone", "warm-up"),
        ("lone", "run"), ("lone", "run"), ("closed", "warm-up"), ("burst", "run"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options, said",
    [
        ("--rungs graphs=full", "nothing to measure beside the baseline: graphs=full: needs cuda"),
        ("--arm a=kv=paged,sched=aging", "'a' changes 2 variables of 'baseline' at once"),
        ("--rungs pages", "there is no rung 'pages'; did you mean paged"),
        ("--max-prompt 63", "prompts of up to 63 tokens do not fit max_model_len 64"),
        ("--max-model-len 65", "the baseline takes a prompt in one step, of 64 tokens"),
    ],
)
def test_a_command_that_cannot_be_carried_out_is_one_sentence(options, said, tmp_path, capsys):
    assert main([*SHORT.split(), *options.split(), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--base max_num_seqs=2", "give --max-num-seqs instead"),
        ("--base model=random:tiny", "give --model instead"),
        ("--arm a=kv=nope", "there is no kv called 'nope'"),
        ("--arm a=kv=paged", "it changes nothing of 'paged'"),
        ("--quality-data /nowhere/a.txt", "there is no file or folder /nowhere/a.txt"),
        ("--quality-data text.txt", "no arm is lossy"),
        ("--out text.txt", "text.txt is there and no folder"),
        ("--out text.txt --dry-run", "text.txt is there and no folder"),
        ("--out text.txt/more", "text.txt/more cannot be made"),
        ("--out other", "holds runs of an unknown study"),
        ("--out half", "half holds a result.json without its runs: name another --out"),
        ("--out half --resume", "half holds a result.json without its runs"),
        ("--ends --leave-one-out 2", "--ends measures no rung, so none can be left out"),
        ("--rounds 5", "--rounds is 5: give an even number, so that drift cancels"),
    ],
)
def test_what_can_only_fail_later_is_refused_at_once(tmp_path, monkeypatch, capsys, options, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("Once upon a time there was a lighthouse. " * 20)
    (tmp_path / "other" / "runs").mkdir(parents=True)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "result.json").write_text('{"seconds": 3}')
    (tmp_path / "other" / "runs" / "capacity--000--paged.json").write_text("{}")
    assert main([*FEW.split(), *options.split()]) == 2
    said = capsys.readouterr()
    assert says in said.err and len(said.err.splitlines()) == 1 and not said.out


@pytest.mark.parametrize("content", ["", '{"a":', "[]", "{}"])
def test_a_damaged_run_is_named(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"a\.json is damaged: .*; remove it"):
        study.read(path)


@pytest.mark.parametrize("options", ["--load 0.98", "--base kw=paged", "--rounds 0"])
def test_a_number_that_makes_no_sense_is_refused(options, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(options.split())
    assert ended.value.code == 2 and "error: argument" in capsys.readouterr().err


def test_without_matplotlib_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*FEW.split(), "--out", str(tmp_path)]) == 2
    assert "pip install 'outweigh[speed]' brings matplotlib" in capsys.readouterr().err
    monkeypatch.undo()
    report.check()


def test_a_chart_is_an_element_of_its_page():
    figure, axes = charts.pyplot().subplots()
    axes.plot([1, 2], label="a & b")
    axes.legend()
    text = charts.svg(figure, "salt")
    assert text.startswith("<svg") and text.rstrip().endswith("</svg>")
    assert "xmlns" not in text and "http" not in text and "a &amp; b" in text


def test_a_ladder_is_made_to_fit_the_minutes(monkeypatch, tmp_path, capsys):
    def fitted(options, runs_s=600.0, build_s=60.0):
        ablation = Ablation(parse([*SHORT.split()[:2], *options.split(), "--out", str(tmp_path)]))
        monkeypatch.setattr(ablation, "_seconds", lambda bar: (runs_s, build_s))
        ablation.fit(None)
        return ablation.args.num_requests

    cpu = "--device cpu --rungs paged"
    assert fitted(cpu) == int(16 * (540 - 60) / 600)
    assert fitted(cpu, runs_s=100.0) == 16
    assert not capsys.readouterr().err
    assert fitted(cpu, runs_s=1e5) == fitted(cpu, build_s=1e4) == 8
    few = "9 minutes are too few (--minutes): runs of 8 requests take about"
    said = [f"outweigh: note: {few} {minutes}\n" for minutes in ("834.3", "171.7")]
    assert capsys.readouterr().err == "".join(said)
    assert fitted(f"{cpu} --minutes 6 --resume") == 8
    assert fitted(f"{cpu} --num-requests 40") == 40
    Store(tmp_path, {"arguments": {"num_requests": 13}}, resume=False)
    assert fitted(cpu) == 13  # of the runs that go on


class Screen(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


def test_progress_says_what_runs_and_what_is_left_and_nothing_off_a_terminal():
    for is_terminal in (True, False):
        screen = Screen(is_terminal)
        with Bar(screen) as bar:
            bar.begin(10)
            bar.run("load-0.6", "paged", 2)
            bar.stage("capture", 1, 5)
            bar.run("load-0.6", "prefix", 2)
        said = screen.getvalue()
        if is_terminal:
            assert "load-0.6, round 3: prefix" in said and "1/10" in said and "left" in said
        else:
            assert said == ""


def test_the_commands_of_the_readme_can_be_given():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"python -m evals\.speed\.ablate([^`\n]*)", readme)
    assert commands
    for command in commands:
        ablate.parse(shlex.split(command))


def test_what_is_left_open_fits_the_device():
    args = parse(["--device", "cpu"])
    assert args.model == "tiny" and args.rounds == 6 and args.max_model_len == 288
    assert parse(["--device", "cpu", "--rounds", "9"]).rounds == 9
