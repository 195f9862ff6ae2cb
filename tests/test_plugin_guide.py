"""`plugins/README.md`: its commands and its code run, and it has every hook, method and fact."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from core import hookspecs, seams
from core.conform import fact_types
from core.registry import HOOKS
from core.seams import PROTOCOLS, SEAMS
from core.testing.check import _SUITES

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "plugins" / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", GUIDE, re.S)


def section(heading):
    """What stands below a heading of the second level."""
    return re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", GUIDE, re.M | re.S)[1]


def signature(function):
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    return f"{function.__name__}({', '.join(names)})"


def rows(text):
    """The signatures in the first column of a table."""
    return re.findall(r"^\| `(\w+\([^`]*\))` \|", text, re.M)


def methods(seam):
    found = vars(PROTOCOLS[seam]).values()
    return [f for f in found if inspect.isfunction(f) and not f.__name__.startswith("_")]


@pytest.mark.parametrize("seam", SEAMS)
def test_every_method_is_documented_with_its_signature(seam):
    assert sorted(rows(section(seam))) == sorted(map(signature, methods(seam)))


@pytest.mark.parametrize("seam", SEAMS)
def test_every_optional_method_is_called_optional(seam):
    table = section(seam)
    for method in methods(seam):
        (row,) = re.findall(rf"^\| `{method.__name__}\(.*$", table, re.M)
        assert ("| optional" in row) == getattr(method, "optional", False), row


@pytest.mark.parametrize("seam", SEAMS)
def test_the_clauses_to_try_first_are_there(seam):
    """Each word of a `-k` is part of the name of one, and of fewer than all."""
    (row,) = re.findall(rf"^\| {seam} \| (`\".*) \|$", GUIDE, re.M)
    module, suite, *_ = _SUITES[seam]
    clauses = [n for n in dir(getattr(importlib.import_module(module), suite)) if "test_" in n]
    words = " or ".join(re.findall(r'`"(.*?)"`', row)).split(" or ")
    assert len(words) > 2
    for word in words:
        assert 0 < sum(word in clause for clause in clauses) < 4, word


def test_every_hook_is_documented_with_its_signature():
    wanted = [signature(getattr(hookspecs, name)) for name in HOOKS]
    assert rows(section("Hooks")) == wanted


@pytest.mark.parametrize("seam", SEAMS)
def test_every_fact_is_documented(seam):
    facts = re.search(r"^Facts: (.*?)\n\n", section(seam), re.M | re.S)[1]
    assert [fact for fact in fact_types(seam) if f"`{fact}`" not in facts] == []


def test_the_state_of_a_kv_manager_is_documented():
    state = [n for n, t in seams.KVManager.__annotations__.items() if "ClassVar" not in t]
    assert [name for name in state if f"`{name}`" not in section("kv")] == []


def test_every_api_number_is_the_one_documented():
    assert "(each is 1)" in section("Every offer") and set(seams.API.values()) == {1}


def test_the_life_cycle_has_every_hook_and_method():
    drawn = section("Life cycle")
    for seam in SEAMS:
        # Those that are asked for beside a run.
        apart = {"gather", "check_integrity", "usage", "restore", "rollback"}
        for method in methods(seam):
            name = method.__name__
            assert f"{seam}.{name}" in drawn or name in apart, f"{seam}.{name}"
    others = [hook for hook in HOOKS if "_register_" not in hook]
    assert [hook for hook in others if hook not in drawn] == []


def test_living_examples_are_alive():
    named = re.findall(r"`((?:plugins|tests|evals|core)/[\w./-]+\.py)`", GUIDE)
    assert len(named) > 12
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_links_lead_somewhere():
    headings = {h.lower().replace(" ", "-") for h in re.findall(r"^## (.*)$", GUIDE, re.M)}
    assert set(re.findall(r"\(#([\w-]+)\)", GUIDE)) <= headings


def run(command, cwd):
    words = shlex.split(command)
    assert words[0] == "python", command
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *words[1:]], cwd=cwd, env=environment, capture_output=True, text=True
    )


def test_the_commands_run_in_their_order(tmp_path):
    """But for pip: an installed package is what tests/third_party is about."""
    blocks = re.findall(r"```sh\n(.*?)```", GUIDE, re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    (install,) = (line for line in lines if line.startswith("pip "))
    package = tmp_path / install.rpartition(" ")[2]
    done = run(lines[0], tmp_path)
    assert done.returncode == 0 and package.is_dir(), done.stderr
    (module,) = package.glob("*.py")
    for line in lines[1:]:
        if line != install:
            brought = f" -p {module}" if "mine" in line or "--list" in line else ""
            part = " -k order" if "core.check" in line and "-k" not in line else ""  # is enough
            done = run(line + brought + part, tmp_path)
            assert done.returncode == 0 and done.stdout, f"{line}: {done.stderr}{done.stdout}"


def test_the_code_runs_in_its_order(tmp_path):
    """A block that opens with `# FILE   COMMAND` is saved as FILE and COMMAND is run."""
    assert len(CODE) == len(SEAMS) + 2
    for code in CODE:
        name, command = re.match(r"# (\S+\.py)   (.+)\n", code).groups()
        (tmp_path / name).write_text(code, encoding="utf-8")
        done = run(command, tmp_path)
        assert done.returncode == 0 and done.stdout, f"{name}: {done.stderr}{done.stdout}"


def test_the_code_is_clean(tmp_path):
    for i, code in enumerate(CODE):
        (tmp_path / f"block_{i}.py").write_text(code, encoding="utf-8")
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    own = ["--ignore", "E501,I001"]  # the command that a block opens with; files of this guide
    command = [sys.executable, "-m", "ruff", "check", *config, *own, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
