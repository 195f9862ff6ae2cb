"""Choose documents from a corpus and pack their tokens into one file for the training.

    python -m evals.tiny.corpus CORPUS.jsonl.xz --tokenizer DIR --out FILE

The corpus has one JSON object a line with `lang`, `kind`, `source`, `id` and `text`. `MIX` says how
many bytes of which part are taken; which documents these are depends on their ids alone. A few per
mille of every part are held out for validation. `training_documents` yields the texts of exactly
the documents that were packed.

The file is xz: one line of JSON (a header with the figures of every part), three arrays (length,
part and split of every document), then the tokens as little-endian uint16. Documents of one part
stand together, because that compresses better; none has a separator behind it.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from core.errors import UserError, explained, reason
from evals.arguments import Parser
from evals.records import check_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

FIELDS = ("id", "lang", "kind", "source", "text")
MAX_FILE_BYTES = 40 * 2**20
HELD_OUT = 0.005  # of the bytes of every part, one document at least
SPLITS = ("train", "valid")
MB = 1_000_000


@dataclass(frozen=True)
class Part:
    """Documents of one language and kind whose source contains a text, up to a number of bytes."""

    name: str
    lang: str
    kind: str
    source: str
    max_bytes: int


# A document belongs to the first part that it matches, and to none if that part is full. WordNet,
# the factbook and the PostgreSQL reference are short in it: they are unlike prose.
MIX = (
    Part("books", "en", "book", "", 96 * MB),
    Part("postgres", "en", "docs", "postgresql", 1 * MB),
    Part("docs", "en", "docs", "", 32 * MB),
    Part("textbooks", "en", "textbook", "", 3 * MB),
    Part("factbook", "en", "reference", "factbook", 500_000),
    Part("wordnet", "en", "dictionary", "wordnet", 500_000),
    Part("math", "en", "math", "", 4 * MB),
    Part("chat", "en", "chat", "", 1 * MB),
    Part("qa-wordnet", "en", "qa", "wordnet", 1 * MB),
    Part("qa-factbook", "en", "qa", "factbook", 1 * MB),
    Part("python", "code", "python", "", 8 * MB),
    Part("go", "code", "go", "", 1 * MB),
    Part("zh-books", "zh", "book", "", 5 * MB),
    Part("zh-poetry", "zh", "poetry", "", 500_000),
    Part("zh-docs", "zh", "docs", "", 4 * MB),
)
# Bytes of every part that the tokeniser learns from, and how much of one document at most.
TOKENIZER_SAMPLE = {
    "books": 24 * MB,
    "docs": 8 * MB,
    "textbooks": 2 * MB,
    "math": 2 * MB,
    "chat": MB,
    "qa-wordnet": 500_000,
    "python": 6 * MB,
    "go": 500_000,
    "zh-books": 4 * MB,
    "zh-docs": 4 * MB,
}
SAMPLE_CHARACTERS = 120_000


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a corpus. Raises UserError where it cannot be read."""
    try:
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                yield {name: row[name] for name in FIELDS}
    except (OSError, EOFError, ValueError, TypeError, KeyError, lzma.LZMAError) as error:
        raise UserError(
            f"{path} cannot be read as a corpus ({reason(error)}); name a .jsonl.xz of objects "
            f"with {', '.join(FIELDS)}"
        ) from error


def part_of(row: dict[str, Any]) -> Part | None:
    for part in MIX:
        fits = (row["lang"], row["kind"]) == (part.lang, part.kind)
        if fits and part.source in row["source"]:
            return part
    return None


def choose(path: Path) -> dict[int, tuple[str, str]]:
    """Row number -> part and split, for the rows that are taken.

    In every part documents come in the order of a hash of their ids: the first are held out, and
    then they are taken for training as long as they fit into the part's bytes.
    """
    rows: dict[Part, list[tuple[bytes, int, int]]] = defaultdict(list)
    for number, row in enumerate(read_rows(path)):
        part = part_of(row)
        if part is not None:
            order = hashlib.sha256(f"{row['source']} {row['id']}".encode()).digest()
            rows[part].append((order, number, len(row["text"].encode())))
    chosen: dict[int, tuple[str, str]] = {}
    for part, documents in rows.items():
        held_out = min(part.max_bytes, sum(size for _, _, size in documents)) * HELD_OUT
        used = {"train": 0, "valid": 0}
        for _, number, size in sorted(documents):
            split = "train" if used["valid"] >= held_out else "valid"
            if split == "valid" or used[split] + size <= part.max_bytes:
                used[split] += size
                chosen[number] = (part.name, split)
    return chosen


def documents(path: Path) -> Iterator[tuple[str, str, str]]:
    """Part, split and text of every document that is taken, in the order of the corpus."""
    chosen = choose(path)
    for number, row in enumerate(read_rows(path)):
        if number in chosen:
            yield *chosen[number], row["text"]


def training_documents(path: str | Path, split: str = "train") -> Iterator[str]:
    """The texts that are packed for a split, "train" or "valid"."""
    for _, its_split, text in documents(Path(path)):
        if its_split == split:
            yield text


