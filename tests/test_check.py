"""`outweigh check`: the suite of a seam against an offer, the table, the exit codes."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from core import check
from core.errors import RunError, UserError
from core.seams import SEAMS
from core.testing.check import _SUITES

ROOT = Path(__file__).resolve().parent.parent

LADDER = """
from pydantic import Field
from core.batch import BatchShape
from core.config import OfferConfig

class Ladder:
    '''Decode steps, one graph for each number of rows.'''

    api, captures = 1, True
    {held_to}

    class Config(OfferConfig):
        missing: int = Field(0, ge=0, description="rungs that the ladder lacks")

    def __init__(self, config):
        self.config = config

    def shapes(self, limits):
        self.top = max(1, limits.max_num_seqs - self.config.missing)
        self.longest = limits.max_model_len
        return [self.shape(n + 1) for n in range(self.top)]

    def select(self, num_tokens, num_seqs, max_query, max_kv, start):
        return self.shape(num_seqs) if max_query == 1 and num_seqs <= self.top else None

    def shape(self, n):
        return BatchShape(n, n, 1, self.longest, None)

def outweigh_register_graphs(register):
    register("ladder", Ladder)
"""

FORGETFUL = """
from core.config import OfferConfig
from core.model import rotate
from core.seams import Span

class Forgetful:
    '''Writes K as it comes, and knows no gain.'''

    api, lossless = 1, True

    class Config(OfferConfig):
        '''No options.'''

    def __init__(self, config):
        self.config = config

    def spans(self, facts, device):
        return [Span("forgets", ("qk_norm", "rope", "kv_write"), self.run, lambda *_: True)]

    def run(self, sites, batch, qkv):
        site = sites[0]
        parts = qkv.split(site.facts.qkv_sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, site.facts.head_dim)) for part in parts)
        q, k = rotate(site.cos[batch.positions], site.sin[batch.positions], q, k)
        site.kv.write(site.layer, k, v, batch)
        return (q,)

def outweigh_register_fusion(register):
    register("forgetful", Forgetful)
"""


@pytest.fixture
def ladder(tmp_path):
    """A maker of a plugin file with a graph strategy; `held_to` is a line of its class."""

    def make(held_to=""):
        path = tmp_path / "ladder.py"
        path.write_text(LADDER.format(held_to=held_to))
        return str(path)

    return make


def test_a_row_for_each_clause_and_why_it_was_skipped(rows):
    assert check.main(["graphs", "none"]) == 0
    found = rows()
    assert found["test_captures_is_as_declared"] == (
        "ok",
        "Who captures has a shape for all limits; who does not has none, and selects none.",
        "",
    )
    assert found["test_no_shape_is_there_twice"] == (
        "skipped",
        "no shape is there twice",
        "captures is False: there is no shape",
    )


def test_a_failure_says_what_and_by_how_much(rows, ladder, capsys):
    """By an option, in an offer that -p brings."""
    plugin = ladder()
    assert check.main(["graphs", "ladder", "-p", plugin, "-k", "ladders or twice"]) == 0
    assert {state for state, *_ in rows().values()} == {"ok"}
    short = ["graphs", "ladder", "-p", plugin, "--set", "missing=1"]
    assert check.main([*short, "-k", "ladders or twice"]) == 1
    found = rows()
    state, contract, why = found["test_ladders_end_at_the_maximum"]
    assert state == "failed" and contract.startswith("Rows at max_num_seqs")
    assert why.startswith("Limits(max_model_len=200, max_num_seqs=3, max_num_batched_tokens=4)")
    assert found["test_no_shape_is_there_twice"][0] == "ok"
    assert check.main([*short, "--set", "graphs.missing=0", "-k", "ladders"]) == 0
    assert "graphs ladder: 1 ok" in capsys.readouterr().out


def test_a_failure_names_its_parametrisations(rows, tmp_path):
    plugin = tmp_path / "forgetful.py"
    plugin.write_text(FORGETFUL)
    chosen = "store and (qwen3 or mistral) and not contiguous"
    assert check.main(["fusion", "forgetful", "-p", str(plugin), "-k", chosen]) == 1
    ((state, contract, why),) = rows().values()
    assert state == "failed" and contract.startswith("The same keys and values in the same places")
    assert re.match(
        r"\[qwen3-paged\] \[qwen3-none\] span 'forgets' \(qk_norm · rope · kv_write\) of layer 0: "
        r"what is stored is off by \d",
        why,
    )
    assert "mistral" not in why


def test_an_offer_says_what_it_is_held_to(rows, ladder):
    """Attributes of the suite, expected failures among them: strict, as in a subclass."""
    reason = '{"test_ladders_end_at_the_maximum": "the last rung is too large for us"}'
    plugin = ladder(f'held_to = {{"expected_failures": {reason}}}')
    command = ["graphs", "ladder", "-p", plugin, "-k", "ladders or twice", "--set"]
    assert check.main([*command, "missing=1"]) == 0
    assert rows()["test_ladders_end_at_the_maximum"][::2] == (
        "expected",
        "the last rung is too large for us",
    )
    assert check.main([*command, "missing=0"]) == 1
    state, _, why = rows()["test_ladders_end_at_the_maximum"]
    assert state == "failed" and why == "[XPASS(strict)] the last rung is too large for us"


@pytest.mark.parametrize(
    ("held_to", "message"),
    [
        ("{'tolerence': 1}", "held_to names 'tolerence', which no offer can set; it can set: exp"),
        ("{'test_no_shape_is_there_twice': None}", "held_to names 'test_no_shape_is_there_twice'"),
        ("{'device': 'cuda'}", "held_to names 'device', which no offer can set"),
        ("{'make': None}", "held_to names 'make', which no offer can set"),
        (
            "{'expected_failures': {'test_no_shape_is_there_twise': 'why'}}",
            "graphs Ladder: expected_failures names 'test_no_shape_is_there_twise', which is no "
            "clause; did you mean test_no_shape_is_there_twice",
        ),
        ("3", "graphs Ladder: held_to is 3: give a dict"),
        ("{'expected_failures': ['test_no_shape_is_there_twice']}", "of expected failures one"),
        ("{'seam': 'kv'}", "held_to names 'seam', which no offer can set"),
    ],
)
def test_an_offer_cannot_take_a_clause_away(ladder, held_to, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check.main(["graphs", "ladder", "-p", ladder(f"held_to = {held_to}")])


def test_what_an_offer_declares_is_printed(ladder, capsys):
    plugin = ladder("held_to = {'limits': ()}")
    assert check.main(["graphs", "ladder", "-p", plugin, "-k", "twice"]) == 0
    assert "\nheld by its own word to limits=()\n" in capsys.readouterr().out


LOOKS_TWICE = """
from plugins.kv.paged import Paged

