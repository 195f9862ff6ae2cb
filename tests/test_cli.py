"""The command line: what goes where, exit codes, and one sentence for what a user gets wrong."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import torch

import core
from core import run as cli, show
from core.config import RunConfig
from core.errors import RunError, UserError
from core.plan import resolve
from core.registry import Registry

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Metrics:
    num_prompt_tokens: int = 3
    num_cached_tokens: int = 1
    num_output_tokens: int = 2
    ttft_ms: float | None = 12.34
    mean_itl_ms: float | None = None
    tokens_per_s: float = math.nan

    def as_dict(self):
        return asdict(self)


@dataclass
class Output:
    request_id: str
    prompt: str
    text: str
    token_ids: list = field(default_factory=lambda: [1, 2])
    finish_reason: str = "length"
    error: str | None = None
    metrics: Metrics = field(default_factory=Metrics)


@dataclass
class Event:
    request_id: str
    text: str
    output: Output | None = None


class FakeEngine:
    """Composes like the real one, then answers each prompt in capitals, the last one first."""

    built = None

    def __init__(self, progress=None, **fields):
        registry = Registry(fields.get("plugins", ()))
        self.plan = resolve(RunConfig.of(**fields), registry)
        self.config = self.plan.config
        self.notes = ["nothing here is real"]
        self.progress = progress
        self.requests = []
        self.closed = False
        FakeEngine.built = self

    def add_request(self, prompt, params=None, request_id=None):
        self.params = params
        self.requests.append((f"r{len(self.requests)}", prompt))
        return self.requests[-1][0]

    def has_unfinished(self):
        return bool(self.requests)

    def step(self):
        request_id, prompt = self.requests.pop()
        if prompt == "fail":
            failed = Output(request_id, prompt, "", [], "error", "the pool is too small")
            return [Event(request_id, "", failed)]
        if prompt == "interrupt":
            raise KeyboardInterrupt
        text = prompt.upper()
        events = [Event(request_id, letter) for letter in text[:-1]]
        return [*events, Event(request_id, text[-1:], Output(request_id, prompt, text))]

    def report(self):
        print("a library that prints")
        return {"counters": {"num_steps": 3}, "config": {"again": True}}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setitem(vars(core), "Engine", FakeEngine)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))


@pytest.fixture
def outweigh(capsys):
    """Run the console script in this process: (exit code, stdout, stderr)."""

    def call(*argv):
        code = cli.main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def refused(result):
    """The sentence of a refusal: exit code 2, nothing on stdout, one line on stderr."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("outweigh: error: ")
    assert err.count("\n") == 1
    return err


# Text