def sample_documents(path: Path, sample: dict[str, int]) -> Iterator[str]:
    """Fronts of training documents, up to `sample[part]` bytes of every part."""
    left = dict(sample)
    for part, split, text in documents(path):
        if split == "train" and left.get(part, 0) > 0:
            front = text[:SAMPLE_CHARACTERS]
            left[part] -= len(front.encode())
            yield front


@dataclass(frozen=True)
class Packed:
    """The packed corpus: `tokens` uint16 [num_tokens]; document d is tokens[starts[d]:starts[d+1]],
    of part `parts[d]` (an index into `names`) and of split `splits[d]` (an index into SPLITS)."""

    tokens: np.ndarray
    starts: np.ndarray
    parts: np.ndarray
    splits: np.ndarray
    names: list[str]
    figures: dict[str, dict[str, dict[str, int]]]  # part -> split -> documents, bytes, tokens


def write(
    rows: list[tuple[str, str, str]],
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    max_bytes: int = MAX_FILE_BYTES,
) -> dict[str, dict[str, dict[str, int]]]:
    """Tokenise (part, split, text) rows into the file `out` and return the figures of every part.

    Raises UserError, and writes nothing, where the file would be larger than `max_bytes`.
    """
    if not rows:
        raise UserError("no document of the corpus is of a part that MIX names: choose another")
    names = sorted({part for part, _, _ in rows})
    rows = sorted(rows, key=lambda row: (row[1], row[0]))
    figures: dict[str, dict[str, dict[str, int]]] = {
        name: {split: {"documents": 0, "bytes": 0, "tokens": 0} for split in SPLITS}
        for name in names
    }
    lengths, pieces = [], []
    for start in range(0, len(rows), 256):
        texts = [text for _, _, text in rows[start : start + 256]]
        batch: Any = tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        for (part, split, text), ids in zip(rows[start:], batch["input_ids"], strict=False):
            pieces.append(np.array(ids, "<u2"))
            lengths.append(len(ids))
            row = figures[part][split]
            row["documents"] += 1
            row["bytes"] += len(text.encode())
            row["tokens"] += len(ids)
    header = {"names": names, "documents": len(rows), "figures": figures}
    blob = b"".join(
        [
            json.dumps(header).encode() + b"\n",
            np.array(lengths, "<u4").tobytes(),
            np.array([names.index(part) for part, _, _ in rows], "u1").tobytes(),
            np.array([SPLITS.index(split) for _, split, _ in rows], "u1").tobytes(),
            *(piece.tobytes() for piece in pieces),
        ]
    )
    print(f"{sum(lengths):,} tokens of {len(rows):,} documents; compressing", flush=True)
    data = lzma.compress(blob, filters=_filters(len(blob)))
    if len(data) > max_bytes:
        raise UserError(
            f"{sum(lengths):,} tokens take {len(data) / 2**20:.1f} MiB and the file may take "
            f"{max_bytes / 2**20:.1f}; lower max_bytes of some part in MIX"
        )
    out.write_bytes(data)
    return figures


def _filters(num_bytes: int) -> list[dict[str, int]]:
    """LZMA2 told that the data are units of two bytes, with a window over all of them."""
    window = min(256 * 2**20, max(2**16, num_bytes))
    preset = 9 | lzma.PRESET_EXTREME
    return [
        {"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": window, "lc": 3, "lp": 1, "pb": 1}
    ]


def load(path: str | Path) -> Packed:
    """Read a file of `write`. Raises UserError where it is not one."""
    try:
        blob = lzma.decompress(Path(path).read_bytes())
        header = json.loads(blob[: blob.index(b"\n")])
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise UserError(
            f"{path} is no packed corpus ({error}); name a file that evals.tiny.corpus wrote"
        ) from error
    count, at = header["documents"], blob.index(b"\n") + 1
    lengths = np.frombuffer(blob, "<u4", count, at)
    parts = np.frombuffer(blob, "u1", count, at + 4 * count)
    splits = np.frombuffer(blob, "u1", count, at + 5 * count)
    tokens = np.frombuffer(blob, "<u2", -1, at + 6 * count)
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return Packed(tokens, starts, parts, splits, header["names"], header["figures"])


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Raises UserError where the folder holds none."""
    from transformers import PreTrainedTokenizerFast

    with explained(f"{folder} holds no tokeniser", "name the folder of evals.tiny.tokenizer"):
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)


def main() -> int:
    parser = Parser("evals.tiny.corpus", __doc__)
    parser.add_argument("corpus", type=Path, help="documents, one JSON object a line, .xz")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the tokeniser")
    parser.add_argument("--out", type=Path, required=True, help="the packed file")
    options = parser.parse_args()
    try:
        check_folder(options.out)
        tokenizer = read_tokenizer(options.tokenizer)
        figures = write(list(documents(options.corpus)), tokenizer, options.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(figures, indent=1))
    print(f"{options.out}: {options.out.stat().st_size / 2**20:.2f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
