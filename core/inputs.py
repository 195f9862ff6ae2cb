"""What the command line reads: the config of an earlier run, prompts with their parameters."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from core.config import RunConfig, validated
from core.errors import UserError
from core.sampling import SamplingParams


def read_config(file: str) -> dict[str, Any]:
    """Fields of RunConfig, from what `-o json` wrote or from a JSON object of the fields alone."""
    try:
        content = json.loads(read_text(file))
        fields = {**content.get("config", content)}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is no config ({error}): give what -o json wrote") from error
    return validated(RunConfig, fields, file).model_dump(exclude_unset=True)


class Request(NamedTuple):
    """A prompt, as text or as token ids, and how it is sampled."""

    prompt: str | list[int]
    params: SamplingParams


def read_requests(
    prompts: Sequence[str], file: str | None, sampling: Mapping[str, Any]
) -> list[Request]:
    """Prompts as given, then those of the file, a line each; without either, stdin as one.

    A line of a .jsonl file is an object with `prompt` or `prompt_token_ids`, and fields of
    SamplingParams, which go before those in `sampling`. Raises UserError, for a line with its
    number.
    """
    texts = list(prompts)
    lines = [] if file is None else list(enumerate(read_text(file).split("\n"), 1))
    if file is None and not texts and sys.stdin is not None and not sys.stdin.isatty():
        texts = [read_text("-").removesuffix("\n")]
    elif file is not None and not file.endswith(".jsonl"):
        texts, lines = texts + [line for _, line in lines], []
    found = [Request(text, SamplingParams(**sampling)) for text in texts if text.strip()]
    found += [_request(line, f"line {n} of {file}", sampling) for n, line in lines if line.strip()]
    if not found:
        raise UserError(
            "there is no prompt that is not empty: give one, or --prompt-file FILE, or pipe it in"
        )
    return found


def _request(line: str, where: str, sampling: Mapping[str, Any]) -> Request:
    """The request of one line of a .jsonl file."""
    try:
        fields = {**sampling, **json.loads(line)}
        text, ids = fields.pop("prompt", None), fields.pop("prompt_token_ids", None)
        if isinstance(text, str) and ids is None:
            return Request(text, SamplingParams(**fields))
        if text is None and isinstance(ids, list) and all(type(i) is int for i in ids):
            return Request(ids, SamplingParams(**fields))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{where} is no JSON object ({error}): mend or remove it") from error
    raise UserError(f"{where} needs either prompt, a string, or prompt_token_ids, a list of ids")


def read_text(file: str) -> str:
    """The text of a file, or of stdin for "-"."""
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        name = "stdin" if file == "-" else file
        raise UserError(f"{name} cannot be read as UTF-8 text ({error}): choose another") from error
