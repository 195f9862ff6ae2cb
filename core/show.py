"""What the command line shows to people: the offers, one offer in full, the metrics of a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from pydantic import TypeAdapter

from core.config import versions
from core.conform import fact_types
from core.errors import RunError, UserError
from core.seams import SEAMS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from core.engine import RequestOutput
    from core.registry import Offer, Owner, Registry

Progress = Callable[[str, int, int], None]


def offer_rows(
    registry: Registry, check: Callable[[Offer], object], trouble: str
) -> list[dict[str, str]]:
    """Every offer with its state, then the plugins without offers: hooks only, broken, blocked.

    The state is "ok" where `check(offer)` passes, else `trouble` and the sentence that it raised.
    """
    offers = [offer for seam in SEAMS for _, offer in sorted(registry.offers[seam].items())]
    rows = []
    for offer in offers:
        state = "ok"
        try:
            check(offer)
        except (UserError, RunError) as error:
            state = f"{trouble}: {error}"
        rows.append(_row(offer.seam, offer.name, offer.owner, state))
    idle = [o for o in registry.owners.values() if all(o != offer.owner for offer in offers)]
    others = {**dict.fromkeys(idle, "ok, hooks only"), **registry.aside}
    return rows + [_row("-", owner.name, owner, state) for owner, state in others.items()]


def _row(seam: str, name: str, owner: Owner, state: str) -> dict[str, str]:
    who = str(owner) if owner.distribution else f"module {owner.name}"
    return {"seam": seam, "name": name, "owner": who, "origin": owner.origin, "state": state}


def describe(offer: Offer) -> dict[str, Any]:
    """One offer in full: owner, file and line, docstring, facts, options. UserError if broken."""
    cls: Any = offer.load()
    file = inspect.getsourcefile(cls) or offer.owner.origin
    stated = [*fact_types(offer.seam), "heeds_priority", "held_to", "quality"]
    return {
        "seam": offer.seam,
        "name": offer.name,
        "owner": str(offer.owner),
        "origin": f"{file}:{inspect.getsourcelines(cls)[1]}",
        "description": inspect.getdoc(cls) or "",
        "facts": {n: getattr(cls, n) for n in stated if n != "Config" and hasattr(cls, n)},
        "options": [
            {
                "name": f"{offer.seam}.{name}",
                "type": inspect.formatannotation(field.annotation),
                "default": "(required)" if field.is_required() else repr(field.get_default()),
                "description": field.description or "",
            }
            for name, field in cls.Config.model_fields.items()
        ],
    }


def environment(registry: Registry, check: Callable[[Offer], object]) -> dict[str, Any]:
    """What decides whether an offer runs here, and of each whether it does."""
    import torch

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "versions": versions(),
        "cuda": torch.version.cuda,
        "gpus": [{"name": gpu.name, "memory GiB": gpu.total_memory / 2**30} for gpu in gpus],
        "offers": offer_rows(registry, check, "does not run here"),
    }


def metrics_rows(outputs: Iterable[RequestOutput]) -> list[dict[str, Any]]:
    """A row for each request: tokens, TTFT, mean inter-token latency, rate, how it ended."""
    return [
        {
            "request": output.request_id,
            "prompt": output.metrics.num_prompt_tokens,
            "cached": output.metrics.num_cached_tokens,
            "output": output.metrics.num_output_tokens,
            "TTFT ms": output.metrics.ttft_ms,
            "TPOT ms": output.metrics.tpot_ms,
            "tok/s": output.metrics.tokens_per_s,
            "finish": output.finish_reason,
        }
        for output in outputs
    ]


def print_record(record: Mapping[str, Any], file: TextIO, output: str = "text") -> None:
    """Print an object as JSON, or for people: a line for each scalar, a table for all else.

    In JSON NaN and infinity are null, and what has no form of its own is its text.
    """
    if output == "json":
        print(TypeAdapter(Any).dump_json(record, indent=2, fallback=str).decode(), file=file)
        return
    for name, value in record.items():
        if isinstance(value, Mapping):
            nested = all(isinstance(v, Mapping) for v in value.values())
            value = [{name: k, **(v if nested else {"value": v})} for k, v in value.items()]
        if isinstance(value, list):
            print_rows(value, file)
        else:
            console(file).print(f"{name}: {_cell(value)}")


def print_rows(rows: Sequence[Mapping[str, Any]], file: TextIO) -> None:
    """Rows with the same keys as a table; nothing where there are none."""
    from rich.table import Column, Table

    if rows:
        table = Table(*(Column(heading, overflow="fold") for heading in rows[0]))
        for row in rows:
            table.add_row(*map(_cell, row.values()))
        console(file).print(table)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def console(file: TextIO) -> Console:
    """A console that prints text as it is; wide where nobody looks, so that rows stay greppable."""
    from rich.console import Console

    width = None if file.isatty() else 500
    return Console(file=file, markup=False, highlight=False, emoji=False, width=width)


@contextmanager
def progress_bar(file: TextIO) -> Iterator[Progress]:
    """A callback (stage, done, total) that draws bars on `file`, if that is a terminal."""
    from rich import progress

    with progress.Progress(console=console(file), transient=True, disable=not file.isatty()) as bar:
        tasks: dict[str, TaskID] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield advance
