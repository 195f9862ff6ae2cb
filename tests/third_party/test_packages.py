"""Whole external packages, installed beside the wheel in a fresh environment, checked and run.

Half of them stand in the folders here, each after a paper; the other half is what `core.new`
writes, before any edit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
WRITTEN = (
    "eval-last-letters",
    "fusion-rms-triton",
    "graphs-doubling",
    "kv-fp8",
    "kv-sinks",
    "sched-hrrn",
    "sched-mlfq",
)
SEAMS = ("eval", "fusion", "graphs", "kv", "sched")
GENERATED = tuple(f"{seam}-my-{seam}" for seam in SEAMS)
# The interpreter wants a process of its own: it must be asked for before triton is imported.
GROUPS = ([n for n in WRITTEN if "triton" not in n], ["fusion-rms-triton"], list(GENERATED))
# It takes as long over these as everything else here.
LEFT_OUT = "Interpreted and (greedy or fuel or weights)"


class Venv:
    """An environment with the wheel, the packages, and what this interpreter has."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder / "venv", folder / "venv" / "bin" / "python"
        self.packages = folder / "packages"

    def make(self, wheel):
        self._call(sys.executable, "-m", "venv", "--without-pip", self.folder)
        self.pip("install", "--no-deps", "--no-index", wheel)
        self._borrow()
        for name in WRITTEN:
            shutil.copytree(HERE / f"outweigh-{name}", self.packages / f"outweigh-{name}")
        commands = [f"{seam} my_{seam} --to {self.packages}" for seam in SEAMS]
        code = "import sys; from core.new import main; [main(a.split()) for a in sys.argv[1:]]"
        done = self.run("-c", code, *commands)
        assert done.returncode == 0, done.stderr
        self.install(*sorted(self.packages.iterdir()))

    def install(self, *packages):
        self.pip("install", "--no-deps", "--no-build-isolation", "--no-index", *packages)

    def pip(self, *argv):
        command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
        self._call(*command, "--python", self.python, *argv)

    def _borrow(self):
        """Let everything be importable that is where this test runs."""
        (site,) = self.folder.glob("lib/python*/site-packages")
        paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
        (site / "borrowed.pth").write_text("\n".join(paths))

    def run(self, *argv, cwd=None, **environment):
        """The interpreter of the environment, with as little of ours as possible."""
        ours = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "PYTHONPATH"))}
        return subprocess.run(
            [str(self.python), *map(str, argv)],
            cwd=cwd or self.folder.parent,
            env={**ours, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
        )

    def _call(self, *argv):
        done = subprocess.run(list(map(str, argv)), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def venv(wheel, build_once):
    return Venv(build_once("venv", lambda folder: Venv(folder).make(wheel)))


def listed(venv):
    """Name to row of `--list`."""
    done = venv.run("-m", "core.run", "--list", "-o", "json")
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)["offers"]}


def test_every_package_is_listed_with_owner_and_version(venv):
    rows = listed(venv)
    for dist in (*WRITTEN, *GENERATED):
        seam, _, name = dist.replace("-", "_").partition("_")
        row = rows[name]
        assert row["owner"] == f"outweigh-{dist} 0.1.0"
        assert row["seam"] == ("-" if seam == "eval" else seam)
        assert row["state"].startswith("ok") and str(venv.folder) in row["origin"]
    assert str(venv.folder) in rows["paged"]["origin"], "the checkout is in the way of the wheel"


def test_importing_a_package_imports_neither_torch_nor_triton(venv):
    modules = [f"outweigh_{dist.replace('-', '_')}" for dist in (*WRITTEN, *GENERATED)]
    code = f"import sys, {', '.join(modules)}; print({{'torch', 'triton'}} & set(sys.modules))"
    done = venv.run("-c", code)
    assert (done.stdout, done.stderr) == ("set()\n", "")