class Careless(Paged):
    {fault}

def outweigh_register_kv(register):
    register("careless", Careless)
"""


@pytest.mark.parametrize(
    ("fault", "clause", "why"),
    [
        ("restore = None", "saved", "of save and restore it has one: give both"),
        ("held_to = {'tolerance': 0.1}", "lossless", "it asks for 0.1, rounding is 1.9"),
        ("sees = min", "lossless", "it declares in `sees` what it forgets"),
        ("prefix_sharing = False", "sharing_is_as_declared", "assert 80 == 0"),
    ],
)
def test_what_is_claimed_and_not_held_is_a_failure(rows, tmp_path, fault, clause, why):
    plugin = tmp_path / "careless.py"
    plugin.write_text(LOOKS_TWICE.format(fault=fault))
    assert check.main(["kv", "careless", "-p", str(plugin), "-k", clause]) == 1
    ((state, _, said),) = rows().values()
    assert state == "failed" and said.startswith(why)


def test_an_offer_that_cannot_run_here_does_not_pass(rows):
    with pytest.raises(RunError, match="fusion triton could not be tried here"):
        check.main(["fusion", "triton", "-k", "fits or runs_of"])
    found = rows()
    assert found["test_fits_the_seam"][0] == "ok"
    assert found["test_spans_are_runs_of_the_chain"][::2] == (
        "skipped",
        "fusion 'triton' runs its kernels on CUDA and the device is cpu: choose --fusion none",
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("kw paged", "there is no seam 'kw'; did you mean kv?"),
        ("graphs decod", "there is no graphs called 'decod'; did you mean decode?"),
        ("graphs decode --set find=3", "has no option 'find'; did you mean fine?"),
        ("graphs decode --set fine=0", "refuses graphs.fine=0: input should be greater than"),
        ("graphs decode -k nowhere", "-k 'nowhere' selects nothing"),
        ("graphs decode -k and", "-k 'and' selects nothing"),
        ("graphs decode -p no:nobody", "-p no:nobody blocks nothing"),
        ("sched fifo --gpu", "sched offers run on the host alone: drop --gpu"),
    ],
)
def test_what_a_user_gets_wrong_is_one_sentence(command, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check.main(command.split())


def test_a_missing_gpu_is_a_failure(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RunError, match="torch sees no CUDA device"):
        check.main(["graphs", "decode", "--gpu"])


def test_without_pytest_there_is_help_and_one_sentence(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "pytest" else find(n))
    with pytest.raises(SystemExit, match="0"):
        check.main(["--help"])
    assert "usage: outweigh check" in capsys.readouterr().out
    with pytest.raises(UserError, match="take pytest, which is missing: pip install pytest$"):
        check.main(["graphs", "none"])


def test_the_suites_take_pytest_and_what_a_run_has():
    """`pip install pytest` is enough, as is the extra `test`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["test"] == ["pytest"]
    installed = {re.split(r"[^\w-]", line)[0] for line in project["dependencies"]}
    known = {*installed, "pytest", "core", "plugins", "evals", *sys.stdlib_module_names}
    files = sorted((ROOT / "core" / "testing").glob("*.py"))
    trees = [ast.parse(path.read_text()) for path in files]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    asked = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    asked |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in asked} - known == set()


def test_it_minds_no_options_of_other_tests_and_leaves_nothing(monkeypatch, capsys):
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    monkeypatch.chdir(ROOT / "tests")  # whose conftest has options and skips of its own
    for _ in range(2):
        assert check.main(["graphs", "none", "-k", "declared"]) == 0
    assert capsys.readouterr().err == ""
    assert "test_offer" not in sys.modules


def test_every_seam_has_its_suites():
    assert tuple(_SUITES) == SEAMS
    for names in _SUITES.values():
        for module, suite in zip(names[::2], names[1::2], strict=True):
            assert hasattr(importlib.import_module(module), suite)


@pytest.mark.parametrize(("name", "code"), [("none", 0), ("nine", 2)])
def test_from_the_command_line(name, code):
    command = [sys.executable, "-m", "core.check", "graphs", name, "-k", "declared"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    if code:
        wanted = "outweigh: error: there is no graphs called 'nine'; did you mean none?\n"
        assert (done.stdout, done.stderr) == ("", wanted)
    else:
        assert done.stdout.endswith("graphs none: 1 ok\n") and done.stderr == ""
