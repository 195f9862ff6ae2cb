"""Workload `grid`: the baseline over lengths and concurrency, before anything is changed.

A cell is a closed loop: so many requests of one input and one output length, `concurrency` of them
at a time. Figures as of `evals.speed.serve`, each with its cell behind it.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Mapping
from typing import Any, NamedTuple

from core.errors import UserError
from evals.speed.driving import Driver, Request, Result, serve
from evals.speed.serve import DETAILS, measured
from evals.speed.workloads import check_size, warm_up

FEWEST = 16  # requests of a cell, enough for a median
FIGURES = {
    "median_ttft_ms": "TTFT ms",
    "median_tpot_ms": "TPOT ms",
    "median_e2el_ms": "E2E ms",
    "output_throughput": "tok/s",
}


class Cell(NamedTuple):
    input_len: int
    output_len: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.input_len}+{self.output_len} x{self.concurrency}"


def cells(args: Namespace) -> list[Cell]:
    """In the order of the command line, concurrency innermost."""
    sizes = args.grid_input_lens, args.grid_output_lens, args.grid_concurrency
    return [Cell(*size) for size in itertools.product(*sizes)]


def grid(driver: Driver, args: Namespace, repetition: int) -> Result:
    """Every cell that the engine's limits allow."""
    result = Result.empty()
    for cell in cells(args):
        try:
            check_size(driver.engine, cell.concurrency, cell.input_len + cell.output_len)
            found = _cell(driver, cell, args)
        except UserError as error:
            driver.engine.section(None)
            result.refused[f"grid {cell}"] = str(error)
            continue
        kept = {name: found.figures[name] for name in FIGURES}
        result.figures.update({f"{name} {cell}": value for name, value in kept.items()})
        samples = {n: found.num_samples[n] for n in kept if n in found.num_samples}
        result.num_samples.update({f"{name} {cell}": num for name, num in samples.items()})
        refused = {f"{name} {cell}": why for name, why in found.refused.items() if name in kept}
        result.refused.update(refused)
        raw = {name: value for name, value in found.raw.items() if name not in DETAILS}
        result.raw[str(cell)] = {**cell._asdict(), **found.figures, **raw}
    return result


def _cell(driver: Driver, cell: Cell, args: Namespace) -> Result:
    engine, num = driver.engine, args.grid_prompts or max(FEWEST, 2 * cell.concurrency)
    wanted = [Request(driver.prompt(cell.input_len), cell.output_len) for _ in range(num)]
    warm_up(driver, wanted, cell.concurrency)
    engine.section(f"grid {cell}")
    line = serve(engine, wanted, driver.clock, max_concurrency=cell.concurrency, is_closed=True)
    engine.section(None)
    return measured(wanted, line, {}, ())


def table(rows: list[Mapping[str, Any]], arm: str) -> list[dict[str, Any]]:
    """A line for each cell, of the rows of `evals.speed.bench_tables` of one arm: medians over its
    repetitions."""
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        figure, _, cell = row["figure"].partition(" ")
        if row["workload"] == "grid" and row["arm"] == arm:
            lengths, _, concurrency = cell.partition(" x")
            num_input, _, num_output = lengths.partition("+")
            line = lines.setdefault(
                cell, {"input": num_input, "output": num_output, "concurrency": concurrency}
            )
            line[FIGURES[figure]] = None if row["p50"] is None else f"{row['p50']:.4g}"
    return list(lines.values())
