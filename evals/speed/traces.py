"""Recorded workloads: when requests came, how long they were, and what prefixes they share.

- Azure: CSV with TIMESTAMP (a date), ContextTokens, GeneratedTokens.
- Mooncake: JSONL with timestamp (ms), input_length, output_length, and hash_ids, one for every 512
  tokens of the prompt: an equal id is an equal block, behind equal ones.
- any other CSV with a head line, JSONL or JSON array: its columns are named (`Columns`).

Lengths are replayed, not texts: the token counts are those of other tokenizers. Requests come in
the order of the trace; only their time is scaled.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from core.errors import UserError, explained
from evals.arguments import count, positive

UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # of each in a second
DATE = "date"
HASH_BLOCK = 512  # tokens
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Item(NamedTuple):
    """A request: when it is due, in seconds, its lengths in tokens, and its blocks of prompt tokens
    by number, where the trace has them."""

    at: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...] = ()


class Columns(NamedTuple):
    """Which columns hold what; `unit` is one of UNITS, or "date" for dates as in ISO 8601;
    `hash_ids` is None where no column has them."""

    timestamp: str
    input_length: str
    output_length: str
    hash_ids: str | None
    unit: str


AZURE = Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", None, DATE)
MOONCAKE = Columns("timestamp", "input_length", "output_length", "hash_ids", "ms")
_NAMES = ("timestamp", "input_length", "output_length", "hash_ids")


class Source(NamedTuple):
    """How a file is read. `columns`: None if it is Azure's or Mooncake's; `hash_block`: tokens that
    a hash is of, None: HASH_BLOCK; `jitter_s`: seconds within which requests of one stamp are
    spread, 0: none, None: what stamps are seen to be rounded to."""

    columns: Columns | None = None
    hash_block: int | None = None
    jitter_s: float | None = None
    seed: int = 0


class Trace(NamedTuple):
    """Requests in order, the first at 0; how many of each kind were left out, and within how many
    seconds stamps were spread (None: they stand as they were)."""

    name: str
    arrivals: list[Item]
    dropped: dict[str, int]
    hash_block: int = HASH_BLOCK
    jitter_s: float | None = None

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def span_s(self) -> float:
        return self.arrivals[-1].at


def read_trace(
    path: Path,
    *,
    max_model_len: int,
    num_requests: int | None = None,
    source: Source | None = None,
) -> Trace:
    """The trace in `path`, or its first `num_requests`, without those that are longer than
    `max_model_len` tokens. Raises UserError for what is no trace, and where fewer than two fit."""
    source = source or Source()
    rows = _rows(path)
    columns = source.columns or _known(path, rows)
    if source.hash_block and columns.hash_ids is None:
        raise UserError(
            f"--hash-block-size would change nothing: no hashes are read from {path}; leave it "
            "out, or name their column"
        )
    size = source.hash_block or HASH_BLOCK
    items = sorted(_items(path, rows, columns, size), key=lambda item: item.at)
    width = source.jitter_s
    if width is None:
        width = quantum_s([item.at for item in items])
    if width and items:
        items = _spread(items, width, source.seed)
    items = items[:num_requests]
    kept, dropped = fitting(items, max_model_len)
    if len(kept) < 2:
        raise UserError(
            f"{path} has {len(kept)} of {len(items)} requests within {max_model_len} tokens: "
            "raise --max-model-len or give a longer trace"
        )
    kept = [item._replace(at=item.at - kept[0].at) for item in kept]
    return Trace(path.stem, kept, dropped, size, width or None)


def fitting(items: Iterable[Item], max_model_len: int) -> tuple[list[Item], dict[str, int]]:
    """Requests that an engine can be given, and how many it cannot, by what they are."""
    kept, dropped = [], dict[str, int]()
    for item in items:
        if item.num_prompt + item.num_output > max_model_len:
            why = f"longer than {max_model_len:,} tokens"
        elif item.num_prompt < 1 or item.num_output < 1:
            why = "without a token of prompt or output"
        else:
            kept.append(item)
            continue
        dropped[why] = dropped.get(why, 0) + 1
    return kept, dropped


# -------- files


def _rows(path: Path) -> list[Mapping[str, Any]]:
    """As dictionaries, whatever the file is."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"{path} cannot be read ({why}): name a trace") from error
    rows: list[Mapping[str, Any]]
    try:
        if text.lstrip()[:1] == "[":
            rows = json.loads(text)
        elif text.lstrip()[:1] == "{":
            return _json_lines(path, text)
        else:
            rows = list(csv.DictReader(io.StringIO(text, newline="")))
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path} is neither CSV nor JSON lines ({error}): name a trace") from error
    if not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} has lines that are no objects: name a trace")
    return rows


