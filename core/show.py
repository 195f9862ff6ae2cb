"""What the command line shows to people: the offers, one offer in full, the metrics of a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from core.config import options
from core.conform import fact_types
from core.errors import UserError
from core.seams import SEAMS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from core.engine import RequestOutput
    from core.registry import Offer, Owner, Registry

Progress = Callable[[str, int, int], None]


def offer_rows(registry: Registry) -> list[dict[str, str]]:
    """Every offer with its state, then the plugins without offers: hooks only, broken, blocked."""
    rows = []
    for seam in SEAMS:
        for name, offer in sorted(registry.offers[seam].items()):
            rows.append(_row(seam, name, offer.owner, _state(offer)))
    offering = {
        offer.owner.name for offers in registry.offers.values() for offer in offers.values()
    }
    for owner in registry.owners.values():
        if owner.name not in offering:
            rows.append(_row("-", owner.name, owner, "ok, hooks only"))
    rows += [_row("-", b.owner.name, b.owner, f"broken: {b.reason}") for b in registry.broken]
    return rows + [_row("-", owner.name, owner, "blocked") for owner in registry.blocked]


def _row(seam: str, name: str, owner: Owner, state: str) -> dict[str, str]:
    return {
        "seam": seam,
        "name": name,
        "owner": str(owner) if owner.distribution else f"module {owner.name}",
        "origin": owner.origin,
        "state": state,
    }


def _state(offer: Offer) -> str:
    try:
        offer.load()
    except UserError as error:
        return f"broken: {error}"
    return "ok"


def describe(offer: Offer) -> dict[str, Any]:
    """One offer in full: owner, file and line, docstring, facts, options. UserError if broken."""
    cls: Any = offer.load()
    file = inspect.getsourcefile(cls) or offer.owner.origin
    facts = [name for name in fact_types(offer.seam) if name != "Config"]
    return {
        "seam": offer.seam,
        "name": offer.name,
        "owner": str(offer.owner),
        "origin": f"{file}:{inspect.getsourcelines(cls)[1]}",
        "description": inspect.getdoc(cls) or "",
        "facts": {name: getattr(cls, name) for name in facts},
        "options": options(cls.Config),
    }


def print_description(shown: Mapping[str, Any], file: TextIO) -> None:
    """What `describe` returned, for people."""
    out = console(file)
    out.print(f"{shown['seam']} {shown['name']}")
    out.print(f"owner: {shown['owner']}\norigin: {shown['origin']}\n\n{shown['description']}\n")
    print_rows([{"fact": k, "value": str(v)} for k, v in shown["facts"].items()], file)
    seam = shown["seam"]
    rows = [{**row, "name": f"{seam}.{row['name']}"} for row in shown["options"]]
    if rows:
        print_rows(rows, file)
    else:
        out.print("no options")


def print_metrics(outputs: Iterable[RequestOutput], file: TextIO) -> None:
    """A row for each request: tokens, TTFT, mean inter-token latency, rate, how it ended."""
    print_rows([_metrics_row(output) for output in outputs], file)


def _metrics_row(output: RequestOutput) -> dict[str, str]:
    m = output.metrics
    return {
        "request": output.request_id,
        "prompt tokens": str(m.num_prompt_tokens),
        "cached": str(m.num_cached_tokens),
        "output": str(m.num_output_tokens),
        "TTFT ms": _number(m.ttft_ms),
        "mean ITL ms": _number(m.mean_itl_ms),
        "tok/s": _number(m.tokens_per_s),
        "finish": output.finish_reason,
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def print_rows(rows: Sequence[Mapping[str, str]], file: TextIO) -> None:
    """Rows with the same keys as a table."""
    from rich.table import Table

    table = Table()
    for heading in rows[0] if rows else ():
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    console(file).print(table)


def console(file: TextIO) -> Console:
    """A console that prints text as it is; wide where nobody looks, so that rows stay greppable."""
    from rich.console import Console

    width = None if file.isatty() else 500
    return Console(file=file, markup=False, highlight=False, emoji=False, width=width)


@contextmanager
def progress_bar(file: TextIO) -> Iterator[Progress | None]:
    """A callback (stage, done, total) that draws bars on `file`; None if `file` is no terminal."""
    if not file.isatty():
        yield None
        return
    from rich import progress

    columns = (*progress.Progress.get_default_columns(), progress.TimeElapsedColumn())
    with progress.Progress(*columns, console=console(file), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield advance
