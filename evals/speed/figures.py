"""The tables of speed in the documents, from the records that lie beside this module.

    python -m evals.speed.figures

prints them; a test holds the documents to them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).with_name("records")
STEPS = "steps-qwen3-0.6b-h200.json"
LONG_STEPS = "steps-4096-qwen3-0.6b-h200.json"
INT8_STEPS = "steps-paged_int8-qwen3-0.6b-h200.json"
OTHER_STEPS = {
    "Qwen2.5-0.5B": ("steps-qwen2.5-0.5b-h200.json",),
    "Qwen3-4B": ("steps-small-qwen3-4b-h200.json", "steps-qwen3-4b-h200.json"),
}
SPANS = "span-times-qwen3-0.6b-h200.json"
PRODUCTS = "span-times-products-qwen3-0.6b-h200.json"
ONE_ROW = ("norm_linear", "linear_add")
FEW_ROWS = ("linear", "linear_act", "linear_add_norm")
HOST_PATH = "host-path-qwen3-0.6b-h200.json"
LEVERS = "lever-{}-qwen3-0.6b-h200.json"
DUEL = "duel-vllm-qwen3-0.6b-h200.json"
TUNED_DUEL = "duel-tuned-vllm-qwen3-0.6b-h200.json"
OTHER_DUELS = ("duel-vllm-qwen3-4b-h200.json", "duel-vllm-qwen3-0.6b-h200-fast-host.json")
PAGED, VLLM = {"paged": "ours"}, {"vllm": "vllm"}
VLLM_SETTINGS = {
    "as installed": (DUEL, "vllm"),
    "async off": (DUEL, "vllm:async_scheduling=false"),
    "capture to 4,096": (TUNED_DUEL, "vllm:max_capture=4096"),
    "both": (TUNED_DUEL, "vllm:max_capture=4096,async_scheduling=false"),
}
LONG_CONTEXT = {kv: f"steps-32k-{kv}-qwen3-4b-h200.json" for kv in ("paged", "paged_int8")}


def record(name: str) -> dict[str, Any]:
    """One of the records, by the name of its file."""
    found: dict[str, Any] = json.loads((RECORDS / name).read_text(encoding="utf-8"))
    return found


def table(head: Seq[str], rows: Iterable[Seq[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _named(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Its steps by name."""
    named = {f"prefill {int(n):,}": row for n, row in found["prefill"].items()}
    for context, of_context in found["decode"].items():
        named |= {f"decode {b} × {int(context):,}": row for b, row in of_context.items()}
    return named


def steps_table(*found: dict[str, Any]) -> str:
    """Every step of records of evals.speed.steps; the first that has one, of steps in several."""
    named = {step: row for one in reversed(found) for step, row in _named(one).items()}
    order = [*_named(found[0]), *named]
    rows = [
        (
            step,
            *(f"{named[step][key]:.2f}" for key in ("p50_ms", "min_ms", "p90_ms", "floor_ms")),
            f"{named[step]['share_of_floor']:.0%}",
            f"{named[step]['padding']:.0%}" if "padding" in named[step] else "",
        )
        for step in dict.fromkeys(order)
    ]
    head = ("step", "p50 ms", "min ms", "p90 ms", "floor ms", "of the floor", "padding")
    return table(head, rows)


def columns_table(by_name: Mapping[str, Seq[dict[str, Any]]], what: str) -> str:
    """p50 in ms and the share of its floor of every step of `what`, a column a name; the first of
    its records that has the step."""
    named = {
        name: {step: row for one in reversed(found) for step, row in _named(one).items()}
        for name, found in by_name.items()
    }

    def cell(row: dict[str, Any] | None) -> str:
        return f"{row['p50_ms']:.2f} ({row['share_of_floor']:.0%})" if row else ""

    rows = [(step, *(cell(of.get(step)) for of in named.values())) for step in named[what]]
    return table(("step", *named), rows)


def spans_table(
    found: dict[str, Any], tokens: Seq[int], only: Seq[str] = (), but: Seq[str] = ()
) -> str:
    """Of a record of evals.speed.span_times: µs of a span, and of the plain nodes in its place, of
    spans of these names or of all but those."""
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for row in found["rows"]:
        is_wanted = row["span"] in only if only else row["span"] not in but
        if is_wanted and row["status"] == "timed" and row["tokens"] in tokens:
            us = row["p50_us"]
            cells = rows.setdefault((f"{row['fusion']}:{row['span']}", row["nodes"]), {})
            cells[row["tokens"]] = f"{us['span']:.1f} / {us['plain']:.1f}"
    head = ("span", "nodes", *(f"{n:,} tokens" if n > 1 else "1 token" for n in tokens))
    return table(
        head,
        [
            (f"`{name}`", nodes, *(cells.get(n, "") for n in tokens))
            for (name, nodes), cells in rows.items()
        ],
    )


