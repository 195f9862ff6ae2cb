"""Engines over the same tokens at once, a few rows of logits at a time, and what sets them apart.

`Engine.score` hands slices of logits to a callback. Here each engine scores in a thread of its own
that waits after every slice until it is asked for the next, so that equal slices of all engines lie
side by side and no engine's logits ever exist as a whole. One thread runs at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence as Seq
from contextlib import ExitStack, closing
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from core.errors import RunError, explained

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from core.engine import Engine

Pair = tuple[str, str]  # names of engines: the reference, and what is held beside it
ROWS = 128  # of logits at a time; in float64 each engine's take 8 bytes * 128 * vocabulary


class Slice(NamedTuple):
    """Logits [n, V] that follow the positions from `first` on; targets [n] int64 came true."""

    first: int
    logits: Tensor
    targets: Tensor


class Compared(NamedTuple):
    """One document under two engines, [n]: the positions 0 .. n - 1 that a token follows.

    `kl` is KL(reference || other) in nats and `same` whether the likeliest token is the same one.
    `base_nats` and `nats` are the losses of the token that follows, under the reference and the
    other. `finite` is False where a logit of the other is not finite: it counts as a uniform guess.
    """

    kl: NDArray[np.float64]
    same: NDArray[np.bool_]
    base_nats: NDArray[np.float64]
    nats: NDArray[np.float64]
    finite: NDArray[np.bool_]


class _Left(Exception):
    """Nobody wants the other slices."""


def slices(engine: Engine, token_ids: Seq[int], rows: int) -> Generator[Slice, None, None]:
    """What `engine.score` would hand to a callback, computed when asked for. To be closed."""
    done: SimpleQueue[Slice | BaseException | None] = SimpleQueue()
    turn, left = threading.Semaphore(0), threading.Event()

    def wait() -> None:
        turn.acquire()
        if left.is_set():
            raise _Left

    def reduce(first: int, logits: Tensor, targets: Tensor) -> None:
        if len(targets):
            done.put(Slice(first, logits[: len(targets)], targets))
            wait()

    def work() -> None:
        try:
            wait()
            engine.score(token_ids, reduce, rows)
            done.put(None)
        except BaseException as error:  # noqa: BLE001  # raised again by whoever asks
            done.put(error)

    thread = threading.Thread(target=work, name="score")
    thread.start()
    try:
        while True:
            turn.release()
            item = done.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        left.set()
        turn.release()
        thread.join()


def compare(
    engines: Mapping[str, Engine], pairs: Seq[Pair], token_ids: Seq[int], rows: int = ROWS
) -> dict[Pair, Compared]:
    """Each pair of engines over one document of at least two tokens.

    Raises RunError where scoring fails, or where logits of a reference are not finite.
    """
    parts: dict[Pair, list[Compared]] = {pair: [] for pair in pairs}
    with ExitStack() as stack:
        running = [
            stack.enter_context(closing(_named(name, engine, token_ids, rows)))
            for name, engine in engines.items()
        ]
        for side_by_side in zip(*running, strict=True):
            seen = dict(zip(engines, map(_log_probabilities, side_by_side), strict=True))
            targets = side_by_side[0].targets
            for reference, other in pairs:
                if not seen[reference][1].all():
                    what = f"logits of {reference}, the reference, are not finite"
                    raise RunError(f"{what}: choose another --dtype or --against")
                parts[reference, other].append(_compared(seen[reference], seen[other], targets))
    return {
        pair: Compared(*map(np.concatenate, zip(*found, strict=True)))
        for pair, found in parts.items()
    }


def _named(
    name: str, engine: Engine, token_ids: Seq[int], rows: int
) -> Generator[Slice, None, None]:
    with explained(f"{name} failed to score {len(token_ids)} tokens", "mend the offer", RunError):
        yield from slices(engine, token_ids, rows)


def _log_probabilities(one: Slice) -> tuple[Tensor, Tensor]:
    """float64 [n, V], which keeps a KL of 1e-12 apart from 0, and which rows are finite, [n]."""
    logits = one.logits.double()
    finite = logits.isfinite().all(-1)
    return logits.where(finite[:, None], 0.0).log_softmax(-1), finite


def _compared(
    reference: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], targets: Tensor
) -> Compared:
    (p, _), (q, finite) = reference, (part.to(reference[0].device) for part in other)
    kl = (p.exp() * (p - q)).sum(-1).clamp(min=0)
    same = (p.argmax(-1) == q.argmax(-1)) & finite
    columns = targets[:, None]
    found: tuple[Any, ...] = kl, same, -p.gather(1, columns)[:, 0], -q.gather(1, columns)[:, 0]
    return Compared(*(part.cpu().numpy() for part in (*found, finite)))
