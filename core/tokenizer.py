"""Text to token ids and back, at once or as a stream.

Streaming is exact: what a `Decoder` gives out, joined, is `decode` of all ids. Where a token is
a string of bytes (byte-level BPE: Qwen, Llama 3) an incremental UTF-8 decoder does it. Elsewhere
(SentencePiece: Llama 2, Mistral) new tokens are decoded together with the one before them, and a
run of single-byte tokens is held back until it ends, because the tokenizer judges such a run as a
whole: one bad byte turns all of it into U+FFFD.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from typing import Any, cast

from core.errors import UserError, explained

# One stream of ids: (ids, whether they are the last) -> the text that they add. A character is held
# back until it is whole, or cannot become whole any more; a token costs constant work on average.
Decoder = Callable[[Seq[int], bool], str]

_BYTE = re.compile("<0x..>")
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


class Tokenizer:
    """What the engine asks of a tokenizer.

    `has_text` is False where ids cannot be turned into text: `decode` gives "" and `encode` raises
    UserError.
    """

    has_text = True

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the special tokens (such as a leading BOS) that the model expects."""
        raise NotImplementedError

    def chat(self, text: str) -> list[int] | None:
        """Ids of `text` as the one message of a user, up to where the answer begins.

        None where the model has no template for chats.
        """
        return None

    def decode(self, ids: Seq[int]) -> str:
        """Text of `ids` without special tokens. Ids that the tokenizer lacks are left out."""
        return self.incremental()(ids, True)

    def incremental(self) -> Decoder:
        """A decoder for one stream of ids."""
        raise NotImplementedError


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255, for models without a vocabulary. Other ids decode to U+FFFD."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def incremental(self) -> Decoder:
        # 0xFF occurs nowhere in UTF-8.
        return _byte_decoder(lambda i: bytes((i,)) if 0 <= i < 256 else b"\xff")


class NoTokenizer(Tokenizer):
    """A model that comes without tokenizer files: token ids go in and come out, and no text."""

    has_text = False

    def encode(self, text: str) -> list[int]:
        what = "the model has no tokenizer files, so text cannot be encoded"
        raise UserError(f"{what}; pass token ids, or add tokenizer.json to its directory.")

    def incremental(self) -> Decoder:
        return _byte_decoder(lambda _: b"")


class HFTokenizer(Tokenizer):
    """A tokenizer of transformers, without `clean_up_tokenization_spaces`, which is not local."""

    def __init__(self, backend: Any) -> None:
        from tokenizers.decoders import ByteLevel
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self.backend, pipeline = backend, getattr(backend, "backend_tokenizer", None)
        self._is_bytes = pipeline is not None and isinstance(pipeline.decoder, ByteLevel)
        self._skipped = {i for i, token in backend.added_tokens_decoder.items() if token.special}
        self._alphabet = {char: byte for byte, char in bytes_to_unicode().items()}
        self._remembered = functools.cache(self._piece)

    def encode(self, text: str) -> list[int]:
        return list(self.backend(text, verbose=False).input_ids)

    def chat(self, text: str) -> list[int] | None:
        if not self.backend.chat_template:
            return None
        chat, template = [{"role": "user", "content": text}], self.backend.apply_chat_template
        with explained("the model's chat template fails", "give --no-chat-template"):
            return list(template(chat, add_generation_prompt=True, return_dict=False))

    def decode(self, ids: Seq[int]) -> str:
        as_written = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self.backend.decode(list(ids), **as_written))

    def incremental(self) -> Decoder:
        return _byte_decoder(self._remembered) if self._is_bytes else _WindowDecoder(self).decode

    def token(self, token_id: int) -> str | None:
        """The token's string, or None where `decode` leaves it out: special or unknown."""
        token = None if token_id in self._skipped else self.backend.convert_ids_to_tokens(token_id)
        return cast("str | None", token)

    def _piece(self, token_id: int) -> bytes:
        """The bytes of a byte-level token. Added tokens stand for their own text."""
        token = self.token(token_id) or ""
        try:
            return bytes(self._alphabet[char] for char in token)
        except KeyError:
            return token.encode("utf-8")


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory, or `NoTokenizer` where it holds no tokenizer files.

    Local files only, and no code from them. Raises UserError if transformers cannot read them.
    """
    if not any((directory / name).is_file() for name in _FILES):
        return NoTokenizer()
    from transformers import AutoTokenizer

    what = f"The tokenizer files of {directory} cannot be read"
    with explained(what, "restore them, or remove them to run on token ids."):
        backend = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    return HFTokenizer(backend)


def _byte_decoder(piece: Callable[[int], bytes]) -> Decoder:
    """For tokens that are strings of bytes."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    return lambda ids, final: utf8.decode(b"".join(map(piece, ids)), final)


class _WindowDecoder:
    """For tokens whose text depends on the token before: each is decoded twice at most."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # the last token given out, unless nothing was
        self._pending: list[int] = []  # a run of single-byte tokens

    def decode(self, ids: Seq[int], final: bool) -> str:
        window = self._context[:]
        for token_id in ids:
            if (token := self._tokenizer.token(token_id)) is not None:
                self._pending.append(token_id)
                if not _BYTE.fullmatch(token):
                    window += self._pending
                    self._pending.clear()
        if final:
            window, self._pending = window + self._pending, []
        before = self._tokenizer.decode(self._context)
        self._context = window[-1:]
        return self._tokenizer.decode(window)[len(before) :]
