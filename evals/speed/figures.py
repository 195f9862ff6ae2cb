"""The README's tables of speed, from the records that lie beside this module.

    python -m evals.speed.figures

prints them; a test holds the README to them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence as Seq
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).with_name("records")
STEPS = "steps-qwen3-0.6b-h200.json"
SPANS = "span-times-triton-qwen3-0.6b-h200.json"


def record(name: str) -> dict[str, Any]:
    """One of the records, by the name of its file."""
    found: dict[str, Any] = json.loads((RECORDS / name).read_text(encoding="utf-8"))
    return found


def table(head: Seq[str], rows: Iterable[Seq[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def steps_table(found: dict[str, Any]) -> str:
    """Every step of a record of evals.speed.steps."""
    named = [(f"prefill {int(n):,}", row) for n, row in found["prefill"].items()]
    for context, of_context in found["decode"].items():
        named += [(f"decode {batch} × {int(context):,}", row) for batch, row in of_context.items()]
    rows = [
        (
            step,
            *(f"{row[key]:.2f}" for key in ("p50_ms", "min_ms", "p90_ms", "floor_ms")),
            f"{row['share_of_floor']:.0%}",
            f"{row['padding']:.0%}" if "padding" in row else "",
        )
        for step, row in named
    ]
    head = ("step", "p50 ms", "min ms", "p90 ms", "floor ms", "of the floor", "padding")
    return table(head, rows)


def spans_table(found: dict[str, Any], names: Seq[str], tokens: Seq[int]) -> str:
    """Of a record of evals.speed.span_times: µs of a span, and of the plain nodes in its place."""
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for row in found["rows"]:
        if row["span"] in names and row["status"] == "timed":
            us = row["p50_us"]
            cells = rows.setdefault((row["span"], row["nodes"]), {})
            cells[row["tokens"]] = f"{us['span']:.1f} / {us['plain']:.1f}"
    head = ("span", "nodes", *(f"{n} tokens" if n > 1 else "1 token" for n in tokens))
    return table(
        head,
        [
            (f"`{name}`", nodes, *(cells.get(n, "") for n in tokens))
            for (name, nodes), cells in rows.items()
        ],
    )


def readme_tables() -> list[str]:
    """All of them, in the order of the README."""
    linear = ("norm_linear", "linear_add", "linear", "linear_act")
    return [steps_table(record(STEPS)), spans_table(record(SPANS), linear, (1, 8, 16))]


if __name__ == "__main__":
    sys.stdout.write("\n\n".join(readme_tables()) + "\n")
