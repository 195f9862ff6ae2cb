"""Where tests of Triton kernels run: on CUDA, or without a GPU in Triton's interpreter.

    @pytest.fixture(params=PLACES, ids=str)
    def place(request):
        return request.param

    @pytest.mark.skipif(INTERPRETING, reason=HERE)
    def test_in_the_interpreter():
        run_in_the_interpreter(__file__)

The interpreter needs a process of its own, because TRITON_INTERPRET must be set before triton is
imported. There a test runs in float32 and float16: the interpreter's bfloat16 is wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

try:
    import triton
except ImportError:  # not on every system; its tests skip themselves
    triton = None

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
HERE = "this is the process that the interpreter runs in"
Place = tuple[str, torch.dtype]

_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)
PLACES: list[Any] = (
    [("cpu", torch.float32), ("cpu", torch.float16)]
    if INTERPRETING
    else [
        pytest.param(("cuda", dtype), marks=_GPU)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ]
)
# The interpreter is slow; float16 has the tile sizes of bfloat16.
FEWER_PLACES = PLACES[1:] if INTERPRETING else PLACES


def _version(package: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in package.__version__.split(".")[:2])


needs_loops = pytest.mark.skipif(
    triton is not None and _version(triton) < (3, 7) and _version(np) >= (2, 4),
    reason="the interpreter of triton 3.6 cannot loop to a loaded bound with numpy 2.4",
)


def run_in_the_interpreter(file: str) -> str:
    """Run the tests of `file` in a process that interprets: what pytest says when all pass."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV"))}
    env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib -rf"]
    command = [sys.executable, "-m", "pytest", *options, str(Path(file).resolve())]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "error" not in done.stdout, done.stdout[-2000:]
    return done.stdout


def randn(place: Place, *shape: int, seed: int = 1, scale: float = 1.0) -> torch.Tensor:
    """The same numbers on every device, rounded to the place's dtype."""
    device, dtype = place
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(dtype).to(device)


def ints(place: Place, values: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=place[0])


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """NaN: what a kernel does not write shows."""
    return torch.full(like.shape, torch.nan, dtype=like.dtype, device=like.device)