@pytest.mark.parametrize("names", GROUPS, ids=["written", "interpreted", "generated"])
def test_packages_pass_their_own_tests(venv, names):
    """The suites of their seams, their gates, and whatever else they hold themselves to."""
    folders = [f"packages/outweigh-{name}" for name in names]
    options = "-q -p no:cacheprovider -p no:xdist -p no:benchmark --import-mode=importlib".split()
    done = venv.run("-m", "pytest", *options, "-c", f"{folders[0]}/pyproject.toml", *folders,
                    "-k", f"not ({LEFT_OUT})")  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert " passed" in done.stdout and "warning" not in done.stdout, done.stdout[-2000:]


def test_packages_are_checked_by_name(venv):
    """Their whole suites have run by their own tests; here, that the command finds them, and
    passes options on: of the two windows no sequence here outgrows the default one."""
    asked = {
        "kv sinks -k dense": "kv sinks: 1 ok",
        "kv sinks --set num_sinks=2 --set window=8 -k dense": "kv sinks: 1 ok",
        "kv fp8 --set block_size=5 -k dense": "kv fp8: 1 ok",
        "sched mlfq --set levels=1 -k total_order": "sched mlfq: 1 ok",
        "sched hrrn -k total_order": "sched hrrn: 1 ok",
        "graphs doubling -k ladders": "graphs doubling: 1 ok",
        "fusion rms_triton -k runs_of": "fusion rms_triton: 1 ok",
    }
    code = "import sys; from core.check import main; print([main(a.split()) for a in sys.argv[1:]])"
    done = venv.run("-c", code, *asked, TRITON_INTERPRET="1")
    found = [line for line in done.stdout.splitlines() if re.match(r"\w+ \w+: \d", line)]
    assert found == list(asked.values()), done.stdout + done.stderr
    assert done.stdout.endswith("[0, 0, 0, 0, 0, 0, 0]\n")


def test_a_prompt_runs_through_all_of_them(venv):
    command = "--model random:tiny --max-tokens 2 --kv sinks --sched hrrn --fusion rms_triton"
    run = ["-m", "core.run", *command.split(), "--device", "cpu", "-o", "json", "The sea"]
    done = venv.run(*run, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert len(document["results"][0]["token_ids"]) == 2
    owners = {seam: offer["owner"] for seam, offer in document["offers"].items()}
    assert owners["kv"] == "outweigh-kv-sinks 0.1.0" and owners["sched"].endswith("hrrn 0.1.0")
    assert document["versions"]["outweigh-fusion-rms-triton"] == "0.1.0"


def test_graphs_on_a_cpu_are_refused_in_a_sentence(venv):
    done = venv.run("-m", "core.run", *"--device cpu --graphs doubling --dry-run".split())
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.count("\n") == 1 and "graphs 'doubling' captures CUDA graphs" in done.stderr


@pytest.mark.gpu
def test_a_prompt_runs_through_graphs_and_kernel(venv):
    run = "-m core.run --model random:tiny --max-tokens 4 --graphs doubling --fusion rms_triton"
    done = venv.run(*run.split(), "-o", "json", "The sea")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["counters"]["num_graph_steps"] > 0


def test_a_task_is_asked(venv, tmp_path):
    rows = [{"name": "Amy Brown", "letters": "yn"}, {"name": "Jo Li", "letters": "oi"}]
    (tmp_path / "names.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = (
        "-m evals.quality --model random:tiny --device cpu --kv paged --against contiguous "
        "--parts tasks --task last_letters=names.jsonl --answer-tokens 4"
    )
    done = venv.run(*command.split(), cwd=tmp_path)
    assert done.returncode in (0, 3), done.stderr  # 3: so few rows show nothing
    assert "last_letters" in done.stdout


def test_a_package_appears_and_vanishes(venv):
    done = venv.run("-m", "core.new", "sched", "brief", "--to", venv.folder)
    assert done.returncode == 0, done.stderr
    assert "brief" not in listed(venv)
    venv.install(venv.folder / "outweigh-sched-brief")
    assert listed(venv)["brief"]["owner"] == "outweigh-sched-brief 0.1.0"
    venv.pip("uninstall", "-y", "outweigh-sched-brief")
    assert "brief" not in listed(venv)
