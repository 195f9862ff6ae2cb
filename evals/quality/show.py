"""The record of a run as tables: by position, whole, the findings, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from core.show import console, print_rows

_WORDS = {
    "pass": "it is shown that {} costs no more than it may",
    "fail": "it is shown that {} costs more than it may",
    "not shown": "neither is shown of {}",
}


def show(record: Mapping[str, Any], file: TextIO) -> None:
    """Tables of every comparison, then the findings and the verdict in one line."""
    screen = console(file)
    for numbers in record["comparisons"].values():
        screen.print(
            f"\n{numbers['other']} beside {numbers['reference']}: {numbers['num_positions']:,} "
            f"positions of {numbers['num_documents']} documents"
        )
        rows = [_row(f"{row['first']:,}-{row['last']:,}", row) for row in numbers["buckets"]]
        print_rows([*rows, _row("all", numbers)], file)
        screen.print(_in_words(numbers))
    if left := record["num_documents_left_out"]:
        screen.print(f"left out: {left} documents of fewer than two tokens")
    screen.print(f"\nlimits: {record['limits']['source']}")
    print_rows([_finding(finding) for finding in record["findings"]], file)
    said, name = record["verdict"], record["comparisons"]["offer"]["other"]
    screen.print(f"{said}: {_WORDS[said].format(name)}")


def _row(where: str, numbers: Mapping[str, Any]) -> dict[str, str]:
    return {
        "positions": where,
        "n": f"{numbers['num_positions']:,}",
        "mean KL": _number(numbers["mean_kl"]) + _span(numbers["mean_kl_interval"]),
        "p99 KL": _number(numbers["p99_kl"]),
        "max KL": _number(numbers["max_kl"]),
        "same top-1": f"{numbers['top1']:.4f}" + _span(numbers["top1_wilson"], ".4f"),
        "loss, reference": f"{numbers['base_nats']:.4f}",
        "difference": _number(numbers["delta_nats"]) + _span(numbers["delta_nats_interval"]),
    }


def _in_words(numbers: Mapping[str, Any]) -> str:
    percentiles = numbers["kl_percentiles"]
    return (
        f"perplexity {numbers['base_perplexity']:.4f} and {numbers['perplexity']:.4f}; KL median "
        f"{_number(numbers['median_kl'])}, 90 % {_number(percentiles['90'])}, 99.9 % "
        f"{_number(percentiles['99.9'])}; probability of the true token {_signed(numbers)}, "
        f"RMS {numbers['delta_p']['rms']:.3%}"
    )


def _signed(numbers: Mapping[str, Any]) -> str:
    return f"{numbers['delta_p']['mean']:+.3%}"


def _finding(finding: Mapping[str, Any]) -> dict[str, str]:
    measured, interval = finding["measured"], finding["interval"]
    return {
        "metric": finding["metric"],
        "measured": "-" if measured is None else _number(measured),
        "95 %": "-" if interval is None else _span(interval).strip(" []"),
        "asked": finding["asked"],
        "verdict": finding["verdict"],
        "why": finding["why"],
    }


def _number(value: float) -> str:
    return f"{value:.4g}" if value == 0 or abs(value) >= 0.01 else f"{value:.2e}"


def _span(interval: tuple[float, float], form: str | None = None) -> str:
    low, high = (format(end, form) if form else _number(end) for end in interval)
    return f" [{low}, {high}]"
