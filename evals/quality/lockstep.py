"""Engines over the same tokens at once, a few rows of logits at a time, and what sets them apart.

`Engine.score` hands slices of logits to a callback. Here each engine scores in a thread of its own
that waits after every slice until it is asked for the next, so that equal slices of all engines lie
side by side and no engine's logits ever exist as a whole. One thread runs at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence as Seq
from contextlib import ExitStack, closing
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from core.errors import RunError, explained

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from core.engine import Engine

Pair = tuple[str, str]  # names of engines: the reference, and what is held beside it
ROWS = 128  # of logits at a time; each engine's take 128 * vocabulary numbers of its dtype
_CACHED = 1 << 20  # logits, which take 8 MiB in float64


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
    found = {pair: _empty(len(token_ids) - 1) for pair in pairs}
    with ExitStack() as stack:
        running = [
            stack.enter_context(closing(_named(name, engine, token_ids, rows)))
            for name, engine in engines.items()
        ]
        for side_by_side in zip(*running, strict=True):
            for part in zip(*map(_few, side_by_side), strict=True):
                seen = dict(zip(engines, part, strict=True))
                here = slice(part[0].first, part[0].first + len(part[0].targets))
                for pair, one in _paired(seen, pairs):
                    for row, values in zip(found[pair], one, strict=True):
                        row[here] = values.cpu().numpy()
    return found


def _empty(n: int) -> Compared:
    """Made before the large tensors, between which small ones that stay would pin freed memory."""
    kl, base_nats, nats = np.empty((3, n))
    same, finite = np.empty((2, n), bool)
    return Compared(kl, same, base_nats, nats, finite)


def _named(
    name: str, engine: Engine, token_ids: Seq[int], rows: int
) -> Generator[Slice, None, None]:
    with explained(f"{name} failed to score {len(token_ids)} tokens", "mend the offer", RunError):
        yield from slices(engine, token_ids, rows)


def _few(one: Slice) -> Iterator[Slice]:
    """A slice in pieces; on a CPU of as many rows as its caches hold in float64."""
    num, size = one.logits.shape
    step = max(1, _CACHED // size) if one.logits.device.type == "cpu" else num
    for lo in range(0, num, step):
        yield Slice(one.first + lo, *(part[lo : lo + step] for part in one[1:]))


def _paired(
    seen: Mapping[str, Slice], pairs: Seq[Pair]
) -> Iterator[tuple[Pair, tuple[Tensor, ...]]]:
    """Every pair over the same rows of all engines: the fields of a Compared."""
    for reference in dict.fromkeys(reference for reference, _ in pairs):
        p = _log_probabilities(seen[reference])
        if not p.finite.all():
            what = f"logits of {reference}, the reference, are not finite"
            raise RunError(f"{what}: choose another --dtype or --against")
        probabilities = p.log.exp()
        for pair in pairs:
            if pair[0] == reference:
                yield pair, _compared(p, probabilities, seen[pair[1]])


class _Log(NamedTuple):
    """Log-probabilities float64 [n, V], which keep a KL of 1e-12 apart from 0; the likeliest token
    [n], and which rows are finite [n]."""

    log: Tensor
    top: Tensor
    finite: Tensor


def _log_probabilities(one: Slice) -> _Log:
    logits = one.logits.double()
    finite = logits.isfinite().all(-1)
    log = logits.where(finite[:, None], 0.0).log_softmax(-1)
    return _Log(log, log.argmax(-1), finite)


def _compared(reference: _Log, probabilities: Tensor, one: Slice) -> tuple[Tensor, ...]:
    """A slice of the other engine beside the reference, whose probabilities serve all others."""
    p, device = reference.log, reference.log.device
    q, top, finite = (part.to(device) for part in _log_probabilities(one))
    kl = (p - q).mul_(probabilities).sum(-1).clamp(min=0)
    same = (reference.top == top) & finite
    columns = one.targets.to(device)[:, None]
    return kl, same, -p.gather(1, columns)[:, 0], -q.gather(1, columns)[:, 0], finite
