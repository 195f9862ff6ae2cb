"""What the command line reads: the config of an earlier run, prompts with their parameters."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from core.config import RunConfig, json_object, validated
from core.errors import UserError, explained
from core.sampling import SamplingParams


def read_config(file: str) -> dict[str, Any]:
    """Fields of RunConfig, from what `-o json` wrote or from a JSON object of the fields alone."""
    content = json_object(read_text(file), file, "give what -o json wrote")
    return validated(RunConfig, content.get("config", content), file).model_dump(exclude_unset=True)


class Request(NamedTuple):
    """A prompt, as text or as token ids, how it is sampled, and how urgent it is."""

    prompt: str | list[int]
    params: SamplingParams
    priority: int = 0


def read_requests(
    prompts: Sequence[str], file: str | None, sampling: Mapping[str, Any]
) -> list[Request]:
    """Prompts as given, then those of the file, a line each, but for empty ones; without either,
    stdin as one.

    A line of a .jsonl file is an object with `prompt` or `prompt_token_ids`, perhaps `priority`,
    and fields of SamplingParams, which go before those in `sampling`. Raises UserError, for a line
    with its number.
    """
    texts = list(prompts)
    lines = [] if file is None else read_text(file).split("\n")
    if file is None and not texts and sys.stdin is not None and not sys.stdin.isatty():
        texts = [text for text in [read_text("-").removesuffix("\n")] if text.strip()]
    elif file is not None and not file.endswith(".jsonl"):
        texts, lines = texts + [line for line in lines if line.strip()], []
    found = [Request(text, SamplingParams(**sampling)) for text in texts]
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_request(line, f"line {number} of {file}", sampling))
    if not found:
        advice = "give one, or --prompt-file FILE, or pipe it in"
        raise UserError(f"there is no prompt that is not empty: {advice}")
    return found


def _request(line: str, where: str, sampling: Mapping[str, Any]) -> Request:
    """The request of one line of a .jsonl file."""
    fields = {**sampling, **json_object(line, where, "mend or remove it")}
    text, ids = fields.pop("prompt", None), fields.pop("prompt_token_ids", None)
    priority = fields.pop("priority", 0)
    is_list = isinstance(ids, list) and all(type(i) is int for i in ids)
    is_one = isinstance(text, str) and ids is None or text is None and is_list
    if not (is_one and type(priority) is int):
        wanted = "either prompt, a string, or prompt_token_ids, and priority in whole numbers"
        raise UserError(f"{where} needs {wanted}")
    try:
        return Request(ids if text is None else text, SamplingParams(**fields), priority)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def read_text(file: str) -> str:
    """The text of a file, or of stdin for "-"."""
    name = "stdin" if file == "-" else file
    with explained(f"{name} cannot be read as UTF-8 text", "choose another"):
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
