"""What the numbers of a command line may be, as types of argparse."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number of 1 or more."""
    return _from(1, text)


def seed(text: str) -> int:
    """A whole number of 0 or more."""
    return _from(0, text)


def _from(least: int, text: str) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is not a number of {least} or more")
    return value


def positive(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
