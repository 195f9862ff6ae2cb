"""The record of a run for people: result.json, result.md, and report.html that stands alone."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence as Seq
from pathlib import Path
from typing import Any

from core.errors import UserError
from evals import records
from evals.quality.figures import figures, pyplot
from evals.quality.show import finding_rows, tables, verdicts

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: .6rem 0 1.4rem }
th, td { border: 1px solid #ccc; padding: .2rem .55rem; text-align: left; vertical-align: top }
th { background: #f3f3f3 } pre { white-space: pre-wrap; margin: 0; font-size: 12px }
.pass { background: #d9f2d9 } .fail { background: #f8d3d3 } .not { background: #fdf0cf }
.verdict { font-size: 1.2rem; padding: .5rem .8rem; border-radius: .3rem }
.side td { width: 50% }
"""


def check(folder: Path) -> None:
    """Refuse a folder that cannot be written, or a missing matplotlib, before hours are spent."""
    pyplot()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}; name another") from error
    records.check_folder(folder / "result.json")


def write(folder: Path, record: Mapping[str, Any]) -> None:
    """All three files; what stood there before stays until each is whole."""
    records.write(folder / "result.json", dict(record))
    records.write_text(folder / "result.md", markdown(record))
    records.write_text(folder / "report.html", page(record))


def title(record: Mapping[str, Any]) -> str:
    model = record["arguments"]["model"]
    return f"{record['kv']} beside {record['against']} on {model}"


def markdown(record: Mapping[str, Any]) -> str:
    """The verdict, the findings, then the tables of every part."""
    lines = [f"# {title(record)}", ""]
    lines += [part for line in verdicts(record) for part in (f"**{line}**", "")]
    lines += [f"`{record['command']}`", "", record["machine"], ""]
    lines += ["## Findings", "", *_markdown_table(finding_rows(record))]
    for heading, rows, words in tables(record):
        lines += [f"## {heading}", ""]
        lines += _markdown_table(rows)
        lines += [words, ""] if words else []
    return "\n".join(lines)


def _markdown_table(rows: Seq[Mapping[str, str]]) -> list[str]:
    if not rows:
        return []
    lines = [_bars(rows[0]), _bars("---" for _ in rows[0])]
    return [*lines, *(_bars(row.values()) for row in rows), ""]


def _bars(cells: Any) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def page(record: Mapping[str, Any]) -> str:
    """One HTML document with everything in it: no script, no style sheet, no picture from beside.

    The numbers of every item stand in result.json.
    """
    return "\n".join(_page(record))


def _page(record: Mapping[str, Any]) -> Iterator[str]:
    head = html.escape(title(record))
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{head}</title>'
    yield f"<style>{_STYLE}</style></head><body><h1>{head}</h1>"
    for line in verdicts(record):
        kind = line.partition(":")[0].split()[0]
        yield f'<p class="verdict {kind}">{html.escape(line)}</p>'
    command, machine = (html.escape(record[name]) for name in ("command", "machine"))
    yield f"<p><code>{command}</code><br>{machine}</p>"
    yield "<h2>Findings</h2>"
    yield _table(finding_rows(record))
    for heading, drawing in figures(record):
        yield f"<h2>{html.escape(heading)}</h2>{drawing}"
    for heading, rows, words in tables(record):
        yield f"<h2>{html.escape(heading)}</h2>{_table(rows)}<p>{html.escape(words)}</p>"
    yield from _worst(record)
    yield "</body></html>\n"


def _table(rows: Seq[Mapping[str, str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    body = "".join(f"<tr>{''.join(map(_cell, row.values()))}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(text: str) -> str:
    kind = f' class="{text.split()[0]}"' if text in ("pass", "fail", "not shown") else ""
    return f"<td{kind}>{html.escape(text)}</td>"


def _worst(record: Mapping[str, Any]) -> Iterator[str]:
    """What a part found worst, the arms side by side."""
    parts = {
        f"{numbers['other']}, teacher-forced": numbers["worst"]
        for numbers in record.get("comparisons", {}).values()
    }
    for part in record.get("generation", {}).get("temperatures", ()):
        parts[f"texts at temperature {part['temperature']:g}"] = part["worst"]
    parts["recall, lost"] = record.get("recall", {}).get("worst", ())
    for name, part in record.get("tasks", {}).get("tasks", {}).items():
        parts[f"{name}, lost"] = part["worst"]
    for name, items in parts.items():
        if items:
            yield f'<h2>Worst: {html.escape(name)}</h2><table class="side">'
            yield "<tr><th>reference</th><th>other</th></tr>"
            for item in items:
                yield f'<tr><td colspan="2">{html.escape(item["about"])}</td></tr><tr>'
                for arm in ("reference", "other"):
                    yield f"<td><pre>{html.escape(item[arm])}</pre></td>"
                yield "</tr>"
            yield "</table>"
