"""No capture: every step runs eagerly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.config import OfferConfig

if TYPE_CHECKING:
    from core.batch import BatchShape, Limits


class NoGraphs:
    """The baseline of every graph strategy, and the only one on a device without CUDA graphs."""

    api = 1
    captures = False

    class Config(OfferConfig):
        """No options."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def shapes(self, limits: Limits) -> list[BatchShape]:
        return []

    def select(
        self, num_tokens: int, num_seqs: int, max_query: int, max_kv: int, start: int | None
    ) -> BatchShape | None:
        return None
