"""The two kinds of error that people see as one sentence, without a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """Something the caller can mend: what is wrong, the numbers, the next action. Exit code 2."""


class RunError(RuntimeError):
    """A run that was asked for properly has failed (out of memory, a plugin raised). Exit code
    1."""


def reason(error: BaseException) -> str:
    """What an exception says, on one line, after the name of its class."""
    return " ".join(f"{type(error).__name__}: {error}".split())
