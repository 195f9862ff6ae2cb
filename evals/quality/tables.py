"""The tables of quality in the documents, from the records that lie beside this module.

    python -m evals.quality.tables

prints them; a test holds the documents to them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evals.intervals import Interval
from evals.speed.figures import table

RECORDS = Path(__file__).with_name("records")
TEXTS = {
    "Qwen2.5-Coder-0.5B": "text-qwen2.5-coder-0.5b-cpu.json",
    "SmolLM2-135M": "text-smollm2-135m-cpu.json",
}
GENERATIONS = (
    "generation-paged_int8-tiny-h200.json",
    "generation-loud_values-tiny-h200.json",
    "generation-paged_int8-qwen2.5-coder-0.5b-cpu.json",
)
FLOOR = "noise_floor"


def record(name: str) -> dict[str, Any]:
    """One of the records, by the name of its file."""
    found: dict[str, Any] = json.loads((RECORDS / name).read_text(encoding="utf-8"))
    return found


def arms_table(found: Mapping[str, Any]) -> str:
    """Of every comparison: divergence, agreement and loss over all positions, and the verdict."""
    rows = []
    for what, numbers in found["comparisons"].items():
        low, high = numbers["top1_wilson"]
        rows.append(
            (
                _name(what, numbers),
                f"{numbers['mean_kl']:.1e} {_span(numbers['mean_kl_interval'], '.1e')}",
                f"{numbers['p99_kl']:.1e}",
                f"{numbers['top1']:.2%} [{low:.2%}, {high:.2%}]",
                f"{numbers['delta_nats']:+.4f} {_span(numbers['delta_nats_interval'], '+.4f')}",
                numbers.get("verdict", ""),
            )
        )
    head = ("cache", "mean KL", "p99 KL", "same top-1", "loss, difference in nats", "verdict")
    return table(head, rows)


def curve_table(found: Mapping[str, Any]) -> str:
    """Mean KL by position, and that of the last bucket over that of positions 256-1,023."""
    first = next(iter(found["comparisons"].values()))
    buckets = [(row["first"], row["last"]) for row in first["buckets"]]
    rows = []
    for what, numbers in found["comparisons"].items():
        kls = {row["first"]: row["mean_kl"] for row in numbers["buckets"]}
        drift = list(kls.values())[-1] / kls[256]
        cells = (f"{kls[lo]:.1e}" for lo, _ in buckets)
        rows.append((_name(what, numbers), *cells, f"{drift:.2f}"))
    head = ("mean KL at positions", *(f"{lo:,}–{hi:,}" for lo, hi in buckets), "last / 256–1,023")
    return table(head, rows)


def documents_table(found: Mapping[str, Any]) -> str:
    """Mean KL and agreement by document, a column an offer in question."""
    judged = [what for what in found["comparisons"] if what != FLOOR]
    rows = [
        (
            f"{row['name']}",
            *(f"{row[what]['mean_kl']:.1e}, {row[what]['top1']:.2%}" for what in judged),
        )
        for row in found["documents"]
    ]
    return table(("document", *(f"`{what}`" for what in judged)), rows)


def generation_table(found: Mapping[str, Any]) -> str:
    """What texts are like in both arms, by temperature, and the difference with its interval."""
    rows = []
    for part in found["generation"]["temperatures"]:
        for name in ("rep4", "distinct3", "length"):
            of = part[name]
            rows.append(
                (
                    f"{part['temperature']:g}",
                    f"{part['n']} out of {part['num_documents']} documents",
                    name,
                    f"{of['reference']:.4g}",
                    f"{of['other']:.4g}",
                    f"{of['difference']:+.3g} {_span(of['interval'], '+.3g')}",
                )
            )
    head = ("temperature", "texts", "figure", "reference", "other", "difference")
    return table(head, rows)


def findings_table(found: Mapping[str, Any]) -> str:
    """Every limit that the run was held to."""
    rows = [
        (
            one["metric"],
            "" if one["measured"] is None else f"{one['measured']:.3g}",
            "" if one["interval"] is None else _span(one["interval"], ".3g"),
            one["asked"],
            one["verdict"],
        )
        for one in found["findings"]
    ]
    return table(("limit", "measured", "95 %", "asked", "verdict"), rows)


def _name(what: str, numbers: Mapping[str, Any]) -> str:
    return f"noise floor: {numbers['other']}" if what == FLOOR else f"`{what}`"


def _span(interval: Interval, form: str) -> str:
    low, high = interval
    return f"[{low:{form}}, {high:{form}}]"


def quality_tables() -> list[str]:
    """Those of evals/quality/README.md."""
    texts = [record(name) for name in TEXTS.values()]
    kinds = arms_table, curve_table, documents_table
    found = [make(one) for one in texts for make in kinds]
    written = [record(name) for name in GENERATIONS]
    return found + [make(one) for one in written for make in (generation_table, findings_table)]


if __name__ == "__main__":
    sys.stdout.write("\n\n".join(quality_tables()) + "\n")
