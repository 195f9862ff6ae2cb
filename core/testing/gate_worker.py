"""What `outweigh gate` runs in a process of its own, over one tree: counts, and bursts of calls.

It is started by its path, from whichever tree holds it, and imports the packages of the tree that
it is given: another revision of them has other modules beside it, or no such file. So it needs the
standard library alone. A line of JSON on stdin is a question, a line on stdout the answer; whatever
the code under test prints goes to stderr.

- `{"open": {"roots": [...], "names": [...]}}`: import packages from these folders, and refuse those
  of these names that come from elsewhere.
- `{"count": TARGET, "with": {...}}`: `{"found": {...}}`, what the function returns.
- `{"prepare": TARGET, "with": {...}}`: the function returns what is to be timed.
- `{"time": TARGET, "calls": n}`: `{"seconds": s}`, of one call: by the clock of this process, or
  the number that each call returns, where it times itself.
- `{"cuda": true}`: `{"found": why there is none, or null}`.

`{"error": ...}` is the answer where the code raises anything, a skip of pytest included.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def target(name: str) -> Callable[..., Any]:
    """The function "module:function" or "FILE.py:function". Raises ImportError where there is
    none."""
    place, _, function = name.rpartition(":")
    if place.endswith(".py"):
        known = f"gated_{Path(place).stem}_{abs(hash(place))}"
        spec = importlib.util.spec_from_file_location(known, place)
        if spec is None or spec.loader is None or not Path(place).is_file():
            raise ImportError(f"there is no file {place}")
        module = sys.modules.get(known) or importlib.util.module_from_spec(spec)
        if known not in sys.modules:
            sys.modules[known] = module
            spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    found = getattr(module, function, None)
    if not callable(found):
        raise ImportError(f"{place} has no function {function!r}")
    return found  # type: ignore[no-any-return]


def no_cuda() -> str | None:
    """Why what needs CUDA is not measured here; None where it is."""
    import torch

    if torch.cuda.is_available():
        return None
    return f"it needs CUDA, and torch {torch.__version__} sees no CUDA device"


class _Worker:
    def __init__(self) -> None:
        self._roots: list[str] = []
        self._names: set[str] = set()
        self._timed: dict[str, Callable[[], float | None]] = {}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if "open" in asked:
            self._roots, self._names = asked["open"]["roots"], set(asked["open"]["names"])
            sys.path[:0] = self._roots
            return {}
        if "cuda" in asked:
            return {"found": no_cuda()}
        if "count" in asked:
            return {"found": self._ours(target(asked["count"])(**asked["with"]))}
        if "prepare" in asked:
            prepared = target(asked["prepare"])(**asked["with"])
            self._timed[asked["prepare"]] = self._ours(prepared)
            return {}
        return {"seconds": _seconds(self._timed[asked["time"]], asked["calls"])}

    def _ours(self, result: Any) -> Any:
        """`result`, if what it was computed with is the tree's."""
        for name in self._names & sys.modules.keys():
            file = getattr(sys.modules[name], "__file__", None)
            if file and not any(Path(file).resolve().is_relative_to(root) for root in self._roots):
                raise ImportError(f"{name} was imported from {file}, which is not in the tree")
        return result


def _seconds(call: Callable[[], float | None], num_calls: int) -> float:
    """Of one call, the mean of `num_calls`."""
    begun = time.perf_counter()
    told = [call() for _ in range(num_calls)]
    took = time.perf_counter() - begun
    own = [seconds for seconds in told if seconds is not None]
    return (sum(own) if own else took) / num_calls


def serve() -> None:
    """Answer until stdin ends."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = _Worker()
    for line in sys.stdin:
        try:
            answer = worker.answer(json.loads(line))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a skip of pytest is no Exception, and no pass either
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
        print(json.dumps(answer), file=channel, flush=True)


if __name__ == "__main__":
    serve()
