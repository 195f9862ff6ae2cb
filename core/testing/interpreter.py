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

import inspect
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence as Seq
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


def _look_for_builtins_once() -> None:
    """At each launch, and each call of a function by a kernel, the interpreter looks through all
    that triton.language has for what it must replace: a fifth of its time. What is a builtin there
    is the same every time, so here each module and class is looked through once."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    taken = inspect.signature(interpreter._patch_builtin).parameters
    if [*taken] != ["pkg", "builder", "scope"]:  # of another version: slow is right too
        return
    names: dict[Any, list[str]] = {}

    def patch(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in names:
            names[pkg] = [name for name, value in inspect.getmembers(pkg) if is_builtin(value)]
        for name in names[pkg]:
            if is_builtin(member := getattr(pkg, name)):  # and not replaced already
                interpreter._patch_attr(pkg, name, member, builder, scope)

    interpreter._patch_builtin = patch


if INTERPRETING and triton is not None:
    _look_for_builtins_once()


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


def every_pair(*axes: Seq[Any]) -> list[Any]:
    """Rows for `parametrize`, a value of each axis: on a GPU all combinations, in the interpreter
    so many of them that every two values of two axes meet in one."""
    whole = list(itertools.product(*axes))
    if INTERPRETING:
        return _covering(whole)
    return [pytest.param(*map(_value, row), marks=sum(map(_marks, row), ())) for row in whole]


def _covering(whole: Seq[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Greedily: next comes the row with the most pairs that are in none so far."""

    def pairs(row: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(row), 2))

    missing, rows = set().union(*map(pairs, whole)), []
    while missing:
        rows.append(max(whole, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(rows[-1])
    return rows


def _value(given: Any) -> Any:
    return given.values[0] if hasattr(given, "marks") else given


def _marks(given: Any) -> tuple[Any, ...]:
    return tuple(getattr(given, "marks", ()))


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
