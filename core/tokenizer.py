"""Text to token ids and back, at once or as a stream.

Streaming is exact: what a `TextStream` gives out, joined, is `decode` of all ids. Where a token is
a string of bytes (byte-level BPE: Qwen, Llama 3) an incremental UTF-8 decoder does it. Elsewhere
(SentencePiece: Llama 2, Mistral) new tokens are decoded together with the one before them, and a
run of single-byte tokens is held back until it ends, because the tokenizer judges such a run as a
whole: one bad byte turns all of it into U+FFFD.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from typing import Any, Protocol

from core.errors import UserError

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


class IncrementalDecoder(Protocol):
    """The state of one stream of ids."""

    def decode(self, ids: Seq[int], final: bool = False) -> str:
        """The text that `ids` add, as far as it is decided; all of it where they are the last."""
        raise NotImplementedError


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer.

    `has_text` is False where ids cannot be turned into text: `decode` gives "" and `encode` raises
    UserError.
    """

    has_text: bool
    eos_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the special tokens (such as a leading BOS) that the model expects."""
        raise NotImplementedError

    def decode(self, ids: Seq[int]) -> str:
        """Text of `ids` without special tokens. Ids that the tokenizer lacks are left out."""
        raise NotImplementedError

    def incremental(self) -> IncrementalDecoder:
        """A decoder for one stream of ids."""
        raise NotImplementedError


class TextStream:
    """The text of a growing list of ids, as deltas; constant work a token on average.

    Joined, the deltas of `push` and the last one of `flush` equal `tokenizer.decode` of all ids. A
    character is held back until it is whole, or cannot become whole any more.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decoder = tokenizer.incremental()

    def push(self, ids: Seq[int]) -> str:
        """The text that `ids` add; "" while it is not decided."""
        return self._decoder.decode(ids)

    def flush(self) -> str:
        """What is held back, at the end of the ids."""
        return self._decoder.decode((), final=True)


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, for models without a vocabulary. Other ids decode to U+FFFD."""

    has_text = True

    def __init__(self, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.eos_token_ids = eos_token_ids

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Seq[int]) -> str:
        return self.incremental().decode(ids, final=True)

    def incremental(self) -> IncrementalDecoder:
        return _ByteDecoder(_byte_or_invalid)


class NoTokenizer:
    """A model that comes without tokenizer files: token ids go in and come out, and no text."""

    has_text = False

    def __init__(self, model: str, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.eos_token_ids = eos_token_ids
        self._model = model

    def encode(self, text: str) -> list[int]:
        raise UserError(
            f"{self._model} has no tokenizer files, so text cannot be encoded; pass token ids, or "
            "add tokenizer.json to its directory."
        )

    def decode(self, ids: Seq[int]) -> str:
        return ""

    def incremental(self) -> IncrementalDecoder:
        return _ByteDecoder(lambda _: b"")


class HFTokenizer:
    """A tokenizer of transformers, without `clean_up_tokenization_spaces`, which is not local."""

    has_text = True

    def __init__(self, backend: Any, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.eos_token_ids = eos_token_ids
        self.backend = backend
        self._skipped = {i for i, token in backend.added_tokens_decoder.items() if token.special}
        self._byte_level = _is_byte_level(backend)
        self._pieces: dict[int, bytes] = {}
        self._alphabet = _byte_alphabet()

    def encode(self, text: str) -> list[int]:
        return list(self.backend(text, verbose=False).input_ids)

    def decode(self, ids: Seq[int]) -> str:
        text: str = self.backend.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def incremental(self) -> IncrementalDecoder:
        return _ByteDecoder(self._piece) if self._byte_level else _WindowDecoder(self)

    def token(self, token_id: int) -> str | None:
        """The token's string, or None where `decode` leaves it out: special or unknown."""
        if token_id in self._skipped:
            return None
        token: str | None = self.backend.convert_ids_to_tokens(token_id)
        return token

    def _piece(self, token_id: int) -> bytes:
        """The bytes of a byte-level token, remembered. Added tokens stand for their own text."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self.token(token_id) or ""
            try:
                piece = bytes(self._alphabet[char] for char in token)
            except KeyError:
                piece = token.encode("utf-8")
            self._pieces[token_id] = piece
        return piece


def load_tokenizer(directory: Path, eos_token_ids: tuple[int, ...]) -> Tokenizer:
    """The tokenizer of a model directory, or `NoTokenizer` where it holds no tokenizer files.

    Local files only, and no code from them. Raises UserError if transformers cannot read them.
    """
    if not any((directory / name).is_file() for name in _FILES):
        return NoTokenizer(directory.name, eos_token_ids)
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a broken file raises whatever parser it broke
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"The tokenizer files of {directory} cannot be read ({type(error).__name__}: {reason});"
            " restore them, or remove them to run on token ids."
        ) from error
    return HFTokenizer(backend, eos_token_ids)


class _ByteDecoder:
    """For tokens that are strings of bytes."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def decode(self, ids: Seq[int], final: bool = False) -> str:
        return self._utf8.decode(b"".join(map(self._piece, ids)), final)


class _WindowDecoder:
    """For tokens whose text depends on the token before: each is decoded twice at most."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # the last token given out, unless nothing was
        self._pending: list[int] = []

    def decode(self, ids: Seq[int], final: bool = False) -> str:
        num_decided = 0
        for token_id in ids:
            token = self._tokenizer.token(token_id)
            if token is None:
                continue
            self._pending.append(token_id)
            if not (len(token) == 6 and token.startswith("<0x") and token.endswith(">")):
                num_decided = len(self._pending)
        return self._give_out(len(self._pending) if final else num_decided)

    def _give_out(self, num_tokens: int) -> str:
        if not num_tokens:
            return ""
        fresh, self._pending = self._pending[:num_tokens], self._pending[num_tokens:]
        before = self._tokenizer.decode(self._context)
        after = self._tokenizer.decode(self._context + fresh)
        self._context = fresh[-1:]
        return after[len(before) :]


def _byte_or_invalid(token_id: int) -> bytes:
    return bytes((token_id,)) if 0 <= token_id < 256 else b"\xff"  # 0xff occurs nowhere in UTF-8


def _is_byte_level(backend: Any) -> bool:
    pipeline = getattr(backend, "backend_tokenizer", None)
    if pipeline is None or pipeline.decoder is None:
        return False
    kind = json.loads(pipeline.decoder.__getstate__())["type"]
    return bool(kind == "ByteLevel")


def _byte_alphabet() -> dict[str, int]:
    """How byte-level BPE spells bytes: printable Latin-1 as itself, the other 68 from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }
