"""Capture decode steps: one token a row, a ladder of batch sizes up to max_num_seqs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from core.batch import BatchShape
from core.config import OfferConfig
from plugins.graphs.ladder import at_least, rungs

if TYPE_CHECKING:
    from core.batch import Limits


class DecodeGraphs:
    """Steps in which every row has one token are replayed; prefill and mixed steps run eagerly."""

    api = 1
    captures = True

    class Config(OfferConfig):
        fine: int = Field(8, ge=1, description="spacing of the ladder's lower rungs, in sequences")

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        self._ladder: tuple[int, ...] = ()
        self._max_kv = 0

    def shapes(self, limits: Limits) -> list[BatchShape]:
        self._ladder = rungs(limits.max_num_seqs, self.config.fine)
        self._max_kv = limits.max_model_len
        return [self._shape(rows) for rows in self._ladder]

    def select(
        self, num_tokens: int, num_seqs: int, max_query: int, max_kv: int, start: int | None
    ) -> BatchShape | None:
        if max_query != 1:
            return None
        rows = at_least(self._ladder, num_seqs)
        return None if rows is None else self._shape(rows)

    def _shape(self, rows: int) -> BatchShape:
        return BatchShape(rows, rows, 1, self._max_kv, None)
