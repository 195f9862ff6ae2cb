"""Options and marks of the suite, and the makers of third-party plugins that several tests use.

`gpu` tests are skipped, with the reason in the summary, where torch sees no CUDA device; `real`
tests without `--models DIR`, some of them without `--texts DIR` too; tests of published traces
without `--traces DIR`. Nothing here or in the tests reaches a network.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# Before torch is imported by anybody: two workers on two cores, one thread each, and no hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("OUTWEIGH_PLUGINS", None)

# The suites say what they saw where a test subclasses them, or has `core.check` run them in here.
pytest.register_assert_rewrite(*(f"core.testing.{s}" for s in ("kv", "fusion", "graphs", "sched")))

ROOT = Path(__file__).resolve().parent.parent
# Their entry points are there where they are installed: test_packages.py does that.
collect_ignore_glob = ["third_party/outweigh-*"]


def pytest_addoption(parser):
    parser.addoption(
        "--models",
        metavar="DIR",
        help="folder with real models, one a sub-folder, for the tests marked `real`",
    )
    parser.addoption(
        "--texts",
        metavar="DIR",
        help="folder of sub-folders with long .txt documents, for `real` tests of quality",
    )
    parser.addoption(
        "--traces",
        metavar="DIR",
        help="folder with the Azure (2023) and Mooncake (conversation) traces, under their names",
    )


def pytest_configure(config):
    for option in ("--models", "--texts", "--traces"):
        folder = config.getoption(option)
        if folder and not Path(folder).is_dir():
            raise pytest.UsageError(f"{option} {folder} is not a folder")


def pytest_collection_modifyitems(config, items):
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _sees_cuda():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="gpu: torch sees no CUDA device"))
    if not config.getoption("--models"):
        for item in items:
            if item.get_closest_marker("real"):
                item.add_marker(pytest.mark.skip(reason="real: needs --models DIR"))


def _sees_cuda():
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def models_dir(request):
    """The folder given by --models, for tests marked `real`."""
    return Path(request.config.getoption("--models"))


@pytest.fixture(scope="session")
def texts_dir(request):
    """The folder given by --texts; a test that asks for it is skipped without."""
    texts = request.config.getoption("--texts")
    if not texts:
        pytest.skip("real: needs --texts DIR")
    return Path(texts)


@pytest.fixture(scope="session")
def traces_dir(request):
    """The folder given by --traces; a test that asks for it is skipped without."""
    traces = request.config.getoption("--traces")
    if not traces:
        pytest.skip("published traces: needs --traces DIR")
    return Path(traces)


@pytest.fixture
def make_dist(tmp_path, monkeypatch):
    """A maker of installed third parties: `make_dist(dist, entry, source)` puts one on sys.path.

    It has version 0.1 and one entry point, to a module called after the distribution; None for
    `source` leaves the module out. Returns the folder, for the PYTHONPATH of other processes.
    """
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    made = []

    def make(dist, entry, source):
        module = dist.replace("-", "_")
        made.append(module)
        info = site / f"{module}-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 0.1\n")
        (info / "entry_points.txt").write_text(f"[outweigh]\n{entry} = {module}\n")
        if source is not None:
            (site / f"{module}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return site

    yield make
    for module in made:
        sys.modules.pop(module, None)
    importlib.invalidate_caches()


@pytest.fixture
def rows(capsys):
    """Test name to the other cells of its row, of what has been printed since the last call."""

    def read():
        found, name = {}, ""
        for line in capsys.readouterr().out.splitlines():
            first, *rest = [cell.strip() for cell in line.split("│")[1:-1]] or [""]
            name = first or name
            if first:
                found[name] = tuple(rest)
            elif rest:  # the row goes on
                found[name] = tuple(
                    f"{a}\n{b}".strip() for a, b in zip(found[name], rest, strict=True)
                )
        return found

    return read


@pytest.fixture(scope="session")
def build_once(tmp_path_factory):
    """`build_once(name, fill)`: a folder that `fill(folder)` fills, once for all xdist workers."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def build(name, fill):
        folder, ready = root / f"built-{name}", root / f"built-{name}.ready"
        with open(root / f"built-{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the others wait here for whoever comes first
            if not ready.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                fill(folder)
                ready.touch()
        return folder

    return build


@pytest.fixture(scope="session")
def wheel(build_once, tmp_path_factory):
    """Built from a copy of the checkout, so that the checkout stays clean; needs no network."""

    def fill(folder):
        source = tmp_path_factory.mktemp("source")
        for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
            shutil.copy(ROOT / name, source / name)
        for name in ("core", "plugins", "evals", "tests"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "wheel"]
        options = ["--no-deps", "--no-build-isolation", "-w", str(folder), "."]
        done = subprocess.run([*pip, *options], cwd=source, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    (made,) = build_once("wheel", fill).glob("*.whl")
    return made
