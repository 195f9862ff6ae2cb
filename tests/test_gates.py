"""Regression gates: what they catch, what they let pass, and what they refuse to pass over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from core.errors import UserError
from core.executor import Executor
from core.registry import Registry
from core.testing import counting, gate
from core.testing.gates import Budgets, exit_code
from evals.speed import revisions
from evals.speed.revisions import AGAIN, BASE, TREE, study
from plugins.kv.paged import Paged
from plugins.sched.fifo import Fifo

ROOT = Path(__file__).resolve().parent.parent
OWN = Budgets.read(ROOT / "tests" / "bench" / "budgets.toml")

# -------- exact counts


def counted(name):
    """The outcome of one of this project's own gates, in this process."""
    found = OWN.gates["counts", name]
    module, _, function = found.measure.partition(":")
    assert module == counting.__name__
    return found.judged(getattr(counting, function)(**found.options))


def planted(monkeypatch, owner, name, extra):
    """`owner.name`, which does `extra` of its result as well."""
    whole = getattr(owner, name)

    def both(self, *args, **kwargs):
        result = whole(self, *args, **kwargs)
        extra(self, result)
        return result

    monkeypatch.setattr(owner, name, both)


def hook_call(self, _):
    self.plan.registry.hooks.call("outweigh_engine_built", self)


@pytest.mark.parametrize(
    ("owner", "name", "extra", "said"),
    [
        (Executor, "_run_step", lambda *_: torch.zeros(1), "launches is 102, its budget 101"),
        (Executor, "_sample", lambda _, ids: ids[0].item(), "syncs is 1, its budget 0"),
        (Executor, "_sample", lambda _, ids: ids.nonzero(), "syncs is 1, its budget 0"),
        (Executor, "_sample", lambda _, ids: ids.copy_(ids), "copies is 4, its budget 3"),
        (counting.Engine, "step", hook_call, "hook_calls is 1, its budget 0"),
    ],
    ids=["launch", "sync", "sync of a shape", "copy", "hook call"],
)
def test_a_planted_extra_is_caught(monkeypatch, owner, name, extra, said):
    planted(monkeypatch, owner, name, extra)
    outcome = counted("decode-paged")
    assert outcome.state == "failed" and outcome.said.startswith(said)


def test_one_that_is_done_every_other_step_is_caught_too(monkeypatch):
    calls = iter(range(1000))
    planted(monkeypatch, Executor, "_run_step", lambda *_: next(calls) % 2 or torch.zeros(1))
    assert "launches is 101.5, its budget 101" in counted("decode-paged").said


def test_a_hook_that_pluggy_calls_is_counted():
    with counting.counted_hooks() as found:
        hook = Registry()._manager.hook
        before = found["outweigh_register_kv"]
        hook.outweigh_register_kv(register=lambda *_: None)
    assert found["outweigh_register_kv"] == before + 1


def test_a_decision_taken_otherwise_changes_the_hash(monkeypatch):
    assert counted("schedule-fifo").state == "ok"
    monkeypatch.setattr(Fifo, "key", lambda self, seq, clock: -seq.order)
    outcome = counted("schedule-fifo")
    assert outcome.state == "failed" and "schedule is " in outcome.said


def test_a_token_that_takes_more_bytes_is_caught(monkeypatch):
    whole = Paged.capacity

    def capacity(self, kv_cache_bytes, facts, limits):
        return whole(self, kv_cache_bytes // 2, facts, limits)

    monkeypatch.setattr(Paged, "capacity", capacity)
    assert "bytes_a_token is 4096, its budget 2048" in counted("cache-paged").said
    with pytest.raises(UserError, match="whatever its bytes: set no room"):
        counting.cache("paged", num_blocks=40)


def test_steps_that_are_not_steady_are_not_counted():
    with pytest.raises(counting.RunError, match="not steady: give the cache more room"):
        counting.decode_steps(num_sequences=3, max_num_seqs=2, device="cpu")


@pytest.mark.gpu
def test_what_the_driver_is_asked_for_on_cuda(monkeypatch):
    steps = {"graphs": "full", "device": "cuda"}
    found = counting.decode_steps(**steps)
    assert found["replays"] == 2 and found["allocations"] == 0 and found["hook_calls"] == 0
    planted(monkeypatch, Executor, "_sample", lambda _, ids: torch.cuda.synchronize())
    assert counting.decode_steps(**steps)["syncs"] == found["syncs"] + 1
    planted(monkeypatch, Executor, "_sample", lambda _, ids: ids.neg())
    assert counting.decode_steps(**steps)["launches"] == found["launches"] + 1


# -------- files of budgets


def of(text):
    return Budgets.of(text, Path("budgets.toml").absolute())


COUNT = '[counts.a]\nmeasure = "m:f"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[counts", "is no TOML"),
        ("[count.a]", r"has \['count'\], which mean nothing"),
        ("[counts.a]\nbudget = {n = 1}", "does not say what to measure"),
        (COUNT, "has no budget"),
        (COUNT + "budget = {n = 1}\nlimit = 0.1", r"has \['limit'\], .* torch, with do"),
        (COUNT + 'budget = {n = 1}\nneeds = "tpu"', "needs 'tpu': say cpu or cuda"),
        ('[times.a]\nmeasure = "m:f"', "times 'm:f', and the base may have another"),
        ('[times.a]\nmeasure = "m.py:f"\nlimit = 2', "the limit 2: give a share"),
    ],
)
def test_a_file_that_says_what_it_cannot_is_refused(text, said):
    with pytest.raises(UserError, match=said):
        of(text)


def test_budgets_are_exact_either_way_and_complete():
    (gate,) = of(COUNT + 'budget = {n = 2}\ntorch = {"1.0" = {n = 3}}').gates.values()
    assert gate.judged({"n": 2}).state == "ok"
    for found, said in [
        ({"n": 1}, "n is 1, its budget 2"),
        ({"n": 2, "m": 1}, "m is 1, its budget missing"),
        ({}, "n is not counted, its budget 2"),
    ]:
        assert gate.judged(found).said.startswith(said)
    minor = ".".join(torch.__version__.split(".")[:2])
    assert gate._replace(by_torch={minor: {"n": 3}}).judged({"n": 3}).state == "ok"


# -------- times, simulated


TIMED = of('[times.a]\nmeasure = "m.py:f"\n[times.b]\nmeasure = "m.py:g"').gates.values()


def simulated(seed, factor, noise=0.03):
    """Rounds of a machine that drifts by 20 % an hour, one run in fifty an outlier; `factor` is
    what the tree's gate a takes."""
    rng = np.random.default_rng(seed)
    clock = iter(range(10_000))

    def trial(arms, i):
        found = {"a": {}, "b": {}}
        for arm in arms:
            drift = 1 + 0.2 * next(clock) / 1000
            for name, by_arm in found.items():
                outlier = 1.3 if rng.random() < 0.02 else 1.0
                slow = factor if (arm, name) == (TREE, "a") else 1.0
                by_arm[arm] = 1e-3 * drift * slow * outlier * rng.lognormal(0, noise)
        return found

    return trial


def codes(factor, num, **kwargs):
    ran = (study(list(TIMED), simulated(seed, factor, **kwargs), 30, silent) for seed in range(num))
    return [exit_code(outcomes) for outcomes, _ in ran]


def silent(*_):
    pass


def test_unchanged_code_passes():
    found = codes(1.0, 40)
    assert found.count(0) >= 38 and 1 not in found


def test_a_slow_down_of_15_percent_is_caught():
    found = codes(1.15, 40)
    assert found.count(1) >= 38 and 0 not in found


def test_what_is_faster_passes_and_what_is_within_the_limit_does_not_fail():
    assert codes(0.8, 10).count(0) >= 9
    assert codes(1.03, 10).count(1) == 0


def test_a_machine_that_is_too_noisy_decides_nothing(capsys):
    assert set(codes(1.0, 5, noise=0.5)) == {3}
    assert "more than 200 of them were needed to see" in capsys.readouterr().err


def test_whose_fault_it_is_that_a_gate_was_not_timed():
    def failing(arm):
        def trial(arms, i):
            found = simulated(0, 1.0)(arms, i)
            if arm in arms:
                found["a"] = {arm: "ImportError: gone"}
            return found

        return trial

    for arm, state in [(TREE, "failed"), (BASE, "inconclusive"), (AGAIN, "inconclusive")]:
        outcomes, _ = study(list(TIMED), failing(arm), 30, silent)
        assert [(o.name, o.state) for o in outcomes] == [("a", state), ("b", "ok")]
        assert outcomes[0].said == f"{arm} was not timed: ImportError: gone"


# -------- somebody else's repository

BUDGETS = """
[counts.rows]
measure = "mine:rows"
with = {num = 3}
budget = {rows = 3}

[times.call]
measure = "timed.py:call"
"""
MINE = "COST = 1.0\n\ndef rows(num):\n    return {'rows': num}\n"
CALL = """
import random
import mine

def call():
    return lambda: mine.COST * random.lognormvariate(0, 0.005)
"""
TIMES = '[times.b]\nmeasure = "timmed.py:now"\n\n[counts.rows]'
TEST = """
from pathlib import Path
from core.testing.gates import GateSuite

class TestGates(GateSuite):
    budgets = Path(__file__).with_name("budgets.toml")
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A repository with a package `mine`, its gates, and one commit; the current folder."""
    for name, text in {"budgets.toml": BUDGETS, "mine.py": MINE, "timed.py": CALL}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "test_theirs.py").write_text(TEST)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(revisions, "PILOT", 4)
    monkeypatch.setattr(revisions, "BURSTS", 3)
    return tmp_path


def git(folder, *command):
    named = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *command]
    subprocess.run(named, cwd=folder, check=True, capture_output=True)


def commit(folder):
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "x")


def run(*more):
    return gate.main(["--budgets", "budgets.toml", "--rounds", "4", *more])


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_an_unchanged_tree_passes_and_leaves_nothing_behind(theirs, capsys):
    assert run("--base", "HEAD", "--json", "gate.json") == 0
    out, err = capsys.readouterr()
    assert "rows 3" in out and "no change: " in out
    assert err.startswith("A/A, call: pairs of the same arm differ by ")
    found = json.loads(Path("gate.json").read_text())
    assert found["exit_code"] == 0 and found["versions"]["python"]
    times = found["seconds"]["call"]
    assert set(times) == {BASE, AGAIN, TREE} and all(0.9 < s < 1.1 for s in times[TREE])
    listed = subprocess.run(["git", "worktree", "list"], capture_output=True, text=True)
    assert len(listed.stdout.splitlines()) == 1


def test_a_tree_that_is_slower_by_15_percent_fails(theirs, capsys):
    edit(theirs / "mine.py", "1.0", "1.15")
    assert run("--base", "HEAD") == 1
    assert "slower: 1.1" in " ".join(capsys.readouterr().out.split())


def test_counts_alone_need_no_base(theirs, capsys):
    edit(theirs / "mine.py", "'rows': num", "'rows': num + 1")
    assert run("--counts") == 1
    assert "rows is 4, its budget 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "code", "said"),
    [
        ("[counts.rows]", "[counts.lines]", 1, "the base has a gate 'rows'"),
        ("[counts.rows]", '[retired]\nrows = "why"\n[counts.lines]', 0, "rows 3"),
        ("mine:rows", "mine:lines", 1, "mine has no function 'lines'"),
        ("[counts.rows]", '[counts.rows]\nneeds = "cuda"', 3, "it needs CUDA, and torch"),
        ("[counts.rows]", TIMES, 1, "it cannot be timed: ImportError: there is no file"),
        (
            "[counts.rows]",
            TIMES.replace("timmed.py:n", "timed.py:N"),
            1,
            "timed.py has no function 'Now'",
        ),
    ],
    ids=["renamed", "retired", "gone", "refused", "no file", "no function"],
)
def test_a_gate_that_is_missing_is_no_pass(theirs, capsys, old, new, code, said):
    edit(theirs / "budgets.toml", BUDGETS[BUDGETS.index("[times") :], "")
    commit(theirs)
    edit(theirs / "budgets.toml", old, new)
    found = run("--base", "HEAD")
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert (found, said in out) == (code, True), out


def test_a_skip_is_a_failure(theirs, capsys):
    edit(theirs / "mine.py", "return {", "import pytest\n    pytest.skip('no')\n    return {")
    assert run("--counts") == 1
    assert "it was not counted: Skipped: no" in capsys.readouterr().out


def test_what_the_caller_can_mend(theirs):
    for command, said in [
        ([], "there is no base to compare times with: give --base REV, or --counts"),
        (["--base", "nowhere"], "git rev-parse .* failed .*: name a commit of this repository"),
        (["--counts", "--budgets", "none.toml"], r"none.toml cannot be read \(No such file"),
        (["--counts", "--json", "no/x.json"], "no/x.json cannot be written, its folder"),
        (["--base", "HEAD", "--rounds", "3"], "3 rounds are too few to judge by"),
    ]:
        with pytest.raises(UserError, match=said):
            run(*command)


def test_code_from_elsewhere_is_not_taken_for_the_tree(theirs, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("site")
    (elsewhere / "mine.py").write_text(MINE)
    edit(theirs / "timed.py", "import mine", f"import sys\nsys.path.insert(0, {str(elsewhere)!r})")
    edit(theirs / "timed.py", "def call", "import mine\n\ndef call")
    with gate.Worker(theirs, ".") as worker:
        answer = worker.ask(prepare=f"{theirs / 'timed.py'}:call", **{"with": {}})
    assert answer["error"].startswith("ImportError: mine was imported from")
    assert answer["error"].endswith("which is not in the tree")


def test_a_process_finds_what_pythonpath_leads_to(theirs, tmp_path_factory, monkeypatch):
    """Behind the tree, so that packages which are installed nowhere else are there."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "elsewhere.py").write_text("WIDTH = 5\n")
    (folder / "mine.py").write_text("not python")
    (theirs / "needs.py").write_text(
        "import elsewhere\n\ndef f():\n    return {'n': elsewhere.WIDTH}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    with gate.Worker(theirs, ".") as worker:
        assert worker.ask(count="needs:f", **{"with": {}}) == {"found": {"n": 5}}
        assert worker.ask(count="mine:rows", **{"with": {"num": 3}}) == {"found": {"rows": 3}}


def test_a_process_that_dies_is_an_answer(theirs):
    (theirs / "dies.py").write_text("import os\n\ndef f():\n    os._exit(7)\n")
    with gate.Worker(theirs, ".") as worker:
        assert worker.ask(count="dies:f", **{"with": {}}) == {
            "error": "the process ended with status 7"
        }


def test_their_own_tests_run_them(theirs):
    more = '[counts.wrong]\nmeasure = "mine:rows"\nwith = {num = 3}\nbudget = {rows = 4}\n'
    (theirs / "budgets.toml").write_text(BUDGETS + more)
    command = "-q -p no:cacheprovider --benchmark-json times.json test_theirs.py".split()
    alone = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    paths = os.pathsep.join([str(ROOT), str(theirs)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *command],
        env={**alone, "PYTHONPATH": paths}, capture_output=True, text=True,
    )  # fmt: skip
    assert "rows is 3, its budget 4" in done.stdout
    assert "1 failed, 3 passed" in done.stdout, done.stdout
    (recorded,) = json.loads((theirs / "times.json").read_text())["benchmarks"]
    assert recorded["name"] == "test_times[call]" and recorded["stats"]["rounds"] == 5
    assert recorded["extra_info"] == {"limit": 0.1}
