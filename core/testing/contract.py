"""What became of every clause of a suite: a pytest plugin that keeps it, for `core.check`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pytest

STATES = ("failed", "ok", "expected", "skipped")  # of a clause: the first that a part of it has


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
