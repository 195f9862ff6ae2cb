"""Regression gates: exact counts held to a file of budgets, and times to another revision.

A file of budgets, `budgets.toml`, names every gate. What it counts is exact, so that a change of a
count is a line of a diff that somebody reads; what it times is compared with another revision in
one session, by `outweigh gate --base REV`, and never with a time that was written down.

    # tests/budgets.toml
    path = "src"                              # what is imported of a tree; default: the tree

    [counts.decode]
    measure = "mine.counted:decode"           # or "FILE.py:function", beside this file
    with = {num_sequences = 4}                # its keyword arguments
    needs = "cpu"                             # or "cuda"; the default is cpu
    budget = {launches = 101, syncs = 0}      # all that it returns, and no more
    torch = {"2.11" = {launches = 103}}       # where another torch counts otherwise

    [times.replay]
    measure = "timed.py:replay"               # a file: what is timed is the same in both trees
    limit = 0.10                              # the share by which it may differ

    [retired]
    encode = "the encoder is gone"            # a gate of the base that this tree need not have

A count is a function that returns names and numbers; `core.testing.counting` has those of this
project, which take the options of an engine. A time is a function that sets up and returns what is
timed, called without arguments; where that returns a number, it is the seconds that it took.

In tests of your own, one subclass runs every gate of a file: counts are compared, times recorded by
pytest-benchmark, for a person to look at.

    from core.testing.gates import GateSuite

    class TestGates(GateSuite):
        budgets = Path(__file__).with_name("budgets.toml")
        device = "cpu"                        # leaves out what needs CUDA; None: nothing

A gate that is missing, was renamed, is skipped or cannot be measured has failed. What needs CUDA is
refused where there is none, with the reason, which is no pass either.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from core.config import versions
from core.errors import UserError
from core.testing import gate_worker

Kind = Literal["counts", "times"]
State = Literal["ok", "failed", "refused", "inconclusive", "left out"]
KINDS: tuple[Kind, ...] = ("counts", "times")
LIMIT = 0.10
_FIELDS = {
    "counts": {"measure", "with", "needs", "budget", "torch"},
    "times": {"measure", "with", "needs", "limit"},
}


class Outcome(NamedTuple):
    """What became of a gate, with the numbers or the reason in `said`."""

    kind: Kind
    name: str
    state: State
    said: str


class Gate(NamedTuple):
    """One entry of a file of budgets. `options` are its `with`."""

    kind: Kind
    name: str
    measure: str
    options: dict[str, Any]
    needs: str
    budget: dict[str, int | float | str]
    by_torch: dict[str, dict[str, int | float | str]]
    limit: float

    def outcome(self, state: State, said: str) -> Outcome:
        return Outcome(self.kind, self.name, state, said)

    def judged(self, found: Mapping[str, Any]) -> Outcome:
        """The counts `found`, with the torch that is installed here, beside the budget."""
        minor = ".".join(str(versions()["torch"]).split(".")[:2])
        budget = {**self.budget, **self.by_torch.get(minor, {})}
        wrong = [
            f"{name} is {found.get(name, 'not counted')}, its budget {budget.get(name, 'missing')}"
            for name in sorted({*budget, *found})
            if name not in budget or name not in found or found[name] != budget[name]
        ]
        if not wrong:
            return self.outcome("ok", ", ".join(f"{k} {v}" for k, v in budget.items()))
        advice = "mend that, or if it is meant change the budget"
        return self.outcome("failed", f"{'; '.join(wrong)}: {advice}")


class Budgets(NamedTuple):
    """A file of budgets: its gates by kind and name, what it retires, and its `path`."""

    file: Path
    gates: dict[tuple[Kind, str], Gate]
    retired: dict[str, str]
    path: str

    @classmethod
    def read(cls, file: Path) -> Budgets:
        """Raises UserError where it is not there or says what it cannot."""
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror}): name another") from error
        return cls.of(text, file)

    @classmethod
    def of(cls, text: str, file: Path) -> Budgets:
        """The file from its `text`, which need not be that on the disk. Raises UserError."""
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"{file} is no TOML ({error}): mend it") from error
        if unknown := document.keys() - {"path", "counts", "times", "retired"}:
            raise UserError(f"{file} has {sorted(unknown)}, which mean nothing: drop them")
        gates: dict[tuple[Kind, str], Gate] = {}
        for kind in KINDS:
            for name, fields in document.get(kind, {}).items():
                gates[kind, name] = _gate(kind, name, fields, file)
        return cls(file, gates, document.get("retired", {}), document.get("path", "."))

    def lost_from(self, base: Budgets) -> list[Outcome]:
        """A failure for each gate that `base` has and this neither has nor retires."""
        return [
            gate.outcome(
                "failed",
                f"the base has a gate '{gate.name}' and here there is none: bring it back, or name "
                "it under [retired] with the reason",
            )
            for key, gate in base.gates.items()
            if key not in self.gates and gate.name not in self.retired
        ]


def _gate(kind: Kind, name: str, fields: Any, file: Path) -> Gate:
    where = f"[{kind}.{name}] of {file}"
    if not isinstance(fields, dict) or not isinstance(fields.get("measure"), str):
        raise UserError(f"{where} does not say what to measure: give measure = 'module:function'")
    if unknown := fields.keys() - _FIELDS[kind]:
        known = ", ".join(sorted(_FIELDS[kind]))
        raise UserError(f"{where} has {sorted(unknown)}, which mean nothing there: {known} do")
    needs, limit = fields.get("needs", "cpu"), fields.get("limit", LIMIT)
    if needs not in ("cpu", "cuda"):
        raise UserError(f"{where} needs {needs!r}: say cpu or cuda")
    if not isinstance(limit, int | float) or not 0 < limit < 1:
        raise UserError(f"{where} has the limit {limit!r}: give a share between 0 and 1")
    if kind == "counts" and not fields.get("budget"):
        raise UserError(f"{where} has no budget: give one, {{}} holds nothing to anything")
    measure = fields["measure"]
    place, _, function = measure.rpartition(":")
    if kind == "times" and not place.endswith(".py"):
        raise UserError(
            f"{where} times {measure!r}, and the base may have another or none: name a FILE.py, "
            "which is the same for both"
        )
    if place.endswith(".py"):
        measure = f"{(file.parent / place).resolve()}:{function}"
    return Gate(
        kind, name, measure, fields.get("with", {}), needs, fields.get("budget", {}),
        fields.get("torch", {}), float(limit),
    )  # fmt: skip


def exit_code(outcomes: list[Outcome]) -> int:
    """1 if a gate has failed, else 3 if one could not be decided, else 0."""
    states = {outcome.state for outcome in outcomes}
    if "failed" in states:
        return 1
    return 3 if states & {"refused", "inconclusive"} else 0


class GateSuite:
    """Every gate of a file of budgets as a test. Subclass it, see above."""

    budgets: Path
    device: str | None = None

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """A test for each gate; of a file without gates none, which pytest reports."""
        for kind in KINDS:
            if f"{kind}_gate" in metafunc.fixturenames:
                gates = [gate for gate in self._gates() if gate.kind == kind]
                metafunc.parametrize(f"{kind}_gate", gates, ids=[gate.name for gate in gates])

    def _gates(self) -> list[Gate]:
        gates = Budgets.read(self.budgets).gates.values()
        return [gate for gate in gates if self.device != "cpu" or gate.needs == "cpu"]

    def test_there_are_gates(self) -> None:
        """A file that lost them all is no pass."""
        assert self._gates(), f"{self.budgets} has no gate for this device"

    def test_counts(self, counts_gate: Gate) -> None:
        """Each count is what its budget says."""
        self._measurable(counts_gate)
        found = gate_worker.target(counts_gate.measure)(**counts_gate.options)
        outcome = counts_gate.judged(found)
        assert outcome.state == "ok", f"{outcome.name}: {outcome.said}"

    def test_times(self, times_gate: Gate, benchmark: Any) -> None:
        """What is timed runs; pytest-benchmark records how long it takes, and judges nothing."""
        self._measurable(times_gate)
        call = gate_worker.target(times_gate.measure)(**times_gate.options)
        benchmark.extra_info["limit"] = times_gate.limit
        benchmark.pedantic(call, rounds=5, warmup_rounds=1)
        assert callable(call)

    def _measurable(self, gate: Gate) -> None:
        reason = gate_worker.no_cuda() if gate.needs == "cuda" else None
        assert reason is None, f"{gate.name} is refused: {reason}; device = 'cpu' leaves it out"
