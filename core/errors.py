"""The two kinds of error that people see as one sentence, without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class UserError(ValueError):
    """Something the caller can mend: what is wrong, the numbers, the next action. Exit code 2."""


class RunError(RuntimeError):
    """A run that was asked for properly has failed (out of memory, a plugin raised). Exit code
    1."""


def reason(error: BaseException) -> str:
    """What an exception says, on one line, after the name of its class."""
    return " ".join(f"{type(error).__name__}: {error}".split())


@contextmanager
def explained(
    what: str, advice: str, kind: type[Exception] = UserError, caught: Any = (Exception, SystemExit)
) -> Iterator[None]:
    """An exception that is `caught` becomes "WHAT: its reason; ADVICE", a `kind`.

    Those which are sentences for people already go through.
    """
    try:
        yield
    except (UserError, RunError):
        raise
    except caught as error:
        raise kind(f"{what}: {reason(error)[:300]}; {advice}") from error
