"""The wheel: what is in it, and that it runs where it is installed, beside foreign packages."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = ROOT / "core" / "testing" / "templates"


def call(*argv, cwd, path=None):
    """Run a command with `path` as its PYTHONPATH."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return subprocess.run(
        list(map(str, argv)), cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def pip(*argv, cwd):
    done = call(sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *argv, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def target(wheel, tmp_path_factory):
    """A folder with the wheel installed in it."""
    folder = tmp_path_factory.mktemp("target")
    pip("install", "--no-deps", "--no-index", "--target", folder, wheel, cwd=folder)
    return folder


@pytest.fixture
def decoy(tmp_path):
    """A working directory that has a `core/` of its own."""
    folder = tmp_path / "decoy"
    (folder / "core").mkdir(parents=True)
    (folder / "core" / "__init__.py").write_text("")
    return folder


def test_the_wheel_holds_the_packages_and_nothing_of_the_tests(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {
        "core",
        "plugins",
        "evals",
    }
    expected = [
        path.relative_to(ROOT).as_posix()
        for folder in ("core", "plugins", "evals")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert sorted(set(expected) - set(names)) == []
    assert {f"{package}/py.typed" for package in ("core", "plugins", "evals")} <= set(names)
    assert "plugins/README.md" in names
    templates = [f"core/testing/templates/{p.name}" for p in TEMPLATES.iterdir()]
    assert len(templates) > 10 and set(templates) <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_metadata_of_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        info = next(n for n in archive.namelist() if n.endswith("/METADATA"))
        metadata = archive.read(info).decode()
        scripts = archive.read(info.replace("METADATA", "entry_points.txt")).decode()
    from core import __version__

    assert f"Name: outweigh\nVersion: {__version__}\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Python: >=3.11\n" in metadata
    assert "outweigh = core.run:main" in scripts
    assert "pytest11" not in scripts


def test_it_runs_from_an_empty_folder(target, tmp_path):
    done = call(sys.executable, "-m", "core.run", "--list", cwd=tmp_path, path=[target])
    assert done.returncode == 0, done.stderr
    assert str(target / "plugins" / "builtin.py") in done.stdout
    assert "paged" in done.stdout


def test_it_runs_beside_a_foreign_core(target, decoy):
    script = call(sys.executable, target / "bin" / "outweigh", "list", cwd=decoy, path=[target])
    assert (script.returncode, script.stderr) == (0, "")
    assert "paged" in script.stdout
    module = call(sys.executable, "-P", "-m", "core.run", "--list", cwd=decoy, path=[target])
    assert (module.returncode, module.stdout) == (0, script.stdout)
    hidden = call(sys.executable, "-m", "core.run", "--list", cwd=decoy, path=[target])
    assert hidden.returncode != 0
    assert hidden.stdout == ""
    # Python's own word for it; ours where this interpreter has an editable install as well.
    reasons = ("No module named core.run", "hides outweigh's own package 'core'")
    assert any(reason in hidden.stderr for reason in reasons)


def test_a_mixture_with_a_foreign_core_is_refused(target, decoy):
    """What an editable install makes of such a folder: their core/__init__.py, our core/run.py."""
    (decoy / "core" / "__init__.py").write_text(f"__path__.append({str(target / 'core')!r})")
    done = call(sys.executable, "-m", "core.run", "--list", cwd=decoy, path=[target])
    assert (done.returncode, done.stdout) == (2, "")
    assert "hides outweigh's own package 'core'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_third_parties_are_listed_working_or_broken(target, make_dist, tmp_path):
    make_dist(
        "outweigh-kv-fine",
        "fine",
        """
        from core import hookimpl

        @hookimpl
        def outweigh_register_kv(register):
            register("finer", "plugins.kv.contiguous:Contiguous")
        """,
    )
    site = make_dist("outweigh-kv-torn", "torn", "import nothing_of_that_name")
    done = call(sys.executable, "-m", "core.run", "--list", cwd=tmp_path, path=[target, site])
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("│")] for line in done.stdout.splitlines()]
    named = {row[2]: row for row in rows if len(row) > 2}
    assert named["finer"][1:] == (
        ["kv", "finer", "outweigh-kv-fine 0.1", str(site / "outweigh_kv_fine.py"), "ok", ""]
    )
    assert named["torn"][3] == "outweigh-kv-torn 0.1"
    assert "broken: ModuleNotFoundError: No module named 'nothing_of_that_name'" in named["torn"][5]
    gone = call(sys.executable, "-m", "core.run", "--list", cwd=tmp_path, path=[target])
    assert "finer" not in gone.stdout
