"""The seeded bugs as a third party brings them: in an installed package, asked by `core.check`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from core import check

HERE = Path(__file__).resolve().parent
SINKS = HERE.parent / "third_party" / "outweigh-kv-sinks" / "outweigh_kv_sinks.py"


class Verdict(NamedTuple):
    """What `core.check` made of one offer: its exit code, and the cells of its table by test."""

    code: int
    clauses: dict[str, tuple[str, str, str]]  # name, without test_ -> state, sentence, why

    def of(self, state):
        return {name for name, clause in self.clauses.items() if clause[0] == state}


@pytest.fixture(scope="session")
def package(build_once):
    """The folder to put on a path: `outweigh-seeded-bugs` with an entry point for each module of
    `bugs/`, and the package that some of them are made from."""

    def fill(site):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(HERE / "bugs", site / "outweigh_seeded_bugs", ignore=ignored)
        shutil.copy(SINKS, site)
        info = site / "outweigh_seeded_bugs-0.1.dist-info"
        info.mkdir()
        name = "Name: outweigh-seeded-bugs\nVersion: 0.1\n"
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\n{name}")
        modules = sorted(path.stem for path in (HERE / "bugs").glob("*.py"))
        lines = [f"seeded-{name} = outweigh_seeded_bugs.{name}" for name in modules]
        (info / "entry_points.txt").write_text("\n".join(["[outweigh]", *lines]))

    return build_once("seeded-bugs", fill)


@pytest.fixture
def installed(package, monkeypatch):
    """The package, where this process finds it."""
    monkeypatch.syspath_prepend(str(package))
    return package


@pytest.fixture
def checked(installed, rows, capsys):
    """`checked(seam, name, *options)`: the Verdict of `core.check` on an offer of the package."""

    def run(seam, name, *options):
        code = check.main([seam, name, *options])
        cells = {test.removeprefix("test_"): rest for test, rest in rows().items()}
        return Verdict(code, cells)

    return run
