"""The host's list of prefill tiles: which `TILE` queries of which row are attended together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from core.batch import HostBatch, Limits

TILE = 128  # query rows a tile


def max_tiles(num_tokens: int, num_seqs: int) -> int:
    """Most tiles that a step of this shape can need: a graph of the shape launches so many.

    Every row owns a token, and a row of q tokens needs 1 + (q - 1) // TILE tiles.
    """
    num_rows = min(num_seqs, num_tokens)
    return num_rows + (num_tokens - num_rows) // TILE


def tiles_shape(limits: Limits) -> tuple[tuple[int, int], str]:
    """Shape and numpy dtype name of the list for any step within `limits`."""
    return (max_tiles(limits.max_num_batched_tokens, limits.max_num_seqs), 2), "int32"


def fill_tiles(step: HostBatch, out: NDArray[np.int32]) -> int:
    """Write (row, index of the tile's first query in the row) for all prefill rows; their number.

    Tiles with the longest context come first, because they run longest and the device starts tiles
    in order. Unused entries of `out` [max_tiles, 2] become -1.
    """
    first_row = step.num_decodes
    num_queries = np.diff(step.query_start)[first_row:]
    counts = -(-num_queries // TILE)
    total = int(counts.sum())
    rows = np.repeat(np.arange(first_row, step.num_seqs, dtype=np.int32), counts)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    first = (np.arange(total, dtype=np.int32) - starts) * TILE
    context = (step.seq_lens[first_row:] - num_queries)[rows - first_row]
    order = np.argsort(-(context + first), kind="stable")
    out[:total, 0] = rows[order]
    out[:total, 1] = first[order]
    out[total:] = -1
    return total
