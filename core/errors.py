"""The two kinds of error that people see as one sentence, without a traceback."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


class UserError(ValueError):
    """Something the caller can mend: what is wrong, the numbers, the next action. Exit code 2."""


class RunError(RuntimeError):
    """A run that was asked for properly has failed (out of memory, a plugin raised). Exit code
    1."""


def reason(error: BaseException) -> str:
    """What an exception says, on one line, after the name of its class."""
    return " ".join(f"{type(error).__name__}: {error}".split())


class explained(AbstractContextManager[None]):
    """A context, as `contextlib.suppress` is: an exception that is `caught` becomes "WHAT: its
    reason; ADVICE", a `kind`.

    Those which are sentences for people already go through.
    """

    def __init__(
        self, what: str, advice: str, kind: type[Exception] = UserError,
        caught: Any = (Exception, SystemExit),
    ) -> None:  # fmt: skip
        self._what, self._advice, self._kind, self._caught = what, advice, kind, caught

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, self._caught) and not isinstance(error, UserError | RunError):
            raise self._kind(f"{self._what}: {reason(error)[:300]}; {self._advice}") from error
