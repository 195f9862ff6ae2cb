"""`outweigh new`: what it writes works as it stands, and what is there already stays."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from core import Engine, SamplingParams, check, new
from core.errors import UserError
from core.registry import Registry
from evals.quality.tasks import known_tasks

SEAMS = ("kv", "sched", "fusion", "graphs", "eval")


def written(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_a_package(tmp_path, capsys):
    assert new.main(["kv", "paged-fp8", "--to", str(tmp_path)]) == 0
    package = tmp_path / "outweigh-kv-paged-fp8"
    assert written(package) == [
        "README.md",
        "outweigh_kv_paged_fp8.py",
        "pyproject.toml",
        "tests/conftest.py",
        "tests/test_paged_fp8.py",
    ]
    project = (package / "pyproject.toml").read_text()
    entry = '[project.entry-points.outweigh]\npaged_fp8 = "outweigh_kv_paged_fp8"\n'
    assert entry in project and 'name = "outweigh-kv-paged-fp8"' in project
    assert "class PagedFp8:" in (package / "outweigh_kv_paged_fp8.py").read_text()
    assert "python -m core.check kv paged_fp8" in capsys.readouterr().out


@pytest.fixture
def single_file(tmp_path):
    """A maker of single files, by seam."""

    def make(seam):
        assert new.main([seam, f"my_{seam}", "--single-file", "--to", str(tmp_path)]) == 0
        assert written(tmp_path)[-1].endswith(".py")
        return str(tmp_path / f"my_{seam}.py")

    return make


def test_single_files_run(single_file):
    seams = ("kv", "sched", "fusion")
    files = [single_file(seam) for seam in seams]
    chosen = {seam: f"my_{seam}" for seam in seams}
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    found = []
    for options in ({"kv": "contiguous"}, {"plugins": files, **chosen}):
        small = {"max_model_len": 64, "kv_cache_bytes": 1 << 22, "device": "cpu"}
        with Engine(model="random:tiny", **small, **options) as engine:
            found.append([o.token_ids for o in engine.generate(["The sea", "A"], params)])
    assert found[0] == found[1]
    assert engine.plan.kv.owner.origin == files[0]


def test_single_files_of_graphs_and_tasks(single_file, capsys):
    assert check.main(["graphs", "my_graphs", "-p", single_file("graphs"), "-k", "ladders"]) == 0
    assert "graphs my_graphs: 1 ok" in capsys.readouterr().out
    assert known_tasks([single_file("eval")])["my_eval"].right(" Yes.", "yes")


def test_it_says_what_to_do_next(tmp_path, capsys):
    new.main(["sched", "mine", "--single-file", "--to", str(tmp_path)])
    assert "python -m core.check sched mine -p mine.py" in capsys.readouterr().out


@pytest.mark.parametrize("option", [[], ["--single-file"]])
def test_nothing_is_overwritten(tmp_path, option):
    command = ["sched", "mine", "--to", str(tmp_path), *option]
    new.main(command)
    (file,) = tmp_path.glob("mine.py") if option else tmp_path.glob("*/README.md")
    file.write_text("my own")
    with pytest.raises(UserError, match="is there already: remove it"):
        new.main(command)
    assert file.read_text() == "my own"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("kw mine", "there is no seam 'kw'; did you mean kv?"),
        ("kv 8bit", "'8bit' cannot name a Python module and an offer"),
        ("kv ../mine", "'../mine' cannot name"),
        ("kv lambda", "'lambda' cannot name"),
        ("kv paged", "kv 'paged' is there already, of outweigh"),
        ("kv auto", "'auto' cannot name"),
    ],
)
def test_what_cannot_be_made_is_one_sentence(tmp_path, command, message):
    with pytest.raises(UserError, match=re.escape(message)):
        new.main([*command.split(), "--to", str(tmp_path)])
    assert written(tmp_path) == []


def test_what_is_written_is_clean(tmp_path):
    """As ruff sees it, with the rules of this project, whatever the length of a name."""
    for seam in SEAMS:
        for name in ("a", "a_name_of_twenty_four_ch"):
            new.main([seam, name, "--to", str(tmp_path)])
    root = Path(new.__file__).parent.parent
    rules = ["--config", str(root / "pyproject.toml"), "--no-cache"]
    own = ["--config", 'lint.isort.known-first-party=["core","evals","plugins"]']
    for command in (["check", *rules, *own], ["format", "--check", *rules]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, str(tmp_path)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_written_is_typed(tmp_path):
    """As mypy sees it, as strictly as the core, and after the core: without its cache of torch
    this takes a minute, with it 5 s."""
    for seam in SEAMS:
        new.main([seam, "mine", "--to", str(tmp_path)])
    good = sorted(str(path) for path in tmp_path.glob("*/outweigh_*.py"))
    wrong = tmp_path / "wrong.py"
    wrong.write_text(Path(good[-1]).read_text().replace("return seq.order", "return 'soon'"))
    root = Path(new.__file__).parent.parent
    command = [sys.executable, "-m", "mypy", "--strict", *good, str(wrong)]
    environment = {**os.environ, "MYPYPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    (error, summary) = done.stdout.splitlines()
    assert error.startswith(str(wrong)) and error.endswith("[return-value]"), done.stdout
    assert summary == "Found 1 error in 1 file (checked 6 source files)", done.stdout


def test_how_a_package_is_tested_and_typed(tmp_path):
    """`pip install -e .[test]` takes what the suites take; mypy is as strict as here."""
    new.main(["sched", "mine", "--to", str(tmp_path)])
    written = tomllib.loads((tmp_path / "outweigh-sched-mine" / "pyproject.toml").read_text())
    assert written["project"]["optional-dependencies"] == {"test": ["outweigh[test]"]}
    root = tomllib.loads((Path(new.__file__).parent.parent / "pyproject.toml").read_text())
    assert written["tool"]["mypy"] == {
        "strict": root["tool"]["mypy"]["strict"],
        "plugins": root["tool"]["mypy"]["plugins"],
        "untyped_calls_exclude": ["torch"],
    }


def test_nothing_is_left_of_the_templates(tmp_path):
    for seam in SEAMS:
        new.main([seam, "mine", "--to", str(tmp_path)])
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or "$" not in path.read_text(), path


def test_a_generated_offer_is_found_by_its_name(single_file):
    registry = Registry([single_file("graphs")])
    assert registry.find("graphs", "my_graphs").load().captures