def test_one_prompt_streams_to_stdout_and_the_rest_to_stderr(fake, outweigh):
    code, out, err = outweigh("run", "hello", "--device", "cpu")
    assert (code, out) == (0, "HELLO\na library that prints\n")
    assert err.startswith("outweigh: note: nothing here is real\n")
    assert err.endswith("kv=paged fusion=none graphs=none sched=fifo device=cpu dtype=float32\n")
    row = next(line for line in err.splitlines() if "r0" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == (
        ["r0", "3", "1", "2", "12.3", "-", "nan", "length"]
    )
    assert FakeEngine.built.closed
    assert FakeEngine.built.progress is None  # stderr is no terminal


def test_several_prompts_are_printed_in_their_order(fake, outweigh, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("two\n\nthree\n")
    code, out, _ = outweigh("run", "zero", "--device=cpu", "one", "--prompt-file", str(file))
    assert code == 0
    assert out.splitlines()[:4] == ["ZERO", "ONE", "TWO", "THREE"]


def test_the_prompt_may_come_through_a_pipe(fake, outweigh, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert outweigh("run", "--device", "cpu")[1].startswith("TWO\nLINES\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    assert outweigh("run", "--device", "cpu", "--prompt-file", "-")[1].startswith("A\nB\n")


def test_quiet_leaves_stderr_empty(fake, outweigh):
    code, _, err = outweigh("run", "hello", "--device", "cpu", "--quiet")
    assert (code, err) == (0, "")


def test_sampling_flags_reach_the_engine_and_only_if_given(fake, outweigh):
    outweigh("run", "x", "--device", "cpu")
    assert FakeEngine.built.params == core.SamplingParams()
    outweigh("run", "x", "--device=cpu", "--max-tokens=5", "--temperature=0.5", "--ignore-eos")
    expected = core.SamplingParams(max_tokens=5, temperature=0.5, ignore_eos=True)
    assert FakeEngine.built.params == expected


def test_every_flag_of_the_run_reaches_its_field(fake, outweigh, tmp_path):
    file = tmp_path / "watch.py"
    file.write_text("def outweigh_run_finished(report): report['watched'] = True")
    argv = """run x --model m --kv contiguous --fusion none --graphs none --sched fifo --device cpu
        --dtype bfloat16 --seed 7 --max-model-len 99 --max-num-seqs 4 --max-num-batched-tokens 64
        --chunk-size 8 --kv-cache-bytes 1.5MiB --gpu-memory-utilization 0.5
        --no-enable-prefix-caching"""
    assert outweigh(*argv.split(), "-p", str(file))[0] == 0
    assert FakeEngine.built.config == RunConfig(
        model="m",
        kv="contiguous",
        fusion="none",
        graphs="none",
        sched="fifo",
        device="cpu",
        dtype="bfloat16",
        seed=7,
        max_model_len=99,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        chunk_size=8,
        kv_cache_bytes=3 << 19,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        plugins=(str(file),),
        overlap=False,
    )


def test_settings_are_repeatable_and_the_last_one_counts(fake, outweigh):
    outweigh("run", "x", "--device=cpu", "--set", "kv.block_size=8", "--set", "kv.block_size=64")
    assert FakeEngine.built.plan.kv.config.block_size == 64


# JSON


def test_json_is_one_document_alone_on_stdout(fake, outweigh, tmp_path):
    file = tmp_path / "watch.py"
    file.write_text("def outweigh_run_finished(report): report['watched'] = True")
    code, out, err = outweigh("run", "ab", "c", "--device=cpu", "-o", "json", "-p", str(file))
    document = json.loads(out)
    assert code == 0
    assert [result["text"] for result in document["results"]] == ["AB", "C"]
    result = document["results"][0]
    assert (result["token_ids"], result["finish_reason"]) == ([1, 2], "length")
    assert result["metrics"]["ttft_ms"] == 12.34
    assert result["metrics"]["tokens_per_s"] is None  # NaN is not JSON
    assert document["config"]["device"] == "cpu"
    assert document["offers"]["kv"]["name"] == "paged"
    assert document["versions"]["outweigh"] == core.__version__
    assert document["report"] == {"counters": {"num_steps": 3}, "watched": True}
    assert "a library that prints" in err


def test_list_as_json(outweigh):
    rows = json.loads(outweigh("list", "-o", "json")[1])
    paged = next(row for row in rows if (row["seam"], row["name"]) == ("kv", "paged"))
    assert (paged["owner"], paged["state"]) == (f"outweigh {core.__version__}", "ok")


# --list and --show


def test_list_shows_what_is_broken_or_blocked_and_why(outweigh, make_dist, tmp_path):
    make_dist("outweigh-bad", "bad", "import nothing_of_that_name")
    make_dist("outweigh-old", "old", "def outweigh_register_kv(register): register('x', 'no:X')")
    make_dist("outweigh-off", "off", "")
    watch = tmp_path / "watch.py"
    watch.write_text("def outweigh_run_finished(report): pass")
    code, out, _ = outweigh("list", "-p", "no:off", "-p", str(watch))
    assert code == 0
    rows = {}
    for line in out.splitlines()[3:-1]:
        seam, name, owner, origin, state = (cell.strip() for cell in line.strip("│").split("│"))
        rows[seam, name] = (owner, origin, state)
    assert rows["sched", "fifo"] == (
        f"outweigh {core.__version__}",
        str(ROOT / "plugins" / "builtin.py"),
        "ok",
    )
    assert rows["kv", "x"][0] == "outweigh-old 0.1"
    assert rows["kv", "x"][2].startswith("broken: kv 'x' of outweigh-old 0.1 cannot be loaded")
    assert "No module named 'nothing_of_that_name'" in rows["-", "bad"][2]
    assert rows["-", "off"][2] == "blocked"
    assert rows["-", "watch"] == ("module watch", str(watch), "ok, hooks only")


def test_show_tells_facts_options_and_where_it_stands(outweigh):
    code, out, _ = outweigh("run", "--show", "kv", "paged")
    assert code == 0
    assert f"owner: outweigh {core.__version__}" in out
    assert f"origin: {ROOT / 'plugins' / 'kv' / 'paged.py'}:" in out
    assert "prefix_sharing" in out
    assert "kv.block_size" in out
    shown = json.loads(outweigh("run", "--show", "kv", "paged", "-o", "json")[1])
    assert shown["facts"]["lossless"] is True
    assert {"name", "type", "default", "description"} == set(shown["options"][0])


def test_help_names_the_offers_and_version_the_version(capsys):
    for argv, expected in (
        (["run", "--help"], "kv: contiguous, paged"),
        (["run", "--help", "-p", "no_such_module"], "'no_such_module' (-p) was not found"),
        (["run", "--version"], f"outweigh {core.__version__}"),
        (["--version"], f"outweigh {core.__version__}"),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(argv)
        assert caught.value.code == 0
        assert expected in " ".join(capsys.readouterr().out.split())


def test_the_flags_are_frozen():
    """Plugins add no flags, and a new one is a decision: options of offers go through --set."""
    flags = {flag for action in cli._parser("")._actions for flag in action.option_strings}
    expected = """
        -h --help --prompt-file --model --kv --fusion --graphs --sched --device --dtype --seed
        --max-model-len --max-num-seqs --max-num-batched-tokens --chunk-size --kv-cache-bytes
        --gpu-memory-utilization --enable-prefix-caching --no-enable-prefix-caching --set -p
        --max-tokens --temperature --ignore-eos -o --output --list --show --quiet --version"""
    assert flags == set(expected.split())


# What a user gets wrong


BAD_INPUT = {
    "unknown kv": (["--kv", "pagd"], "there is no kv called 'pagd'; did you mean paged?"),
    "unknown option": (["--set", "kv.blocksize=3"], "did you mean block_size"),
    "unknown seam": (["--set", "kw.block_size=3"], "did you mean kv?"),
    "no value": (["--set", "kv.block_size"], "--set takes SEAM.FIELD=VALUE"),
    "ill-typed option": (["--set", "kv.block_size=abc"], "refuses kv.block_size='abc'"),
    "missing module": (["-p", "no_such_module"], "'no_such_module' (-p) was not found"),
    "missing file": (["-p", "no/such.py"], "'no/such.py' (-p) does not exist"),
    "missing block": (["-p", "no:such"], "-p no:such blocks nothing"),
    "veto": (["--graphs", "full"], "captures CUDA graphs and the device is cpu"),
    "no such device": (["--device", "tpu"], "there is no device 'tpu'"),
    "ill-typed flag": (["--seed", "x"], "refuses seed='x': input should be a valid integer"),
    "out of range": (["--max-num-seqs", "0"], "refuses max_num_seqs='0'"),
    "unknown dtype": (["--dtype", "int4"], "refuses dtype='int4'"),
    "bytes": (
        ["--kv-cache-bytes", "2 apples"],
        "refuses kv_cache_bytes='2 apples': write a number",
    ),
    "unknown flag": (["--kv-blocks", "3"], "unrecognized arguments: --kv-blocks"),
    "abbreviation": (["--max-num-s", "3"], "unrecognized arguments: --max-num-s"),
    "ill-typed sampling": (["--max-tokens", "x"], "argument --max-tokens: invalid int value: 'x'"),
    "max tokens": (["--max-tokens", "0"], "max_tokens is 0"),
    "prompt file": (["--prompt-file", "no/such.txt"], "no/such.txt cannot be read as UTF-8 text"),
    "show seam": (["--show", "kw", "paged"], "there is no seam 'kw'; did you mean kv?"),
    "show name": (["--show", "kv", "pagd"], "there is no kv called 'pagd'; did you mean paged?"),
    "output": (["-o", "yaml"], "invalid choice: 'yaml'"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence(outweigh, case):
    argv, expected = BAD_INPUT[case]
    assert expected in refused(outweigh("run", "x", "--device", "cpu", *argv))


def test_a_broken_plugin_that_is_asked_for(outweigh, make_dist):
    make_dist("outweigh-bad", "bad", "import nothing_of_that_name")
    make_dist("outweigh-old", "old", "def outweigh_register_kv(register): register('x', 'no:X')")
    assert "nothing_of_that_name" in refused(outweigh("run", "x", "-p", "outweigh_bad"))
    assert "'x' of outweigh-old 0.1 cannot be" in refused(
        outweigh("run", "x", "--kv=x", "--device=cpu")
    )


def test_two_plugins_of_one_name(outweigh, make_dist):
    for dist in ("outweigh-one", "outweigh-two"):
        make_dist(dist, "int8", "def outweigh_register_kv(register): pass")
    expected = "two plugins are called 'int8': outweigh-one 0.1 and outweigh-two 0.1"
    assert expected in refused(outweigh("run", "x"))
    assert expected in refused(outweigh("list"))


def test_no_prompt(outweigh, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert "there is no prompt in stdin" in refused(outweigh("run"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert "there is no prompt: give one" in refused(outweigh("run"))
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    assert f"there is no prompt in {empty}" in refused(outweigh("run", "--prompt-file", str(empty)))
    empty.write_bytes(b"\xff\xfe")
    assert "cannot be read as UTF-8 text" in refused(outweigh("run", "--prompt-file", str(empty)))


def test_commands(outweigh, monkeypatch):
    assert "say what to do" in refused(outweigh())
    assert "there is no command 'lst'; did you mean list?" in refused(outweigh("lst"))
    monkeypatch.setattr(cli, "COMMANDS", {**cli.COMMANDS, "dream": "not written"})
    assert "does not have the command 'dream' yet" in refused(outweigh("dream"))
    code, out, err = outweigh("--help")
    assert (code, err) == (0, "")
    assert "usage: outweigh COMMAND" in out


def test_a_command_of_its_own_module(monkeypatch, tmp_path, outweigh):
    (tmp_path / "dream.py").write_text("def main(argv): print(argv); return 5")
    monkeypatch.setattr(core, "__path__", [*core.__path__, str(tmp_path)])
    monkeypatch.setattr(cli, "COMMANDS", {**cli.COMMANDS, "dream": ""})
    assert outweigh("dream", "--deep") == (5, "['--deep']\n", "")
    del sys.modules["core.dream"]


# Runs that fail


def test_a_failed_request_is_exit_code_1_and_still_in_the_document(fake, outweigh):
    code, out, err = outweigh("run", "fail", "fine", "--device=cpu", "-o", "json")
    assert code == 1
    assert [r["finish_reason"] for r in json.loads(out)["results"]] == ["error", "length"]
    assert err.endswith("error: 1 of 2 requests failed: the pool is too small\n")


def test_an_interrupt_is_exit_code_130(fake, outweigh):
    code, out, err = outweigh("run", "interrupt", "--device", "cpu")
    assert (code, out) == (130, "")
    assert err.endswith("outweigh: error: interrupted\n")
    assert FakeEngine.built.closed


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("mend\nthis"), 2),
        (RunError("mend\nthis"), 1),
        (MemoryError("mend this"), 1),
        (torch.OutOfMemoryError("mend this"), 1),
    ],
)
def test_errors_have_an_exit_code_and_no_traceback_unless_asked(capsys, monkeypatch, error, code):
    def fails(argv):
        raise error

    monkeypatch.delenv("OUTWEIGH_DEBUG", raising=False)
    assert cli.guarded(fails, []) == code
    assert capsys.readouterr().err == "outweigh: error: mend this\n"
    monkeypatch.setenv("OUTWEIGH_DEBUG", "1")
    assert cli.guarded(fails, []) == code
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        cli.guarded(lambda argv: 1 // 0, [])


# Parts


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_drawn_on_a_terminal_only():
    with show.progress_bar(io.StringIO()) as progress:
        assert progress is None
    screen = Terminal()
    with show.progress_bar(screen) as progress:
        progress("capture", 1, 3)
        progress("capture", 3, 3)
    assert "capture" in screen.getvalue()


def test_brackets_in_a_table_are_text():
    out = io.StringIO()
    show.print_rows([{"name": "[bold]", "state": ":smile:"}], out)
    assert "[bold]" in out.getvalue()
    assert ":smile:" in out.getvalue()


# The process


def python(*argv, **options):
    return subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, cwd=ROOT, check=False, **options
    )


def test_the_module_runs_and_keeps_stdout_for_the_document():
    argv = ["run", "--max-tokens", "3", "--ignore-eos", "-o", "json", "--device", "cpu"]
    done = python("-m", "core.run", *argv, input="ignored")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [result["prompt"] for result in document["results"]] == ["run"]  # a prompt, no command
    assert len(document["results"][0]["token_ids"]) == 3


def test_a_user_error_of_the_module_is_one_sentence():
    done = python("-m", "core.run", "x", "--graphs", "full", "--device", "cpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("outweigh: error: graphs 'full'")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_leaves_is_no_error():
    done = python(
        "-c",
        "import os, sys; from core import run; r, w = os.pipe(); os.close(r); os.dup2(w, 1);"
        "sys.exit(run.main(['list']))",
    )
    assert (done.returncode, done.stderr) == (1, "")