def _json_lines(path: Path, text: str) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        with explained(f"line {number} of {path} is no JSON object", "mend or remove it"):
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError(f"it is {line.strip()[:20]}")
        found.append(row)
    return found


def _known(path: Path, rows: Seq[Mapping[str, Any]]) -> Columns:
    """By the columns of the first row. Mooncake's names with any other beside them may be those of
    a trace whose unit is another, so they are asked for."""
    names = set(rows[0]) if rows else set[str]()
    if {AZURE.timestamp, AZURE.input_length, AZURE.output_length} <= names:
        return AZURE
    if names == set(_NAMES[:3]):
        return MOONCAKE._replace(hash_ids=None)
    if names == set(_NAMES):
        return MOONCAKE
    seen = f"the columns {', '.join(map(str, rows[0]))}" if rows else "no rows"
    raise UserError(
        f"{path} has {seen}, neither an Azure trace's (TIMESTAMP, ContextTokens, GeneratedTokens) "
        "nor Mooncake's (timestamp, input_length, output_length, hash_ids): give --columns "
        "timestamp=… input_length=… output_length=… and --time-unit"
    )


def _items(
    path: Path, rows: Seq[Mapping[str, Any]], columns: Columns, hash_block: int
) -> list[Item]:
    wanted = [name for name in columns[:4] if name is not None]
    if missing := [name for name in wanted if rows and name not in rows[0]]:
        raise UserError(
            f"{path} has no column {missing[0]}, but {', '.join(map(str, rows[0]))}: name these"
        )
    numbers: dict[Any, int] = {}
    found: list[Item] = []
    first = None
    for i, row in enumerate(rows, 1):
        try:
            stamp = _stamp(row[columns.timestamp], columns.unit)
            first = stamp if first is None else first
            at = (stamp - first) / UNITS.get(columns.unit, UNITS["us"])
            lengths = (_whole(row[name]) for name in (columns.input_length, columns.output_length))
            num_prompt, num_output = lengths
            ids = _ids(row[columns.hash_ids]) if columns.hash_ids else []
            blocks = tuple(numbers.setdefault(one, len(numbers)) for one in ids)
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"row {i} of {path} is no request ({error}): mend it") from error
        if ids and len(ids) != math.ceil(num_prompt / hash_block):
            raise UserError(
                f"row {i} of {path} has {len(ids)} hashes for {num_prompt} tokens, not one for "
                f"every {hash_block}: give --hash-block-size, or leave hash_ids out of --columns"
            )
        found.append(Item(at, num_prompt, num_output, blocks))
    return found


def _stamp(value: Any, unit: str) -> float:
    """In units; a date in whole microseconds, so that differences are exact."""
    if unit == DATE:
        date = datetime.fromisoformat(value)
        return (date.replace(tzinfo=date.tzinfo or UTC) - _EPOCH) // timedelta(microseconds=1)
    if not math.isfinite(stamp := float(value)):
        raise ValueError(f"{value} is no time")
    return stamp


def _whole(value: Any) -> int:
    number = float(value)
    if not (number.is_integer() and number >= 0):
        raise ValueError(f"{value} is no number of tokens")
    return int(number)


def _ids(value: Any) -> list[Any]:
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, list):
        raise ValueError(f"{value} is no list of hashes")
    return found


# -------- stamps


def quantum_s(stamps_s: Seq[float]) -> float | None:
    """The time to which stamps are rounded: the median gap between those that differ, where more
    than half of the requests share theirs with an earlier one; else None."""
    distinct = np.unique(stamps_s)
    if len(distinct) < 2 or len(distinct) * 2 > len(stamps_s):
        return None
    return float(np.median(np.diff(distinct)))


