"""A suite run through pytest in this process, and what became of its clauses: for `core.check`."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from core.errors import RunError, UserError

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
        self._num_done = self._num_items = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._num_items = len(session.items)
        for item in session.items:
            name = item.name.partition("[")[0]
            doc = getattr(getattr(item, "function", None), "__doc__", None)
            sentence = doc or name.removeprefix("test_").replace("_", " ")
            self.clauses.setdefault(name, Clause(" ".join(sentence.split()), []))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            name, bracket, part = report.nodeid.rpartition("::")[2].partition("[")
            state = "ok" if report.passed else str(report.outcome)
            if report.skipped and hasattr(report, "wasxfail"):
                state = "expected"
            self.clauses[name].parts.append(Part(bracket + part, state, _why(report)))
            self._num_done += 1
            self._advance("check", self._num_done, self._num_items)

    def rows(self) -> Sequence[Mapping[str, str]]:
        return [
            {"test": name, "state": c.state, "contract": c.sentence, "why": c.why()}
            for name, c in self.clauses.items()
        ]


def _why(report: pytest.TestReport) -> str:
    """The first line of what a failed assertion says, or the reason for which it was not tried."""
    found: Any = report.longrepr
    text = found[2] if isinstance(found, tuple) else getattr(found, "reprcrash", found)
    text = getattr(report, "wasxfail", "") or str(getattr(text, "message", text) or "")
    first = text.strip().partition("\n")[0]
    return first.removeprefix("AssertionError: ").removeprefix("Skipped: ")
