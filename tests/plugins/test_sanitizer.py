"""compute-sanitizer over every kernel: no access outside of an allocation, no read of unwritten
memory.

By hand, on a machine with a GPU:

    export PYTHONPATH=. PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck --padding 4096 --report-api-errors no \\
        python tests/plugins/every_kernel.py kernels engine

Without that variable all tensors lie in few large allocations, and an overrun of one into another
is no error. Captured graphs need torch's pool: they are run with it, and only what leaves the pool
shows.

`initcheck` is for the wrappers alone, whose own scratch nobody fills. In an engine rows of padding
compute with whatever the memory held, by design. `racecheck` looks at shared memory, which Triton's
compiler lays out and synchronises; what programs of these kernels share is in global memory, where
it does not look.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton, which is not installed here")

from core.testing.interpreter import HERE, INTERPRETING, needs_loops  # noqa: E402

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("every_kernel.py")
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
# torch and Triton raise for calls that fail, and make some whose failure is an answer.
MEMCHECK = ["memcheck", "--padding", "4096", "--report-api-errors", "no"]

pytestmark = pytest.mark.skipif(INTERPRETING, reason=HERE)


def run(command, timeout, **extra):
    """Exit status, and all that was printed."""
    ours = ("PYTEST", "COV", *UNCACHED)
    env = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    path = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    env |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", **extra}
    done = subprocess.run(
        command, env=env, cwd=ROOT, timeout=timeout, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def compute_sanitizer():
    """Where the tool is; skips where it is not installed."""
    folders = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [f"{folder}/bin" for folder in (*folders, "/usr/local/cuda")]
    found = shutil.which("compute-sanitizer")
    found = found or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if not found:
        pytest.skip(f"compute-sanitizer is neither on PATH nor in {', '.join(folders)}")
    return found


def sanitized(tool, *parts, **extra):
    """As `run`, of parts of the script under a tool; skips where it cannot watch the device."""
    # Triton starts the assembler, in which there is nothing to watch.
    command = [compute_sanitizer(), "--tool", *tool, "--target-processes", "application-only"]
    command += ["--error-exitcode", "99", sys.executable, str(SCRIPT), *parts]
    status, output = run(command, timeout=300, **extra)
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer cannot watch this device: 'Device not supported'")
    return status, output


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "parts", "extra"),
    [
        (MEMCHECK, ["kernels", "engine"], UNCACHED),
        (MEMCHECK, ["graphs"], {}),
        (["initcheck"], ["kernels"], UNCACHED),
    ],
    ids=["memcheck", "memcheck-graphs", "initcheck"],
)
def test_no_error_in_any_kernel(tool, parts, extra):
    status, output = sanitized(tool, *parts, **extra)
    print(output[-2000:])
    assert status == 0, output[-8000:]
    assert "ERROR SUMMARY: 0 errors" in output
    for part in parts:
        assert f"{part}: launched" in output


@pytest.mark.gpu
@pytest.mark.slow
def test_an_overrun_is_seen():
    """Of one block behind a cache, so that no errors means something."""
    status, output = sanitized(MEMCHECK, "overrun", **UNCACHED)
    assert status != 0, output[-8000:]
    assert "Invalid __global__ write" in output and "_write_kernel" in output, output[-8000:]


@needs_loops
def test_the_script_in_the_interpreter():
    status, output = run([sys.executable, str(SCRIPT)], timeout=200, TRITON_INTERPRET="1")
    assert status == 0, output[-4000:]
    launched, known = re.search(r"kernels: launched (\d+) of (\d+) kernels", output).groups()
    assert launched == known == str(len(kernel_names()))


def kernel_names():
    """By the convention of their names; helpers on the device have none of it."""
    sources = [path.read_text() for path in (ROOT / "plugins").rglob("*.py")]
    return [name for source in sources for name in re.findall(r"def (\w+_kernel)\(", source)]


def load_script():
    """The module, new: its parts may be replaced."""
    spec = importlib.util.spec_from_file_location("every_kernel", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_forgotten_kernel_is_named(monkeypatch):
    """Found by who calls whom, whatever it is called; launches alone count."""
    script = load_script()
    monkeypatch.setattr(script.torch.cuda, "synchronize", lambda: None)
    known = script.kernels()
    assert sorted(name.rpartition(".")[2] for name in known) == sorted(kernel_names())

    def all_but_one():
        for name, kernel in known.items():
            if not name.endswith("._best_kernel"):
                kernel[(1,)]()

    for kind in {type(kernel) for kernel in known.values()}:
        monkeypatch.setattr(kind, "run", lambda self, *, grid, warmup: None)
    monkeypatch.setitem(script.PARTS, "kernels", all_but_one)
    assert script.main(["kernels"]) == (
        "never launched: plugins.fusion.kernels.sample._best_kernel; give each a launch here"
    )
