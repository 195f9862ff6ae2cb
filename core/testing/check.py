"""`outweigh check SEAM NAME`: the conformance suite of a seam against one offer.

The suite runs through pytest in this process, as if somebody had subclassed it for the offer. What
it holds the offer to beyond the defaults (a tolerance, a promise) the offer says itself, in an
optional class attribute `held_to`: a mapping of class attributes of the suite. Exit codes: 0 every
clause holds; 1 one fails, or none could be tried; 2 for what the caller can mend, pytest missing
among it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from core import show
from core.config import parse_setting, validated
from core.errors import RunError, UserError
from core.registry import Registry
from core.seams import SEAMS
from core.testing.contract import STATES, Contract, run_suite

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
_FITS = "test_fits_the_seam"  # holds for an offer that never runs


def main(argv: Sequence[str]) -> int:
    """Check the offer that the arguments name, and print a row for each clause of its contract."""
    if importlib.util.find_spec("pytest") is None:  # which a run does not need
        raise UserError("the suites need pytest, which is missing: pip install 'outweigh[dev]'")
    args = _parser().parse_args(argv)
    seam, name = args.seam, args.name
    offer: Any = Registry(args.plugins).find(seam, name).load()
    given = (parse_setting(f"{seam}.{text.removeprefix(f'{seam}.')}") for text in args.set)
    config = {key.removeprefix(f"{seam}."): value for key, value in given}
    validated(offer.Config, config, f"{seam} '{name}'", f"{seam}.")
    suites = _SUITES[seam]
    if args.gpu and len(suites) == 2:
        raise UserError(f"{seam} offers run on the host alone: drop --gpu")
    if args.gpu and not importlib.import_module("torch").cuda.is_available():
        raise RunError("--gpu was asked for and torch sees no CUDA device: mend that or drop it")
    module, suite = suites[2:] if args.gpu else suites[:2]
    source = _MODULE.format(**vars(args), module=module, suite=suite, config=config)
    with show.progress_bar(sys.stderr) as advance:
        contract = run_suite(source, args.k, advance)
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
