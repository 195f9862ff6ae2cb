"""Documents from where users have them: local files, folders of .txt, data sets of the hub."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from core.errors import UserError, explained
from core.inputs import read_text
from evals.tiny.documents import Document

_SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")


class Choice(NamedTuple):
    """Which texts of a source: the field of a row, the split of a hub data set, how many."""

    field: str = "text"
    split: str = "test"
    limit: int = 64


def read_documents(sources: list[str], choice: Choice) -> list[Document]:
    """The first `choice.limit` documents of each source, in order, but for blank and repeated ones.

    The same text twice is no second sample.

    A source is a file (one document a .txt; a row each of .jsonl, .json, .parquet), a folder of
    .txt files, or a data set of the hub as NAME or NAME:CONFIG, which is streamed. Raises UserError
    where one cannot be read, has no such field, or has no text.
    """
    found: dict[str, Document] = {}
    for source in dict.fromkeys(sources):
        rows = _documents(source, choice)
        fresh = (row for row in rows if row.text.strip() and row.text not in found)
        before = len(found)
        while len(found) < before + choice.limit and (row := next(fresh, None)):
            found[row.text] = row
        if len(found) == before:
            raise UserError(f"{source} has no document with text of its own: name another")
    return list(found.values())


def read_rows(
    source: str, choice: Choice, fields: tuple[str, ...], options: tuple[str, ...]
) -> list[tuple[str, ...]]:
    """The first `choice.limit` rows of a source, the texts of `fields` of each.

    `options` are those of the command that choose the fields, for what is said where one is not
    there. Raises UserError as `read_documents` does; numbers are taken as they are written.
    """
    path = Path(source)
    if not has_rows(source):
        kinds = ", ".join(_SUFFIXES[1:])
        raise UserError(f"{source} has no rows: give one of {kinds}, or a data set of the hub")
    rows = itertools.islice(_rows(path, source, choice), choice.limit)
    found = [
        tuple(
            _text(row, field, f"row {number} of {source}", option)
            for field, option in zip(fields, options, strict=True)
        )
        for number, row in enumerate(rows, 1)
    ]
    if not found:
        raise UserError(f"{source} has no rows: name another")
    return found


def has_rows(source: str) -> bool:
    """Whether a source is of rows with fields, not of whole texts."""
    return not Path(source).is_dir() and Path(source).suffix != ".txt"


def is_of_the_hub(source: str) -> bool:
    """Whether a source is looked for on the hub: it is no file here and looks like none."""
    path = Path(source)
    is_local = path.suffix in _SUFFIXES or source.startswith((".", "/", "~"))
    return not (path.exists() or is_local)


def _documents(source: str, choice: Choice) -> Iterator[Document]:
    path = Path(source)
    if path.is_dir():
        for file in sorted(path.glob("*.txt")):
            yield Document(file.stem, source, read_text(str(file)))
    elif path.suffix == ".txt" and path.is_file():
        yield Document(path.stem, source, read_text(source))
    else:
        for number, row in enumerate(_rows(path, source, choice), 1):
            text = _text(row, choice.field, f"row {number} of {source}")
            yield Document(f"row {number}", source, text)


def _rows(path: Path, source: str, choice: Choice) -> Iterator[Any]:
    if is_of_the_hub(source):
        return _hub(source, choice.split)
    if not path.is_file():
        raise UserError(f"there is no file or folder {source}: name one that is there")
    if path.suffix not in _SUFFIXES:
        raise UserError(f"{source} is none of {', '.join(_SUFFIXES)}: convert it to one of them")
    return {".jsonl": _lines, ".json": _objects, ".parquet": _parquet}[path.suffix](path)


def _lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig") as lines:
        for number in itertools.count(1):
            with explained(f"line {number} of {path} is no JSON in UTF-8", "mend or remove it"):
                if not (line := lines.readline()):
                    return
                row = json.loads(line) if line.strip() else None
            if row is not None:
                yield row


def _objects(path: Path) -> Iterator[Any]:
    with explained(f"{path} is no JSON", "give a list of objects, or .jsonl"):
        content = json.loads(read_text(str(path)))
    yield from content if isinstance(content, list) else [content]


def _parquet(path: Path) -> Iterator[Any]:
    with explained(f"{path} cannot be read as parquet", "write it anew"):
        from datasets import load_dataset

        yield from load_dataset("parquet", data_files=str(path), split="train", streaming=True)


def _hub(source: str, split: str) -> Iterator[Any]:
    name, _, config = source.partition(":")
    advice = (
        "mend its name or --split, write NAME:CONFIG where it has several, go online, or give files"
    )
    with explained(f"split {split!r} of the data set {source} cannot be had", advice):
        from datasets import load_dataset

        yield from load_dataset(name, config or None, split=split, streaming=True)


def _text(row: Any, field: str, where: str, option: str = "--field") -> str:
    """The text of a row: a string by itself, or the field of an object."""
    value = row.get(field) if isinstance(row, Mapping) else row
    if isinstance(value, int | float) and option != "--field":
        return str(value)
    if isinstance(value, str):
        return value
    if isinstance(row, Mapping):
        has = ", ".join(map(str, row)) or "nothing"
        raise UserError(f"{where} has no string in {field!r}: choose {option} from {has}")
    raise UserError(f"{where} is no object and no string: give rows with the field {field!r}")