def _spread(items: Seq[Item], width_s: float, seed: int) -> list[Item]:
    """Those of one stamp, over `width_s` behind it but not beyond the next; order stays."""
    rng = np.random.default_rng([seed, 11])
    stamps, places, counts = np.unique(
        [item.at for item in items], return_inverse=True, return_counts=True
    )
    room = np.minimum(width_s, np.diff(stamps, append=np.inf))
    drawn = np.concatenate([np.sort(rng.random(n)) for n in counts.tolist()])
    at = stamps[places] + drawn * room[places]
    return [item._replace(at=float(when)) for item, when in zip(items, at, strict=True)]


# -------- what a trace is like


def described(trace: Trace) -> dict[str, Any]:
    """Figures by which traces are compared: quantiles of lengths, requests a second, coefficient of
    variation of the gaps, the busiest 10 s over their mean, the correlation of lengths, and the
    share of blocks that a cache of any size would have (None: they are not known)."""
    at, num_prompt, num_output = (
        np.array([item[i] for item in trace.arrivals], float) for i in range(3)
    )
    gaps, span = np.diff(at), trace.span_s
    busiest = np.unique(at // 10, return_counts=True)[1].max()

    def quantiles(values: Any) -> list[float]:
        return [float(np.percentile(values, point)) for point in (50, 90, 99, 100)]

    moves = num_prompt.std() > 0 and num_output.std() > 0
    return {
        "num_requests": len(at),
        "num_dropped": trace.num_dropped,
        "input_tokens p50 p90 p99 max": quantiles(num_prompt),
        "output_tokens p50 p90 p99 max": quantiles(num_output),
        "request_rate": len(at) / span if span else None,
        "gap_cv": float(gaps.std() / gaps.mean()) if span else None,
        "peak_over_mean_10s": float(busiest * (at[-1] // 10 + 1) / len(at)),
        "length_correlation": float(np.corrcoef(num_prompt, num_output)[0, 1]) if moves else None,
        "shared_blocks": shared_blocks(trace.arrivals),
    }


def shared_blocks(items: Iterable[Item]) -> float | None:
    """Blocks at the head of a prompt that an earlier one has too, over all blocks."""
    seen = set[int]()
    num_shared = num_all = 0
    for item in items:
        fresh = next((i for i, b in enumerate(item.blocks) if b not in seen), len(item.blocks))
        num_shared, num_all = num_shared + fresh, num_all + len(item.blocks)
        seen.update(item.blocks)
    return num_shared / num_all if num_all else None


# -------- the command line


def add_options(add: Callable[..., Any]) -> None:
    """Those that say how a trace is to be read, for `source_of`."""
    names = ", ".join(_NAMES)
    add("--columns", nargs="+", metavar="NAME=COLUMN", help=f"of any other trace: {names}")
    add("--time-unit", choices=(*UNITS, DATE), help="of the stamps of --columns")
    add("--hash-block-size", type=count, metavar="TOKENS", help=f"default: {HASH_BLOCK}")
    about = "spread requests of one stamp; default: auto, over what stamps are rounded to"
    add("--jitter", type=_jitter, metavar="auto|off|SECONDS", help=about)


def _jitter(text: str) -> float | None:
    return None if text == "auto" else 0.0 if text == "off" else positive(text)


def source_of(args: argparse.Namespace) -> Source:
    """Raises UserError where --columns do not say what is needed."""
    if args.columns is None:
        if args.time_unit is not None:
            raise UserError("--time-unit is that of --columns: give both, or neither")
        columns = None
    else:
        columns = _columns(args.columns, args.time_unit)
    return Source(columns, args.hash_block_size, args.jitter, args.seed)


def _columns(pairs: Seq[str], unit: str | None) -> Columns:
    given = dict(pair.partition("=")[::2] for pair in pairs)
    if unknown := [name for name, column in given.items() if name not in _NAMES or not column]:
        raise UserError(
            f"--columns has {unknown[0]!r}, which is none of {', '.join(_NAMES)} with =COLUMN"
        )
    if missing := [name for name in _NAMES[:3] if name not in given]:
        raise UserError(f"--columns lacks {missing[0]}=COLUMN: name the column that has it")
    if unit is None:
        raise UserError(
            f"--columns needs --time-unit, that of the stamps: {', '.join((*UNITS, DATE))}"
        )
    stamp, num_prompt, num_output = (given[name] for name in _NAMES[:3])
    return Columns(stamp, num_prompt, num_output, given.get("hash_ids"), unit)