def lever_table(name: str, unit: str) -> str:
    """Of a record of evals.speed.levers: medians, the factor over the base, the verdict."""
    rows = record(LEVERS.format(name))["levers"][name]["rows"]
    return table(
        ("figure", "arm", unit, "× base", "A/A within", "verdict"),
        [
            (
                row["figure"],
                row["arm"],
                f"{row['median']:,.5g}",
                f"{row['ratio']:.3f}",
                f"{row['control']:.3f}",
                row["verdict"],
            )
            for row in rows
        ],
    )


def figures_of_lever(name: str, keys: Mapping[str, str]) -> str:
    """What else a lever changed: a row an arm, a column a figure of `keys` (figure -> format)."""
    pulled = record(LEVERS.format(name))["levers"][name]
    found = pulled["figures"] or pulled["costs"]
    rows = [
        (arm, *(format(of[key], how) for key, how in keys.items())) for arm, of in found.items()
    ]
    return table(("arm", *keys), rows)


def host_table(found: dict[str, Any]) -> str:
    """Of a record of evals.speed.host_path: µs a step."""
    keys = ("sequences", "harvest", "plan", "stage", "launch", "events", "host", "wait", "path")
    return table(keys, [[f"{row[key]:,.0f}" for key in keys] for row in found["us"]])


def _medians(file: str) -> dict[str, dict[str, float]]:
    """Of a record of evals.speed.bench: medians over repetitions, by figure, then by arm."""
    found: dict[str, dict[str, float]] = {}
    for row in record(file)["rows"]:
        is_sum = row["figure"].startswith(("total_", "request_"))  # what output tokens say
        if row["p50"] is not None and not is_sum:
            found.setdefault(f"{row['workload']} {row['figure']}", {})[row["arm"]] = row["p50"]
    return found


def duel_table(file: str, ours: Mapping[str, str], peers: Mapping[str, str]) -> str:
    """Of a record of evals.speed.bench: medians, a column an arm (name -> arm), and the ratio of
    every column of ours to every one of a peer, of the figures that all have."""
    arms = {**ours, **peers}
    rows = [
        (
            figure,
            *(f"{of[arm]:,.5g}" for arm in arms.values()),
            *(f"{of[a] / of[b]:.3f}" for b in peers.values() for a in ours.values()),
        )
        for figure, of in _medians(file).items()
        if set(arms.values()) <= of.keys()
    ]
    return table(("figure", *arms, *(f"{a} / {b}" for b in peers for a in ours)), rows)


def closest_table(peers: Mapping[str, tuple[str, str]]) -> str:
    """Of the figures of every peer (name -> record and arm): which comes closest to ours, or is
    the farthest ahead, and the ratio to it, each within its own record."""
    medians = {file: _medians(file) for file, _ in peers.values()}
    shared = [f for f in medians[next(iter(medians))] if all(f in of for of in medians.values())]
    rows = []
    for figure in shared:
        ratios = {
            name: medians[file][figure]["ours"] / medians[file][figure][arm]
            for name, (file, arm) in peers.items()
        }
        closest = min if "throughput" in figure else max
        name = closest(ratios, key=ratios.__getitem__)
        rows.append((figure, name, f"{ratios[name]:.3f}"))
    return table(("figure", "closest", "paged / closest"), rows)


def readme_tables() -> list[str]:
    """Those of the README, in its order."""
    paged = [record(STEPS), record(LONG_STEPS)]
    return [
        steps_table(*paged),
        columns_table({"paged": paged, "paged_int8": [record(INT8_STEPS)]}, "paged_int8"),
    ]


def speed_tables() -> list[str]:
    """Those of the README beside this module, in its order."""
    from evals.speed import results  # whose Markdown is made of this module's tables

    others = {name: [record(file) for file in files] for name, files in OTHER_STEPS.items()}
    occupancy = {"preemptions": ".0f", "recomputed tokens": ".0f", "steps": ".0f"}
    long_context = {kv: [record(file)] for kv, file in LONG_CONTEXT.items()}
    return [
        spans_table(record(SPANS), (1,), only=ONE_ROW),
        spans_table(record(PRODUCTS), (2, 8, 16, 32, 64, 128), only=FEW_ROWS),
        spans_table(record(SPANS), (1, 16, 64, 256, 1024, 4096, 16384), but=ONE_ROW + FEW_ROWS),
        lever_table("graphs", "ms"),
        figures_of_lever("graphs", {"capture_s": ".2f", "num_shapes": "d", "graph_bytes": ",d"}),
        lever_table("kv_write", "ms"),
        lever_table("block_size", "tok/s"),
        figures_of_lever("block_size", occupancy | {"room filled": ".2f", "fragmentation": ".2f"}),
        columns_table(others, "Qwen3-4B"),
        columns_table(long_context, "paged"),
        host_table(record(HOST_PATH)),
        duel_table(DUEL, {**PAGED, "paged_int8": "outweigh:kv=paged_int8"}, VLLM),
        closest_table(VLLM_SETTINGS),
        *(duel_table(file, PAGED, VLLM) for file in OTHER_DUELS),
        *(text for name in results.names() for text in results.tables(name)),
    ]


if __name__ == "__main__":
    sys.stdout.write("\n\n".join(readme_tables() + speed_tables()) + "\n")
