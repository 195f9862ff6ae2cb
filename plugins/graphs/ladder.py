"""Ladders of sizes to capture: fine where steps are short, and always ending exactly at the limit.

A ladder that stops below the largest batch is a known bug (a batch of 17 under a ladder that ends
at 16): the last rung is the limit itself, whatever the spacing says.
"""

from __future__ import annotations

from bisect import bisect_left

# Of an octave, in sixteenths: neighbours are less than 15 % apart, and 1.5 times a power of two is
# the only round size that pays for the fewer graphs.
_OCTAVE = (16, 18, 20, 22, 25, 28)


def rungs(limit: int, fine: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of `fine` that coarsen in proportion (at most a quarter of padding),
    then `limit`."""
    sizes = [size for size in (1, 2, 4) if size < limit]
    size, step = fine, fine
    while size < limit:
        sizes.append(size)
        if size >= 8 * step:
            step *= 2
        size += step
    return tuple(sorted({*sizes, limit}))


def prompt_rungs(limit: int, fine: int, coarse: int | None = None) -> tuple[int, ...]:
    """As `rungs`, for steps whose time goes with their tokens: from 4 * `fine` on six rungs an
    octave, which pad by at most 15 %, and every multiple of `coarse`."""
    sizes = [1, 2, 4, fine, 2 * fine, 3 * fine]
    sizes += range(coarse, limit, coarse) if coarse else ()
    octave = 4 * fine
    while octave < limit:
        sizes += [octave * part // 16 for part in _OCTAVE]
        octave *= 2
    return tuple(sorted({*(size for size in sizes if size < limit), limit}))


def at_least(ladder: tuple[int, ...], size: int) -> int | None:
    """The smallest rung that holds `size`, or None above the last."""
    i = bisect_left(ladder, size)
    return ladder[i] if i < len(ladder) else None
