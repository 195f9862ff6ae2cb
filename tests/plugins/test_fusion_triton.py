"""`triton` through the conformance suite: on a GPU, and without one in Triton's interpreter.

The interpreter runs in a process of its own, because TRITON_INTERPRET must be set before triton is
imported; in float32, and with shorter steps, since it runs a program at a time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core.testing.fusion import FusionGpuSuite, FusionSuite

ROOT = Path(__file__).parents[2]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETING:

    class TestTritonInterpreted(FusionSuite):
        plugin = "triton"
        kinds = ("qwen2.5-yarn", "qwen3")
        caches = ("paged",)
        token_counts = (1, 3)

else:

    def test_in_the_interpreter():
        pytest.importorskip("triton", reason="needs triton, which is not installed here")
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV"))}
        env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib -rf"]
        command = [sys.executable, "-m", "pytest", *options, __file__]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]

    class TestTriton(FusionGpuSuite):
        plugin = "triton"

    class TestTritonFloat32(FusionGpuSuite):
        plugin = "triton"
        dtype = torch.float32
        tolerance = 1e-5
