"""The record of a run as tables: what each part found, the findings, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence as Seq
from typing import Any, TextIO

from core.show import console, print_rows

_WORDS = {
    "pass": "it is shown that {} costs no more than it may",
    "fail": "it is shown that {} costs more than it may",
    "not shown": "neither is shown of {}",
}


def show(record: Mapping[str, Any], file: TextIO) -> None:
    """Tables of every part, then the findings and the verdict in one line."""
    screen = console(file)
    for title, rows, words in tables(record):
        screen.print(f"\n{title}")
        print_rows(rows, file)
        if words:
            screen.print(words)
    screen.print(f"\nlimits{_sources(record)}")
    print_rows(finding_rows(record), file)
    for line in verdicts(record):
        screen.print(line)


def said(record: Mapping[str, Any]) -> str:
    """The verdict in one line."""
    return _in_a_line(record["verdict"], record["kv"])


def verdicts(record: Mapping[str, Any]) -> list[str]:
    """The verdict, and where several offers are in question that of each before it."""
    of_each = {what: numbers["verdict"] for what, numbers in _judged(record).items()}
    lines = [_in_a_line(verdict, what) for what, verdict in of_each.items()]
    return [*(lines if len(lines) > 1 else ()), said(record)]


def _in_a_line(verdict: str, what: str) -> str:
    return f"{verdict}: {_WORDS[verdict].format(what)}"


def _judged(record: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The comparisons of offers in question."""
    found = record.get("comparisons", {})
    return {what: numbers for what, numbers in found.items() if "limits" in numbers}


def _sources(record: Mapping[str, Any]) -> str:
    """Whose limits they are."""
    sources = {what: numbers["limits"]["source"] for what, numbers in _judged(record).items()}
    if len(sources) > 1:
        return "".join(f"; {what}: {source}" for what, source in sources.items())
    return "".join(f": {source}" for source in sources.values())


Table = tuple[str, list[dict[str, str]], str]


def tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """Of each part that a record has: a title, rows, and what there is to say below them."""
    for numbers in record.get("comparisons", {}).values():
        rows = [_row(f"{row['first']:,}-{row['last']:,}", row) for row in numbers["buckets"]]
        title = (
            f"{numbers['other']} beside {numbers['reference']}: {numbers['num_positions']:,} "
            f"positions of {numbers['num_documents']} documents"
        )
        yield title, [*rows, _row("all", numbers)], _in_words(numbers)
    if left := record.get("num_documents_left_out"):
        yield f"left out: {left} documents of fewer than two tokens", [], ""
    for part in record.get("generation", {}).get("temperatures", ()):
        yield from _generation(part)
    if part := record.get("recall"):
        rows = [_shares(kind, row) for kind, row in part["kinds"].items()]
        cached = part["share_cached"]["other"]
        words = f"{cached:.0%} of the prompts' tokens were found in shared blocks"
        yield f"recall, in the style {part['style']}: share found", rows, words
        for kind, row in part["kinds"].items():
            title = f"{kind}, found of all, reference → other, by length and depth"
            yield title, _grid(row["cells"]), ""
    if part := record.get("tasks"):
        rows = [_shares(name, row) for name, row in part["tasks"].items()]
        yield "tasks: share solved", rows, ""


def finding_rows(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """The findings as rows of text."""
    return [_finding(finding) for finding in record["findings"]]


def _generation(part: Mapping[str, Any]) -> Iterator[Table]:
    rows = []
    for name in (
        *(f"rep{n}" for n in (1, 2, 3, 4)),
        *(f"distinct{n}" for n in (1, 2, 3)),
        "length",
    ):
        row = part[name]
        rows.append(
            {
                "of a text": name,
                "reference": f"{row['reference']:.4f}",
                "other": f"{row['other']:.4f}",
                "difference": _number(row["difference"]) + _span(row["interval"]),
            }
        )
    title = f"{part['n']} texts of {part['num_documents']} documents at temperature "
    free = part["without_loops"]
    num = [free["n"] - free["num_right"][arm] for arm in ("reference", "other")]
    words = f"with a loop: {num[0]} and {num[1]} texts, {free['num_lost']} of them new"
    yield f"{title}{part['temperature']:g}", rows, words
    curve = [
        {
            "tokens": f"{row['tokens']:,}",
            "texts still the same": f"{row['num_same']} = {row['share']:.1%}"
            + _span(row["interval"], ".3f"),
        }
        for row in part["survival"]
    ]
    yield f"how long texts stay the same at temperature {part['temperature']:g}", curve, ""


def _shares(name: str, row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "of": name,
        "n": f"{row['n']:,}",
        "reference": f"{row['reference']:.4f}" + _span(row["reference_interval"], ".4f"),
        "other": f"{row['other']:.4f}" + _span(row["other_interval"], ".4f"),
        "lost": f"{row['num_lost']}",
        "gained": f"{row['num_gained']}",
        "difference": f"{row['difference']:+.4f}" + _span(row["interval"], "+.4f"),
        "McNemar p": f"{row['mcnemar_p']:.3g}",
    }


def _grid(cells: Seq[Mapping[str, Any]]) -> list[dict[str, str]]:
    depths = sorted({cell["depth"] for cell in cells})
    rows: dict[int, dict[str, str]] = {}
    for cell in cells:
        blank = {"length": f"{cell['length']:,}", **{f"depth {depth:g}": "-" for depth in depths}}
        text = f"{cell['reference']} → {cell['other']} of {cell['n']}"
        rows.setdefault(cell["length"], blank)[f"depth {cell['depth']:g}"] = text
    return [rows[length] for length in sorted(rows)]


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
