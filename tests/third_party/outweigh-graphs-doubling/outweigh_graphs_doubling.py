"""`doubling`: a graph for every power of two, of decode rows and of tokens.

The rounding of buddy systems (Kenneth C. Knowlton: A fast storage allocator, Communications of the
ACM 8(10), 1965): a size is rounded up to a power of two, so that a logarithmic number of graphs
covers every step and less than half of any step is padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from core import OfferConfig, hookimpl
from core.batch import BatchShape

if TYPE_CHECKING:
    from core.batch import Limits
    from core.hookspecs import Register


def ladder(limit: int) -> list[int]:
    """1, 2, 4, … below `limit`, then `limit` itself."""
    return [*(1 << i for i in range((limit - 1).bit_length())), limit]


class Doubling:
    """Decode steps by rows; prompts and mixed steps by tokens, up to `max_tokens`."""

    api: ClassVar[int] = 1
    captures: ClassVar[bool] = True

    class Config(OfferConfig):
        max_tokens: int = Field(512, ge=1, description="largest step with a prompt, in tokens")

    def __init__(self, config: Config) -> None:
        self.config = config

    def shapes(self, limits: Limits) -> list[BatchShape]:
        self._limits = limits
        self._top = min(self.config.max_tokens, limits.max_num_batched_tokens)
        decodes = [self._decodes(rows) for rows in ladder(limits.max_num_seqs)]
        return decodes + [self._mixed(tokens) for tokens in ladder(self._top) if tokens > 1]

    def select(
        self, num_tokens: int, num_seqs: int, max_query: int, max_kv: int, start: int | None
    ) -> BatchShape | None:
        size = 1 << (num_tokens - 1).bit_length()
        if max_query == 1:
            return self._decodes(min(size, self._limits.max_num_seqs))
        return self._mixed(min(size, self._top)) if num_tokens <= self._top else None

    def _decodes(self, rows: int) -> BatchShape:
        return BatchShape(rows, rows, 1, self._limits.max_model_len, None)

    def _mixed(self, tokens: int) -> BatchShape:
        rows = min(tokens, self._limits.max_num_seqs)
        return BatchShape(tokens, rows, tokens, self._limits.max_model_len, None)


@hookimpl
def outweigh_register_graphs(register: Register) -> None:
    register("doubling", Doubling)
