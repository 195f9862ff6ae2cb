"""The evaluation's documents, none of which the model has seen, and where their windows lie.

A folder of the evaluation holds `books_en`, `books_zh` and `code` with one .txt a document, and
`recent_docs.jsonl` with `id` and `text`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from core.errors import UserError, explained
from core.inputs import read_text

if TYPE_CHECKING:
    from core.engine import Engine

BOOKS = "books_en"
FOLDERS = (BOOKS, "books_zh", "code")
RECENT = "recent_docs"
_MIN_LINE_CHARS = 60  # shorter ones are headings and replies
_MAX_LINE_CHARS = 200


@dataclass(frozen=True)
class Document:
    """A text; `kind` is the folder or file that it is from."""

    name: str
    kind: str
    text: str

    @property
    def place(self) -> str:
        """What tells it from all others: two folders may hold files of one name."""
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True)
class Span:
    """Tokens of one window. The first is context alone, and stood last in the window before.

    `bytes_before` and `num_bytes` place the text of all other tokens in the document's UTF-8.
    """

    token_ids: list[int]
    bytes_before: int
    num_bytes: int


def read_documents(data: Path, kinds: tuple[str, ...] = (*FOLDERS, RECENT)) -> list[Document]:
    """Every document of these kinds, by kind and name. Raises UserError where a kind has none."""
    found = []
    for kind in kinds:
        documents = _recent(data) if kind == RECENT else _folder(data / kind)
        if not documents:
            raise UserError(f"{data} has no documents in {kind}: name the evaluation's folder")
        found += documents
    return found


def _folder(path: Path) -> list[Document]:
    return [
        Document(file.stem, path.name, read_text(str(file))) for file in sorted(path.glob("*.txt"))
    ]


def _recent(data: Path) -> list[Document]:
    path = data / f"{RECENT}.jsonl"
    with explained(f"{path} holds no lines of JSON with id and text", "restore it"):
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return [Document(row["id"], RECENT, row["text"]) for row in rows]


def spans(engine: Engine, document: Document, window_tokens: int, most: int | None) -> list[Span]:
    """A document as windows of at most `window_tokens` that predict each of its tokens once.

    It begins with the model's end of text, as documents do in training; where the model has none,
    its first token is predicted by nobody. `most` windows are spread over the document; None is
    all of them. Raises UserError if the tokens do not give the text back.
    """
    tokenizer = engine.tokenizer
    ids = [*engine.facts.eos_token_ids[:1], *tokenizer.encode(document.text)]
    decode = tokenizer.incremental()
    place = len(decode(ids[:1], False).encode())
    found = []
    for start in range(0, len(ids) - 1, window_tokens - 1):
        window = ids[start : start + window_tokens]
        is_last = start + window_tokens >= len(ids)
        num_bytes = len(decode(window[1:], is_last).encode())
        found.append(Span(window, place, num_bytes))
        place += num_bytes
    num_bytes = len(document.text.encode())
    if place != num_bytes:
        raise UserError(
            f"the tokens of {document.name} stand for {place} bytes and it has {num_bytes}: "
            "choose a model whose tokenizer keeps text as it is"
        )
    if most is None or most >= len(found):
        return found
    return [found[i] for i in np.linspace(0, len(found) - 1, most).round().astype(int).tolist()]


def filler(engine: Engine, books: list[Document]) -> list[int]:
    """The tokens of all books in a row."""
    return [token for book in books for token in engine.tokenizer.encode(book.text)]


def first_lines(books: list[Document], num: int) -> list[str]:
    """`num` beginnings of paragraphs: the first line of some length after each of several places,
    that are spread over every book."""
    per_book = -(-num // len(books))
    found = []
    for part in range(per_book):
        for book in books:
            start = len(book.text) * part // per_book
            lines = (line.strip() for line in book.text[start:].split("\n")[bool(part) :])
            long = next((line for line in lines if len(line) >= _MIN_LINE_CHARS), book.text.strip())
            cut = long[:_MAX_LINE_CHARS]
            found.append(cut if len(cut) == len(long) else cut.rpartition(" ")[0] or cut)
    return found[:num]


def excerpts(engine: Engine, documents: list[Document], num: int, size: int) -> list[list[int]]:
    """`num` runs of `size` tokens, one from the middle of a document, the kinds in turn.

    Fewer where not so many documents are so long. Raises UserError where none is.
    """
    by_kind: dict[str, list[Document]] = {}
    for document in documents:
        by_kind.setdefault(document.kind, []).append(document)
    rows = range(max(map(len, by_kind.values())))
    turns = [kind[row] for row in rows for kind in by_kind.values() if row < len(kind)]
    found: list[list[int]] = []
    for document in turns:
        if len(found) == num:
            break
        ids = engine.tokenizer.encode(document.text)
        if len(ids) >= size:
            start = (len(ids) - size) // 2
            found.append(ids[start : start + size])
    if not found:
        raise UserError(f"no document has {size} tokens: lower --text-tokens or give longer ones")
    return found
