"""What every measurement writes: documents, whole or not at all, and where they were made."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

from core.errors import UserError, explained


def check_folder(path: Path | None) -> None:
    """Refuse a file that cannot be written before hours are spent on what it is to hold."""
    if path is None:
        return
    what = f"{ascii(str(path))[:80]} cannot be written"
    # Of names that are too long, or no text: ValueError is what UnicodeEncodeError is.
    with explained(what, "name another file", caught=(OSError, ValueError)):
        folder = path.absolute().parent
        if not folder.is_dir():
            raise UserError(f"{path} cannot be written, its folder is not there: make it first")
        real = path.resolve()  # a link stays one, and what it leads to is written
        if real.exists() and not real.is_file():
            what = "it is a folder" if real.is_dir() else "it is no file"
            raise UserError(f"{path} cannot be written, {what}: name another file")
        if not os.access(real.parent, os.W_OK):
            what = f"{real.parent} may not be written to"
            raise UserError(f"{path} cannot be written, {what}: name another file")


def check_apart(**files: Path | None) -> None:
    """Refuse two options that name one file, of which the second would replace the first."""
    named = [(option, path) for option, path in files.items() if path is not None]
    for i, (option, path) in enumerate(named):
        for other, same in named[:i]:
            if path.resolve() == same.resolve():
                raise UserError(f"{other} and {option} are both {path}: name two files")


def write(path: Path, document: dict[str, Any]) -> None:
    """A JSON document, by `write_text`."""
    write_text(path, json.dumps(document, indent=1, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """What stood there before stays until the new file is whole."""
    check_folder(path)
    real = path.resolve()
    partial = real.with_name(f"{real.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, real)
    except OSError as error:
        raise UserError(f"{path} could not be written: {error.strerror}; name another") from error


def machine() -> str:
    """System, architecture and number of processors; the GPU stands in the engine's report."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"
