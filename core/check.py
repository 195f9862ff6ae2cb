"""`outweigh check SEAM NAME`: the conformance suite of a seam against one offer.

The suite runs through pytest in this process, as if somebody had subclassed it for the offer. What
it holds the offer to beyond the defaults (a tolerance, a promise) the offer says itself, in an
optional class attribute `held_to`: a mapping of class attributes of the suite. Exit codes: 0 every
clause holds; 1 one fails, or none could be tried; 2 for what the caller can mend.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from core import show
from core.config import did_you_mean, parse_setting, validated
from core.errors import RunError, UserError
from core.registry import Registry
from core.seams import SEAMS
from core.testing.contract import STATES, Contract

_SUITES = {  # on the host, on a GPU
    "kv": ("core.testing.kv", "KVManagerSuite", "core.testing.kv_gpu", "KVManagerGpuSuite"),
    "fusion": ("core.testing.fusion", "FusionSuite", "core.testing.fusion", "FusionGpuSuite"),
    "graphs": ("core.testing.graphs", "GraphSuite", "core.testing.graphs_gpu", "GraphGpuSuite"),
    "sched": ("core.testing.sched", "SchedulerSuite"),
}
_MODULE = """
import pytest
pytest.register_assert_rewrite("core.testing")
from {module} import {suite} as Suite
from core.registry import Registry

offer = Registry({plugins!r}).find({seam!r}, {name!r}).load()
held_to = getattr(offer, "held_to", {{}})
unknown = [name for name in held_to if not hasattr(Suite, name)]
assert not unknown, f"held_to names {{unknown}}, which the suite does not have"
TestOffer = type("TestOffer", (Suite,), {{**held_to, "offer": offer, "config": {config!r}}})
"""
_PYTEST = "-q -s -p no:cacheprovider --import-mode=importlib -W ignore".split()
_INI = "[pytest]\nmarkers =\n    gpu: needs a CUDA device\n"
_FITS = "test_fits_the_seam"  # holds for an offer that never runs


def main(argv: Sequence[str]) -> int:
    """Check the offer that the arguments name, and print a row for each clause of its contract."""
    args = _parser().parse_args(argv)
    seam, name = args.seam, args.name
    if seam not in SEAMS:
        raise UserError(f"there is no seam '{seam}'{did_you_mean(seam, SEAMS, 'seams')}")
    offer: Any = Registry(args.plugins).find(seam, name).load()
    given = (parse_setting(f"{seam}.{text.removeprefix(f'{seam}.')}") for text in args.set)
    config = {key.removeprefix(f"{seam}."): value for key, value in given}
    validated(offer.Config, config, f"{seam} '{name}'", f"{seam}.")
    if importlib.util.find_spec("pytest") is None:
        raise UserError(
            "the suites need pytest, which is not installed: pip install 'outweigh[dev]'"
        )
    suites = _SUITES[seam]
    if args.gpu and len(suites) == 2:
        raise UserError(f"{seam} offers run on the host alone: drop --gpu")
    if args.gpu and not importlib.import_module("torch").cuda.is_available():
        raise RunError("--gpu was asked for and torch sees no CUDA device: mend that or drop it")
    module, suite = suites[2:] if args.gpu else suites[:2]
    contract = _run(_MODULE.format(**vars(args), module=module, suite=suite, config=config), args.k)
    return _report(contract, f"{seam} {name}")


def _report(contract: Contract, who: str) -> int:
    """Print what became of each clause, and all of them; the exit code."""
    show.print_rows(contract.rows(), sys.stdout)
    states = {name: clause.state for name, clause in contract.clauses.items()}
    counts = {state: list(states.values()).count(state) for state in STATES}
    print(f"{who}: {', '.join(f'{n} {state}' for state, n in counts.items() if n)}")
    if counts["skipped"] and "ok" not in {**states, _FITS: ""}.values() and not counts["failed"]:
        raise RunError(f"{who} could not be tried here, for the reasons above")
    return 1 if counts["failed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("outweigh check", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("seam", metavar="SEAM", help=", ".join(SEAMS))
    add("name", metavar="NAME", help="a registered offer: outweigh list shows them")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="option of the offer")
    add("-p", dest="plugins", action="append", default=[], metavar="PLUGIN", help="as in run")
    add("--gpu", action="store_true", help="the suite for CUDA; a missing GPU is a failure")
    add("-k", default="", metavar="EXPR", help="only the tests that match, as in pytest")
    return parser


def _run(source: str, expression: str) -> Contract:
    """What pytest says of the suite in `source`."""
    import pytest

    # What the environment has in store for pytest is meant for other tests; threads only get in
    # each other's way over tensors as small as these (37 s of kv against 8 s on two cores).
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    isolated = {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    alone = mock.patch.dict(os.environ, isolated, OMP_NUM_THREADS=threads)
    with tempfile.TemporaryDirectory() as folder, show.progress_bar(sys.stderr) as advance:
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


if __name__ == "__main__":
    sys.exit(importlib.import_module("core.run").guarded(main, sys.argv[1:]))
