"""Ladders of sizes to capture: fine where steps are short, and always ending exactly at the limit.

A ladder that stops below the largest batch is a known bug (a batch of 17 under a ladder that ends
at 16): the last rung is the limit itself, whatever the spacing says.
"""

from __future__ import annotations

from bisect import bisect_left


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


def at_least(ladder: tuple[int, ...], size: int) -> int | None:
    """The smallest rung that holds `size`, or None above the last."""
    i = bisect_left(ladder, size)
    return ladder[i] if i < len(ladder) else None
