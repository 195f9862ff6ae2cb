"""Command lines of measurements: how one is refused, and what its numbers may be, as types of
argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

_Number = TypeVar("_Number", int, float)


class Parser(argparse.ArgumentParser):
    """Of `python -m NAME`. What it does not take is said in one sentence, with exit status 2; the
    usage, which fills a screen, is for --help."""

    def __init__(self, name: str, about: str | None) -> None:
        super().__init__(
            prog=f"python -m {name}",
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"outweigh: error: {message}; --help shows every option\n")


def count(text: str) -> int:
    """A whole number of 1 or more."""
    return _read(text, int, lambda n: n >= 1, "a whole number of 1 or more")


def seed(text: str) -> int:
    """A whole number of 0 or more."""
    return _read(text, int, lambda n: n >= 0, "a whole number of 0 or more")


def positive(text: str) -> float:
    """A finite number above 0."""
    return _read(text, float, lambda x: 0 < x < float("inf"), "a positive number")


def heat(text: str) -> float:
    """A temperature: a finite number from 0."""
    return _read(text, float, lambda x: 0 <= x < float("inf"), "a number from 0")


def share(text: str) -> float:
    """A number from 0 to 1."""
    return _read(text, float, lambda x: 0 <= x <= 1, "a number from 0 to 1")


def _read(
    text: str, kind: Callable[[str], _Number], fits: Callable[[_Number], bool], what: str
) -> _Number:
    with suppress(ValueError):
        if fits(value := kind(text)):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
