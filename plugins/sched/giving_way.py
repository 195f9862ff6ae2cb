"""Who gives way for memory: the last in a scheduler's own order, and only if it is less urgent."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.batch import Sequence


def least_urgent(
    key: Callable[[Sequence, float], Any], running: Seq[Sequence], for_seq: Sequence
) -> Sequence | None:
    """The last of `running` by (key, order of arrival); None unless it comes after `for_seq`.

    For static keys: the clock that `key` gets is 0.
    """

    def place(seq: Sequence) -> tuple[Any, int]:
        return key(seq, 0.0), seq.order

    last = max(running, key=place, default=None)
    return last if last is not None and place(last) > place(for_seq) else None
