"""`outweigh check SEAM NAME`: the conformance suite of a seam against one offer.

The suite runs through pytest in this process, as if somebody had subclassed it for the offer. Exit
codes: 0 every clause holds; 1 one fails, or none could be tried; 2 for what the caller can mend.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from core import show
from core.config import did_you_mean, parse_setting, validated
from core.errors import RunError, UserError
from core.registry import Registry
from core.seams import SEAMS

if TYPE_CHECKING:
    import pytest

_SUITES = {  # on the host, on a GPU
    "kv": ("core.testing.kv:KVManagerSuite", "core.testing.kv_gpu:KVManagerGpuSuite"),
    "fusion": ("core.testing.fusion:FusionSuite", "core.testing.fusion:FusionGpuSuite"),
    "graphs": ("core.testing.graphs:GraphSuite", "core.testing.graphs_gpu:GraphGpuSuite"),
    "sched": ("core.testing.sched:SchedulerSuite", ""),
}
_MODULE = """
import pytest
pytest.register_assert_rewrite("core.testing")
from core.registry import Registry
from {module} import {suite} as Suite

class TestOffer(Suite):
    offer = Registry({plugins!r}).find({seam!r}, {name!r}).load()
    config = {config!r}
"""
_OPTIONS = "-q -s -p no:cacheprovider --import-mode=importlib -W ignore".split()
_INI = "[pytest]\nmarkers =\n    gpu: needs a CUDA device\n"
_FITS = "test_fits_the_seam"  # holds for an offer that never runs
_STATES = ("failed", "ok", "expected", "skipped")  # of a clause: the first that a part of it has


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; outweigh check --help shows every option")


def main(argv: Sequence[str]) -> int:
    """Check what the arguments name and print a row for each clause of its contract."""
    args = _parser().parse_args(argv)
    if args.seam not in SEAMS:
        raise UserError(f"there is no seam '{args.seam}'{did_you_mean(args.seam, SEAMS, 'seams')}")
    if importlib.util.find_spec("pytest") is None:
        raise UserError("the suites need pytest, which is not installed: install outweigh[dev]")
    offer: Any = Registry(args.plugins).find(args.seam, args.name).load()
    config = _settings(args.seam, args.set)
    validated(offer.Config, config, f"{args.seam} '{args.name}'", f"{args.seam}.")
    module, _, suite = _SUITES[args.seam][args.gpu].partition(":")
    if args.gpu:
        _demand_cuda(args.seam, suite)
    given = {"seam": args.seam, "name": args.name, "plugins": args.plugins, "config": config}
    contract = _run(_MODULE.format(module=module, suite=suite, **given), args.k)
    show.print_rows(contract.rows(), sys.stdout)
    states = contract.states()
    counts = {state: list(states.values()).count(state) for state in _STATES}
    print(
        f"{args.seam} {args.name}: {', '.join(f'{n} {state}' for state, n in counts.items() if n)}"
    )
    if counts["failed"]:
        return 1
    if counts["skipped"] and not {name for name in states if states[name] == "ok"} - {_FITS}:
        raise RunError(f"{args.seam} '{args.name}' could not be tried here: see the reasons above")
    return 0


def _parser() -> Parser:
    parser = Parser(prog="outweigh check", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("seam", metavar="SEAM", help=", ".join(SEAMS))
    add("name", metavar="NAME", help="a registered offer: outweigh list shows them")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="option of the offer")
    add("-p", dest="plugins", action="append", default=[], metavar="PLUGIN", help="as in run")
    add("--gpu", action="store_true", help="the suite for CUDA; a missing GPU is a failure")
    add("-k", default="", metavar="EXPR", help="only the clauses that match, as in pytest")
    return parser


def _settings(seam: str, given: Sequence[str]) -> dict[str, Any]:
    """FIELD=VALUE as in `--set SEAM.FIELD=VALUE` of a run; the seam may be named here too."""
    pairs = (parse_setting(f"{seam}.{text.removeprefix(f'{seam}.')}") for text in given)
    return {key.removeprefix(f"{seam}."): value for key, value in pairs}


def _demand_cuda(seam: str, suite: str) -> None:
    import torch

    if not suite:
        raise UserError(f"{seam} offers run on the host alone: drop --gpu")
    if not torch.cuda.is_available():
        raise RunError(
            "--gpu was asked for and torch sees no CUDA device: drop it or mend the driver"
        )


def _run(source: str, expression: str) -> _Contract:
    """What pytest says of the suite in `source`."""
    import pytest

    with tempfile.TemporaryDirectory() as folder, show.progress_bar(sys.stderr) as advance:
        file, ini = Path(folder, "test_offer.py"), Path(folder, "pytest.ini")
        file.write_text(source, encoding="utf-8")
        ini.write_text(_INI, encoding="utf-8")
        contract, printed = _Contract(advance), io.StringIO()
        command = [*_OPTIONS, "-c", str(ini), "-k", expression, str(file)]
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = pytest.main(command, plugins=[contract])
        sys.modules.pop(file.stem, None)  # where pytest would find it for the next one
    if code == pytest.ExitCode.NO_TESTS_COLLECTED or code == pytest.ExitCode.USAGE_ERROR:
        raise UserError(f"-k {expression!r} selects no clause: give a part of a test's name")
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RunError(f"the suite does not run: {printed.getvalue()}")
    return contract


class _Contract:
    """A pytest plugin that keeps what became of every clause: a test of the suite, by its name.

    A clause may be tested in several parts, one a parametrisation.
    """

    def __init__(self, advance: show.Progress) -> None:
        self._advance = advance
        self._clauses: dict[str, tuple[str, str, str]] = {}  # nodeid -> name, part, sentence
        self._found: dict[str, tuple[str, str]] = {}  # nodeid -> state, why

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            name = getattr(item, "originalname", item.name)
            doc = getattr(getattr(item, "function", None), "__doc__", None) or ""
            sentence = " ".join(doc.split()) or name.removeprefix("test_").replace("_", " ")
            self._clauses[item.nodeid] = name, item.name.removeprefix(name), sentence

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            state = {"passed": "ok"}.get(report.outcome, report.outcome)
            if hasattr(report, "wasxfail") and report.skipped:
                state = "expected"
            self._found[report.nodeid] = state, _why(report)
            self._advance("check", len(self._found), len(self._clauses))

    def states(self) -> dict[str, str]:
        """Name of each clause to its state."""
        parts: dict[str, list[str]] = {}
        for nodeid, (name, _, _) in self._clauses.items():
            parts.setdefault(name, []).append(self._found[nodeid][0])
        return {name: min(states, key=_STATES.index) for name, states in parts.items()}

    def rows(self) -> Sequence[Mapping[str, str]]:
        """A row a clause, with what its parts in that state say."""
        rows = []
        for name, state in self.states().items():
            ids = [nodeid for nodeid, clause in self._clauses.items() if clause[0] == name]
            parts: dict[str, list[str]] = {}
            for nodeid in ids:
                if self._found[nodeid][0] == state and (why := self._found[nodeid][1]):
                    parts.setdefault(why, []).append(self._clauses[nodeid][1])
            # Which parts they are says something only where others say something else.
            said = [w if len(p) == len(ids) else f"{' '.join(p)} {w}" for w, p in parts.items()]
            sentence = self._clauses[ids[0]][2]
            rows.append(
                {"test": name, "state": state, "contract": sentence, "why": "\n".join(said)}
            )
        return rows


def _why(report: pytest.TestReport) -> str:
    """The first line of what a failed assertion says, or the reason for which it was not tried."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr or "")
    text = getattr(report, "wasxfail", "") or (crash.message if crash else text)
    first = text.strip().partition("\n")[0]
    return first.removeprefix("AssertionError: ").removeprefix("Skipped: ")


if __name__ == "__main__":
    sys.exit(importlib.import_module("core.run").guarded(main, sys.argv[1:]))
