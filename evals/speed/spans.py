"""What each span of a fusion set is worth, through the Engine: one span at a time, against none.

    python -m evals.speed.spans --fusion triton inductor --json spans.json

An arm is an engine with `fusion.only` set to one span, to none of them, or to all. All arms live at
once and are measured in turn; the arm without spans runs twice a round, as an A/A control (see
evals.speed.arms). A figure is a median over rounds; a ratio is to the arm without spans.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.batch import BatchShape
from core.errors import RunError, UserError
from core.registry import Registry
from core.show import print_rows
from evals import records
from evals.arguments import Parser, count
from evals.speed.arms import Figures, build, compared, on_cpu, side_by_side, where
from evals.speed.steps import step_medians
from plugins.graphs.full import FullGraphs

if TYPE_CHECKING:
    from core.batch import Limits

PLAIN, AGAIN = "plain nodes", "plain nodes again"


class TheseGraphs(FullGraphs):
    """The shapes of `full` that the measured steps are padded to, and no others."""

    def __init__(self, prompts: list[int], batches: list[int]) -> None:
        super().__init__()
        self._prompts, self._batches = prompts, batches

    def shapes(self, limits: Limits) -> list[BatchShape]:
        super().shapes(limits)
        self._rows, self._fresh = tuple(sorted(self._batches)), tuple(sorted(self._prompts))
        self._mixed, self._starts = (), range(0)
        return [*map(self._decode, self._rows), *map(self._prompt, self._fresh)]


def arms(fusions: list[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name of the arm -> fusion set and its settings."""
    found: dict[str, tuple[str, dict[str, Any]]] = {PLAIN: ("none", {}), AGAIN: ("none", {})}
    for fusion in fusions:
        names = getattr(Registry().find("fusion", fusion).load().Config, "names", ())  # type: ignore[attr-defined]
        for name in names:
            found[f"{fusion}: {name}"] = fusion, {"fusion.only": [name]}
        found[f"{fusion}: all"] = fusion, {}
    return found


def these_graphs(args: argparse.Namespace) -> TheseGraphs | str:
    """Graphs of the measured steps; none on a CPU."""
    return "none" if on_cpu(args.device) else TheseGraphs(args.prefill, args.batch)


def measure(args: argparse.Namespace) -> Figures:
    """Step -> arm -> a median, in ms, of every round."""
    builders = {
        name: lambda fusion=fusion, settings=settings: build(
            args, fusion=fusion, settings=settings, graphs=these_graphs(args)
        )
        for name, (fusion, settings) in arms(args.fusion).items()
    }
    return side_by_side(builders, partial(step_medians, args), args.rounds)


def table(found: Figures) -> list[dict[str, Any]]:
    """A row an arm: ms, and the ratio to the plain nodes, of every step."""
    rows: dict[str, dict[str, Any]] = {}
    for row in compared(found, PLAIN, AGAIN):
        cell = f"{row['median']:.2f} ({row['ratio']:.2f}x)"
        rows.setdefault(row["arm"], {"spans": row["arm"]})[row["figure"]] = cell
    order = [PLAIN, AGAIN, *sorted(rows.keys() - {PLAIN, AGAIN})]
    return [rows[name] for name in order]


def main(argv: list[str] | None = None) -> int:
    parser = Parser("evals.speed.spans", __doc__)
    add = parser.add_argument
    add("--model", default="random:qwen3-0.6b")
    add("--fusion", nargs="+", default=["triton"], help="sets whose spans are measured")
    add("--device")
    add(
        "--prefill", type=count, nargs="+", default=[128, 1024, 4096], help="tokens of lone prompts"
    )
    add("--batch", type=count, nargs="+", default=[1, 64, 256], help="sequences of decode steps")
    add("--context", type=count, default=160, help="tokens, at the middle of the timed steps")
    add("--steps", type=count, default=32, help="decode steps timed, each round")
    add("--repeats", type=count, default=8, help="prefills timed, each round")
    add("--rounds", type=count, default=3)
    add("--kv-cache-bytes", default="6GiB", help="of each engine; it must hold --batch")
    add("--json", type=Path)
    args = parser.parse_args(argv)
    try:
        records.check_folder(args.json)
        found = measure(args)
    except (UserError, RunError) as error:
        print(f"outweigh: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    print_rows(table(found), sys.stdout)
    if args.json:
        command = " ".join(["python -m evals.speed.spans", *(argv or sys.argv[1:])])
        result = {"command": command, **where(args.device), "median_ms": found}
        records.write(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
