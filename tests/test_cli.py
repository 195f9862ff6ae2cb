"""The command line: what goes where, exit codes, and one sentence for what a user gets wrong."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import pytest
import torch

import core
import core.testing
from core import run as cli, show
from core.config import RunConfig
from core.errors import RunError, UserError
from core.plan import resolve
from core.registry import Registry
from core.tokenizer import ByteTokenizer

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Metrics:
    num_prompt_tokens: int = 3
    num_cached_tokens: int = 1
    num_output_tokens: int = 2
    ttft_ms: float | None = 12.34
    tpot_ms: float | None = None
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


class Chatty(ByteTokenizer):
    """The bytes of a text, its first letter left out, are its chat; letter x has no template."""

    def chat(self, text):
        return None if text == "x" else list(text.encode())[1:]


class FakeEngine:
    """Composes like the real one, then answers each prompt in capitals, the last one first."""

    built = None
    tokenizer = ByteTokenizer()

    def __init__(self, progress=None, **fields):
        registry = Registry(fields.get("plugins", ()))
        self.plan = resolve(RunConfig.of(**fields), registry)
        self.config = self.plan.config
        self.notes = ["nothing here is real"]
        self.progress = progress
        self.requests = []
        self.params, self.priorities = [], []
        self.closed = False
        FakeEngine.built = self

    def add_request(self, prompt, params, *, priority):
        self.params.append(params)
        self.priorities.append(priority)
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
        text = (prompt if isinstance(prompt, str) else bytes(prompt).decode()).upper()
        events = [Event(request_id, letter) for letter in text[:-1]]
        return [*events, Event(request_id, text[-1:], Output(request_id, prompt, text))]

    def report(self):
        print("a library that prints")
        return {**self.plan.dump(), "counters": {"num_steps": 3}}

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
    assert (code, out) == (0, "HELLO\n")
    assert err.startswith("outweigh: note: nothing here is real\na library that prints\n")
    assert err.endswith("kv=paged fusion=onednn graphs=none sched=fifo device=cpu dtype=float32\n")
    assert all(heading in err for heading in ("TTFT ms", "TPOT ms", "tok/s"))
    row = next(line for line in err.splitlines() if "r0" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == (
        ["r0", "3", "1", "2", "12.34", "-", "nan", "length"]
    )
    assert FakeEngine.built.closed


def test_several_prompts_are_printed_in_their_order(fake, outweigh, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("two\n\nthree\n")
    code, out, _ = outweigh("run", "zero", "--device=cpu", "one", "--prompt-file", str(file))
    assert code == 0
    assert out.splitlines() == ["ZERO", "ONE", "TWO", "THREE"]


def test_the_prompt_may_come_through_a_pipe(fake, outweigh, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert outweigh("run", "--device", "cpu")[1] == "TWO\nLINES\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    assert outweigh("run", "--device", "cpu", "--prompt-file", "-")[1] == "A\nB\n"


def test_a_jsonl_file_has_requests_of_their_own(fake, outweigh, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "two\u2028", "max_tokens": 9, "stop": ["a", "b"]},
        {"prompt_token_ids": [104, 105], "seed": 5, "priority": -2},
    ]
    file.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    argv = ["one", "--prompt-file", str(file), "--device=cpu", "--max-tokens=3", "--top-k=4"]
    code, out, _ = outweigh("run", *argv, "-o", "json")
    assert code == 0
    results = json.loads(out)["results"]
    assert [r["prompt"] for r in results] == ["one", "two\u2028", [104, 105]]
    assert [r["priority"] for r in results] == FakeEngine.built.priorities == [0, 0, -2]
    assert [r["params"]["max_tokens"] for r in results] == [3, 9, 3]
    assert FakeEngine.built.params == [
        core.SamplingParams(max_tokens=3, top_k=4),
        core.SamplingParams(max_tokens=9, top_k=4, stop=("a", "b")),
        core.SamplingParams(max_tokens=3, top_k=4, seed=5),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is no JSON object: JSONDecodeError: Expecting property name"),
        ("[1]", "is no JSON object"),
        ("{}", "needs either prompt, a string, or prompt_token_ids, and priority"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "needs either prompt"),
        ('{"prompt": 3}', "needs either prompt"),
        ('{"prompt": "a", "priority": "high"}', "and priority in whole numbers"),
        ('{"prompt_token_ids": [1, "2"]}', "needs either prompt"),
        ('{"prompt": "a", "temperatur": 1}', ": there is no sampling parameter 'temperatur'; did"),
        ('{"prompt": "a", "top_p": 2}', ": top_p is 2: give a number"),
    ],
)
def test_a_wrong_line_is_named(outweigh, tmp_path, line, reason):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line)
    sentence = refused(outweigh("run", "--prompt-file", str(file), "--device", "cpu"))
    assert f"line 2 of {file}" in sentence
    assert reason in sentence


def test_prompts_stand_in_the_chat_template_where_there_is_one(fake, outweigh, monkeypatch):
    monkeypatch.setattr(FakeEngine, "tokenizer", Chatty())
    code, out, err = outweigh("run", "xhello", "x", "--device=cpu")
    assert (code, out) == (0, "HELLO\nX\n")
    assert "note: prompts stand in the model's chat template: --no-chat-template" in err
    code, out, err = outweigh("run", "xhello", "--device=cpu", "--no-chat-template")
    assert (code, out) == (0, "XHELLO\n")
    assert "chat" not in err
    document = json.loads(outweigh("run", "xhello", "--device=cpu", "-o", "json")[1])
    assert document["results"][0]["prompt"] == "xhello"
    assert document["results"][0]["text"] == "HELLO"


def test_quiet_leaves_stderr_empty(fake, outweigh):
    code, _, err = outweigh("run", "hello", "--device", "cpu", "--quiet")
    assert (code, err) == (0, "")


def test_sampling_flags_reach_the_engine_and_only_if_given(fake, outweigh):
    outweigh("run", "x", "--device", "cpu")
    assert FakeEngine.built.params == [core.SamplingParams()]
    argv = "--max-tokens 5 --temperature=0.5 --ignore-eos --stop END --stop 2 --stop-token-ids 7"
    outweigh("run", "x", "--device=cpu", *argv.split())
    assert FakeEngine.built.params == [
        core.SamplingParams(
            max_tokens=5, temperature=0.5, ignore_eos=True, stop=("END", "2"), stop_token_ids=(7,)
        )
    ]


def test_every_flag_of_the_run_reaches_its_field(fake, outweigh, tmp_path):
    file = tmp_path / "watch.py"
    file.write_text("def outweigh_run_finished(report): report['watched'] = True")
    argv = """run x --model m --kv contiguous --fusion none --graphs none --sched fifo --device cpu
        --dtype bfloat16 --seed 7 --max-model-len 99 --max-num-seqs 4 --max-num-batched-tokens 64
        --chunk-size 8 --kv-cache-bytes 1.5MiB
        --no-enable-prefix-caching --overlap"""
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
        enable_prefix_caching=False,
        plugins=(str(file),),
        overlap=True,
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
    assert (document["counters"], document["watched"]) == ({"num_steps": 3}, True)
    assert document["notes"] == ["nothing here is real"]
    assert "a library that prints" in err


def test_a_run_is_repeated_from_its_document(fake, outweigh, tmp_path):
    first = ["--seed=7", "--sched=fifo", "--max-num-seqs=3", "--set", "kv.block_size=32"]
    plugin = tmp_path / "mine.py"
    plugin.write_text("def outweigh_run_finished(report): pass")
    document = outweigh("run", "x", "--device=cpu", *first, "-o", "json", "-p", str(plugin))[1]
    config, offers = FakeEngine.built.config, FakeEngine.built.plan.dump()["offers"]
    assert offers["kv"]["settings"]["block_size"] == 32
    file = tmp_path / "run.json"
    for content in (document, json.dumps(json.loads(document)["config"])):
        file.write_text(content)
        assert outweigh("run", "x", "--config", str(file))[0] == 0
        assert FakeEngine.built.config == config
        assert FakeEngine.built.plan.dump()["offers"] == offers
    outweigh("run", "x", "--config", str(file), "--seed=8", "--set", "kv.block_size=64")
    assert FakeEngine.built.config.seed == 8
    assert FakeEngine.built.config.max_num_seqs == 3
    assert FakeEngine.built.plan.kv.config.block_size == 64


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is no JSON object: JSONDecodeError: Expecting property name"),
        ("[1]", "is no JSON object"),
        ('{"config": 3}', "refuses its options: input should be a valid dictionary"),
        ('{"max_num_seq": 3}', "has no option 'max_num_seq'; did you mean max_num_seqs?"),
        ('{"config": {"seed": -1}}', "refuses seed=-1: input should be greater than or equal to 0"),
    ],
)
def test_a_wrong_config_file_is_named(outweigh, tmp_path, content, reason):
    file = tmp_path / "run.json"
    file.write_text(content)
    assert f"{file} {reason}" in refused(outweigh("run", "x", "--config", str(file)))


def test_list_as_json(outweigh):
    rows = json.loads(outweigh("list", "-o", "json")[1])["offers"]
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
    option = next(row for row in shown["options"] if row["name"] == "kv.block_size")
    assert (option["type"], option["default"]) == ("int", "16")
    assert option["description"]


def test_env_says_what_runs_here_and_why_not(outweigh):
    assert outweigh("env", "--device", "cpu")[0] == 0
    found = json.loads(outweigh("env", "--device=cpu", "-o", "json")[1])
    assert found["versions"]["torch"] == torch.__version__
    assert len(found["gpus"]) == torch.cuda.device_count()
    states = {(row["seam"], row["name"]): row["state"] for row in found["offers"]}
    assert states["kv", "paged"] == "ok"
    assert states["graphs", "full"].startswith("does not run here: graphs 'full' captures CUDA")


def test_env_tells_of_gpus(outweigh, monkeypatch):
    from types import SimpleNamespace

    gpu = SimpleNamespace(name="H9000", total_memory=3 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    code, out, _ = outweigh("env")
    assert code == 0
    row = next(line for line in out.splitlines() if "H9000" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["H9000", "3.00"]
    cuda = {line.split("│")[2].strip(): line for line in out.splitlines() if "│ graphs" in line}
    assert "│ ok" in cuda["full"]


def test_a_dry_run_shows_the_plan_and_builds_nothing(outweigh, monkeypatch):
    monkeypatch.delitem(vars(core), "Engine", raising=False)
    argv = ["--dry-run", "--device=cpu", "--set", "kv.block_size=64", "--max-num-seqs=3"]
    code, out, err = outweigh("run", *argv, "--model", "no/such")
    assert (code, err) == (0, "")
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines()]
    assert ["max_num_seqs", "3"] in rows
    assert ["settings", "{'kv.block_size': 64}"] in rows
    assert ["max_model_len", "-"] in rows
    assert ["fusion", "onednn", f"outweigh {core.__version__}"] in [row[:3] for row in rows]
    plan = json.loads(outweigh("run", *argv, "-o", "json")[1])
    assert plan["offers"]["kv"]["settings"]["block_size"] == 64
    assert plan["config"]["max_num_batched_tokens"] == 2048
    assert "Engine" not in vars(core)
    assert "did you mean paged" in refused(outweigh("run", "--dry-run", "--kv", "pagd"))


def test_a_dry_run_looks_at_the_model(outweigh, tmp_path):
    """Nothing but a hub id is taken on trust: that would need the network."""
    argv = ["run", "--dry-run", "--device=cpu", "--model"]
    assert "no directory, no hub id" in refused(outweigh(*argv, "nonsense"))
    assert "has no config.json" in refused(outweigh(*argv, str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "gemma2"}')
    assert "model_type is 'gemma2'" in refused(outweigh(*argv, str(tmp_path)))
    assert outweigh(*argv, "random:tiny")[0] == 0


def test_a_note_names_what_has_no_effect_without_temperature(fake, outweigh):
    note = "top_p has no effect at temperature 0"
    assert note in outweigh("run", "x", "--device=cpu", "--top-p=0.9")[2]
    assert note not in outweigh("run", "x", "--device=cpu", "--top-p=0.9", "--temperature=1")[2]
    assert note not in outweigh("run", "x", "--device=cpu", "--top-p=1")[2]


def test_help_and_version(capsys):
    for argv, expected in (
        (["run", "--help"], "--top-k X sample from the k likeliest tokens"),
        (
            ["run", "--help"],
            "--max-num-seqs X sequences of one step; auto: 32 on a CPU, 256 on CUDA",
        ),
        (["run", "--version"], f"outweigh {core.__version__}"),
        (["--version"], f"outweigh {core.__version__}"),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(argv)
        assert caught.value.code == 0
        assert expected in " ".join(capsys.readouterr().out.split())


def test_the_flags_are_frozen():
    """One for each field of the run and of sampling. Plugins add none, and a new one beside these
    is a decision: options of offers go through --set."""
    named = set(RunConfig.model_fields) | {f.name for f in fields(core.SamplingParams)}
    named = {"--" + name.replace("_", "-") for name in named - {"settings", "plugins"}}
    switches = ("enable-prefix-caching", "enable-chunked-prefill", "overlap")
    others = """-h --help --prompt-file --config --set -p --no-chat-template -o --output --quiet
        --list --show --env --dry-run --version"""
    flags = {flag for action in cli._parser()._actions for flag in action.option_strings}
    assert flags == named | {f"--no-{name}" for name in switches} | set(others.split())


# What a user gets wrong


BAD_INPUT = {
    "unknown kv": (["--kv", "pagd"], "there is no kv called 'pagd'; did you mean paged?"),
    "unknown option": (["--set", "kv.blocksize=3"], "did you mean block_size"),
    "unknown seam": (["--set", "kw.block_size=3"], "did you mean kv?"),
    "no value": (["--set", "kv.block_size"], "--set takes SEAM.FIELD=VALUE"),
    "ill-typed option": (["--set", "kv.block_size=abc"], "refuses kv.block_size='abc'"),
    "missing module": (
        ["-p", "no_such_module"],
        "'no_such_module' cannot be used: ModuleNotFoundError",
    ),
    "missing file": (["-p", "no/such.py"], "'no/such.py' cannot be used: FileNotFoundError"),
    "missing block": (["-p", "no:such"], "-p no:such blocks nothing"),
    "veto": (["--graphs", "full"], "captures CUDA graphs and the device is cpu"),
    "no such device": (["--device", "tpu"], "there is no device 'tpu'"),
    "ill-typed flag": (["--seed", "x"], "refuses seed='x': input should be a valid integer"),
    "out of range": (["--max-num-seqs", "0"], "refuses max_num_seqs='0'"),
    "unknown dtype": (["--dtype", "int4"], "refuses dtype='int4'"),
    "bytes": (
        ["--kv-cache-bytes", "2 apples"],
        "refuses kv_cache_bytes='2 apples': could not interpret byte unit: apples",
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
    assert "there is no prompt that is not empty" in refused(outweigh("run"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert "there is no prompt that is not empty" in refused(outweigh("run"))
    for prompts in ([""], ["one", "", "two"]):  # one that was given is not passed over
        assert "the prompt is empty: give at least one token" in refused(outweigh("run", *prompts))
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    for name in ("empty.txt", "empty.jsonl"):
        file = empty.rename(tmp_path / name)
        assert "there is no prompt" in refused(outweigh("run", "--prompt-file", str(file)))
        empty = file
    empty.write_bytes(b"\xff\xfe")
    assert "cannot be read as UTF-8 text" in refused(outweigh("run", "--prompt-file", str(empty)))


def test_commands(outweigh):
    assert "there is no command ''; commands: run, list, env" in refused(outweigh())
    assert "there is no command 'lst'; did you mean list?" in refused(outweigh("lst"))
    code, out, err = outweigh("--help")
    assert (code, err) == (0, "")
    assert "usage: outweigh COMMAND" in out


def test_a_command_of_its_own_module(monkeypatch, tmp_path, outweigh):
    (tmp_path / "dream.py").write_text("def main(argv): print(argv); return 5")
    monkeypatch.setattr(core.testing, "__path__", [*core.testing.__path__, str(tmp_path)])
    monkeypatch.setattr(cli, "COMMANDS", {**cli.COMMANDS, "dream": ""})
    assert outweigh("dream", "--deep") == (5, "['--deep']\n", "")
    del sys.modules["core.testing.dream"]


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
    for screen in (io.StringIO(), Terminal()):
        with show.progress_bar(screen) as progress:
            progress("capture", 1, 3)
            progress("capture", 3, 3)
        assert ("capture" in screen.getvalue()) == screen.isatty()


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
