"""`outweigh check SEAM NAME`: the conformance suite of a seam against one offer.

The suite runs through pytest in this process, as if somebody had subclassed it for the offer. What
it holds the offer to beyond the defaults (a tolerance, a promise) the offer says itself, in an
optional class attribute `held_to`: a mapping of class attributes of the suite, printed under the
table. `expected_failures` among them are strict: a clause listed there that holds is a failure.

Exit codes: 0, every clause that could be tried holds; 1, one fails, or none could be tried; 2, the
caller can mend it: an unknown name, an option out of range, -k that selects nothing, a wrong
`held_to`, pytest missing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
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
held_to = {{**getattr(offer, "held_to", {{}}), "offer": offer, "config": {config!r}}}
TestOffer = type("TestOffer", (Suite,), held_to)
"""
_EXPECTED = "expected_failures"  # each stands in the table, with its reason
_FITS = "test_fits_the_seam"  # holds for an offer that never runs


def main(argv: Sequence[str]) -> int:
    """Check the offer that the arguments name, and print a row for each clause of its contract."""
    args = _parser().parse_args(argv)
    if importlib.util.find_spec("pytest") is None:  # which a run does not need
        raise UserError("the suites take pytest, which is missing: pip install pytest")
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
    held_to = getattr(importlib.import_module(module), suite).stated_by(offer)
    source = _MODULE.format(**vars(args), module=module, suite=suite, config=config)
    with show.progress_bar(sys.stderr) as advance:
        contract = run_suite(source, args.k, advance)
    return _report(contract, f"{seam} {name}", held_to)


def _report(contract: Contract, who: str, held_to: Mapping[str, Any]) -> int:
    """Print what became of each clause, what is declared, and all of them; the exit code."""
    show.print_rows(contract.rows(), sys.stdout)
    declared = [f"{name}={value}" for name, value in held_to.items() if name != _EXPECTED]
    if declared:
        print(f"held by its own word to {', '.join(declared)}")
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
