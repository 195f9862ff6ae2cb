"""How a written text repeats itself, and where two texts part, counted in tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from evals.tiny.answers import repeated_share

SIZES = (1, 2, 3, 4)  # of grams
LONGEST_PERIOD = 64  # tokens of what a loop repeats
TIMES = 4  # that it stands there in a row
SHORTEST_LOOP = 16  # tokens in all: the same 4 tokens four times, or one token sixteen times


def repeats(token_ids: Seq[int]) -> dict[str, float]:
    """seq-rep-n (`rep1` … `rep4`), the share of grams that were there before, and distinct-n, the
    share that is of its own kind: 1 less the other, where there is a gram at all."""
    shares = {size: repeated_share(token_ids, size) for size in SIZES}
    found = {f"rep{size}": share for size, share in shares.items()}
    return found | {f"distinct{size}": 1 - share for size, share in shares.items()}


def loops(token_ids: Seq[int]) -> bool:
    """Whether something stands there four times in a row, of at most 64 tokens, 16 in all."""
    ids = np.asarray(token_ids)
    for period in range(1, min(LONGEST_PERIOD, len(ids) // TIMES) + 1):
        run = max(SHORTEST_LOOP, TIMES * period) - period
        same = np.cumsum(np.r_[0, ids[period:] == ids[:-period]])
        if len(same) > run and (same[run:] - same[:-run] == run).any():
            return True
    return False


def parting(a: Seq[int], b: Seq[int]) -> int | None:
    """How many tokens two texts share before they differ; None if they never do."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))
