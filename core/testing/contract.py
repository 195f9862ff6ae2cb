"""A suite run through pytest in this process, and what became of its clauses: for `core.check`.

Where a clause fails, the smallest input that makes it fail is looked for: the loops of a clause go
from small to large, so that their values where it failed are it, and a random workload is drawn
again with as few requests as still fail in the same line.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import reprlib
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from core.errors import RunError, UserError, reason

if TYPE_CHECKING:
    import pytest

STATES = ("failed", "ok", "expected", "skipped")  # of a clause: the first that a part of it has
_PYTEST = "-q -s -p no:cacheprovider --import-mode=importlib -W ignore".split()
_INI = "[pytest]\nmarkers =\n    gpu: needs a CUDA device\n"


def run_suite(source: str, expression: str, advance: Callable[[str, int, int], None]) -> Contract:
    """What pytest says, in this process, of the suite in the module `source`.

    `expression` is that of pytest's -k. `advance("check", done, all)` is called after each test.
    Raises UserError where the expression selects nothing, RunError where the module does not load.
    """
    import pytest

    # What the environment has in store for pytest is meant for other tests; threads only get in
    # each other's way over tensors as small as these (37 s of kv against 8 s on two cores).
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    isolated = {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    alone = mock.patch.dict(os.environ, isolated, OMP_NUM_THREADS=threads)
    with tempfile.TemporaryDirectory() as folder:
        file, ini = Path(folder, "test_offer.py"), Path(folder, "pytest.ini")
        file.write_text(source, encoding="utf-8")
        ini.write_text(_INI, encoding="utf-8")
        contract, printed = Contract(advance), io.StringIO()
        command = [*_PYTEST, "-c", str(ini), "-k", expression, str(file)]
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), alone:
            code = pytest.main(command, plugins=[contract])
        sys.modules.pop(file.stem, None)  # where pytest would find it again
    if code in (pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR):
        raise UserError(f"-k {expression!r} selects nothing: give a part of the name of a test")
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RunError(f"the suite does not run: {printed.getvalue()}")
    return contract


class Part(NamedTuple):
    """What became of one parametrisation of a clause."""

    name: str
    state: str
    why: str


class Clause(NamedTuple):
    """A test of the suite, in a sentence, and what became of it."""

    sentence: str
    parts: list[Part]

    @property
    def state(self) -> str:
        return min((part.state for part in self.parts), key=STATES.index)

    def why(self) -> str:
        """What the parts in this state say, and which they are if others say something else."""
        said: dict[str, list[str]] = {}
        for name, state, why in self.parts:
            if state == self.state and why:
                said.setdefault(why, []).append(name)
        num_parts = len(self.parts)
        names = {why: "" if len(of) == num_parts else " ".join(of) for why, of in said.items()}
        return "\n".join(f"{of} {why}".strip() for why, of in names.items())


class Contract:
    """A pytest plugin that keeps what became of every clause, by the name of its test."""

    def __init__(self, advance: Callable[[str, int, int], None]) -> None:
        self.clauses: dict[str, Clause] = {}
        self._advance = advance
        self._said: dict[str, str] = {}  # node id of a test that failed -> why
        self._num_done = self._num_items = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._num_items = len(session.items)
        for item in session.items:
            name = item.name.partition("[")[0]
            doc = getattr(getattr(item, "function", None), "__doc__", None)
            sentence = doc or name.removeprefix("test_").replace("_", " ")
            self.clauses.setdefault(name, Clause(" ".join(sentence.split()), []))

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        """Keep what a failure says while its frames are there; the report is made by others."""
        if call.when == "call" and call.excinfo is not None:
            self._said[item.nodeid] = _said(item, call.excinfo.value)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            name, bracket, part = report.nodeid.rpartition("::")[2].partition("[")
            state = "ok" if report.passed else str(report.outcome)
            if report.skipped and hasattr(report, "wasxfail"):
                state = "expected"
            why = self._said.get(report.nodeid, "") if state == "failed" else ""
            self.clauses[name].parts.append(Part(bracket + part, state, why or _why(report)))
            self._num_done += 1
            self._advance("check", self._num_done, self._num_items)

    def rows(self) -> Sequence[Mapping[str, str]]:
        return [
            {"test": name, "state": c.state, "contract": c.sentence, "why": c.why()}
            for name, c in self.clauses.items()
        ]


def _why(report: pytest.TestReport) -> str:
    """The reason for which a test was not tried, or was expected to fail; what pytest itself says
    of it."""
    found: Any = report.longrepr
    text = found[2] if isinstance(found, tuple) else getattr(found, "reprcrash", found)
    text = getattr(report, "wasxfail", "") or str(getattr(text, "message", text) or "")
    return text.strip().partition("\n")[0].removeprefix("Skipped: ")


def _said(item: Any, error: BaseException) -> str:
    """What a test that failed says, and the smallest input found with which it does."""
    code = item.function.__code__
    num_requests, error = _with_fewer_requests(item, error)
    workload = f" (of {num_requests} requests)" if num_requests else ""
    return f"{_message(error)}{_loops(item.function, *_place(error, code))}{workload}"


def _with_fewer_requests(item: Any, error: BaseException) -> tuple[int, BaseException]:
    """As few requests of its random workload as still fail in the same line, and how; found by
    doubling and bisection. 0 and `error` itself where it draws none."""
    code = item.function.__code__
    names = inspect.signature(item.obj).parameters

    def failure(num_requests: int) -> BaseException | None:
        item.instance.most_requests = num_requests
        try:
            item.obj(**{name: item.funcargs[name] for name in names})
        except Exception as found:
            return found if _place(found, code)[1] == _place(error, code)[1] else None
        return None

    fewest = getattr(item.instance, "num_drawn", 0)
    tried, most_passing, size = {fewest: error}, 0, 1
    while fewest - most_passing > 1:
        size = min(size, (most_passing + fewest) // 2)
        if found := failure(size):
            tried[size], fewest = found, size
        else:
            most_passing = size
        size *= 2
    return fewest, tried[fewest]


def _place(error: BaseException, code: CodeType) -> tuple[FrameType | None, int]:
    """The frame of `code` on the way of `error`, and its line."""
    frames = traceback.walk_tb(error.__traceback__)
    return next(((frame, line) for frame, line in frames if frame.f_code is code), (None, 0))


def _message(error: BaseException) -> str:
    """Its first line; of an assertion without words also where the value in it comes from."""
    if not isinstance(error, AssertionError):
        return str(error) if isinstance(error, UserError | RunError) else reason(error)
    first, *rest = str(error).strip().splitlines() or ["an assertion without words"]
    where = next((line.strip() for line in rest if line.startswith(" +  where")), "")
    return f"{first} {where.removeprefix('+').strip()}".strip()


def _loops(function: Callable[..., Any], frame: FrameType | None, line: int) -> str:
    """The values, where they are plain, of the loops that `line` of `function` stands in."""
    if frame is None:
        return ""
    source, first = inspect.getsourcelines(function)
    at = line - first + 1
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(textwrap.dedent("".join(source)))):
        if isinstance(node, ast.For) and node.lineno < at <= (node.end_lineno or 0):
            names = [name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)]
            found |= {name: frame.f_locals[name] for name in names if name in frame.f_locals}
    plain = {n: v for n, v in found.items() if n != "_" and isinstance(v, int | float | str | list)}
    said = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in plain.items())
    return f", with {said}" if said else ""
