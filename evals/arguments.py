"""Command lines of measurements: how one is refused, and what its numbers may be, as types of
argparse."""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Of `python -m NAME`. What it does not take is said in one sentence, with exit status 2; the
    usage, which fills a screen, is for --help."""

    def __init__(self, name: str, about: str | None) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(f"python -m {name}", description=about, formatter_class=raw)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"outweigh: error: {message}; --help shows every option\n")


def count(text: str) -> int:
    """A whole number of 1 or more."""
    return _from(1, text)


def seed(text: str) -> int:
    """A whole number of 0 or more."""
    return _from(0, text)


def _from(least: int, text: str) -> int:
    with suppress(ValueError):
        if (value := int(text)) >= least:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")


def positive(text: str) -> float:
    """A finite number above 0."""
    with suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")


def share(text: str) -> float:
    """A number from 0 to 1."""
    with suppress(ValueError):
        if 0 <= (value := float(text)) <= 1:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
