"""One page with everything in it: tables, charts, configurations, environment. It loads nothing."""

from __future__ import annotations

import html as escaping
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from evals.speed.ladder import charts, markdown

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 0.6rem 0; font-size: 12.5px }
th, td { border-bottom: 1px solid #ddd; padding: 0.2rem 0.6rem; text-align: left }
th { background: #f4f5f7 }
td.faster { color: #2a7f46; font-weight: 600 } td.slower { color: #b3372f; font-weight: 600 }
td.interaction { color: #b3372f; font-weight: 600 }
pre { background: #f4f5f7; padding: 0.8rem; overflow-x: auto; font-size: 12px }
svg { max-width: 100%; height: auto } nav a { margin-right: 1rem }
"""


def check() -> None:
    """Raises UserError where charts cannot be drawn."""
    charts.pyplot()


def html(document: Mapping[str, Any]) -> str:
    """The page."""
    title = f"Ablation of {document['common']['model']} on {document['device_name']}"
    state = "" if document["complete"] else "<p><strong>Not complete.</strong></p>"
    parts = list(markdown.sections(document))
    links = "".join(f'<a href="#s{i}">{_text(name)}</a>' for i, (name, _) in enumerate(parts))
    body = [f"<h1>{_text(title)}</h1>", state, f"<p>{_text(markdown.how(document))}</p>"]
    body += [f"<nav>{links}</nav>", *_charts(document)]
    for i, (name, texts) in enumerate(parts):
        body += [f'<h2 id="s{i}">{_text(name)}</h2>', *map(_block, texts)]
    body += _records(document)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}'
        f"</title><style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _charts(document: Mapping[str, Any]) -> Iterator[str]:
    """Of each load; the split of the TTFT once it is known."""
    for name in document["charts"]:
        share = name.removeprefix("load-")
        where = f"at {share} of the baseline's capacity"
        yield f"<h2>TTFT from the bottom to the top, {where}</h2>"
        yield charts.waterfall(document, name)
        if document.get("split"):
            yield f"<h2>Where the TTFT goes, {where}</h2>"
            yield charts.ttft_split(document, name)
        yield f"<h2>KV occupancy over time, {where}</h2>"
        yield charts.occupancy(document, name)
        yield f"<h2>Latencies, {where}</h2>"
        yield charts.distributions(document, name)


def _records(document: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Configuration and environment</h2>"
    yield f"<pre>{_text(document['command'])}</pre>"
    names = ("machine", "device_name", "versions", "ceilings", "common", "arguments", "baseline")
    yield _details("Definitions", document["definitions"])
    yield _details("The study", {name: document[name] for name in names})
    for arm, record in document.get("engines", {}).items():
        yield _details(arm, record)


def _details(name: str, content: Any) -> str:
    text = json.dumps(content, indent=1, default=str)
    return f"<details><summary>{_text(name)}</summary><pre>{_text(text)}</pre></details>"


def _block(text: str) -> str:
    """A table of Markdown, a line of a list, or a sentence."""
    if text.startswith("|"):
        head, _, *rows = text.splitlines()
        cells = "".join(f"<th>{_inline(cell)}</th>" for cell in _cells(head))
        lines = "".join(f"<tr>{''.join(map(_cell, _cells(row)))}</tr>" for row in rows)
        return f"<table><tr>{cells}</tr>{lines}</table>"
    return f"<p>{_inline(text.removeprefix('- '))}</p>"


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split(" | ")]


def _cell(text: str) -> str:
    kind = f' class="{text}"' if text in ("faster", "slower", "interaction") else ""
    return f"<td{kind}>{_inline(text)}</td>"


def _inline(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", _text(text))


def _text(text: str) -> str:
    return escaping.escape(text, quote=False)
