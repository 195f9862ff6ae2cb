"""Capture all of a step but attention: what is left depends on the number of tokens alone.

One ladder serves decode steps, prompts and mixed steps alike, and attention sees each step as it
is: no row, tile or split of padding. The price is the host's: a layer is a replay and the launches
of attention, where `full` has one replay a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from core.batch import BatchShape
from core.config import OfferConfig
from plugins.graphs.ladder import at_least, prompt_rungs, rungs

if TYPE_CHECKING:
    from core.batch import Limits


class PiecewiseGraphs:
    """Attention runs eagerly between the pieces of one ladder of tokens.

    The ladder is captured twice: for a lone fresh prompt, whose keys and values go to the scratch
    of its attention too, and for all other steps.
    """

    api = 1
    captures = True

    class Config(OfferConfig):
        fine: int = Field(
            8, ge=1, description="spacing of the lower rungs up to max_num_seqs, in tokens"
        )
        fine_tokens: int = Field(32, ge=1, description="spacing of the lower rungs, in tokens")
        max_tokens: int = Field(8192, ge=1, description="largest captured step, in tokens")

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        self._ladder: tuple[int, ...] = ()
        self._fresh: tuple[int, ...] = ()
        self._limits: Limits | None = None

    def cut(self) -> tuple[str, ...]:
        """It stays out whatever is said here, as `begin_step` and `lm_head` do."""
        return ("attention",)

    def shapes(self, limits: Limits) -> list[BatchShape]:
        top = min(limits.max_num_batched_tokens, self.config.max_tokens)
        self._limits = limits
        # Steps as small as a batch that decodes are the many; every token counts there.
        short = rungs(min(top, limits.max_num_seqs), self.config.fine)
        self._ladder = tuple(sorted({*short, *rungs(top, self.config.fine_tokens)}))
        longest = min(top, limits.max_model_len)
        self._fresh = tuple(n for n in prompt_rungs(longest, self.config.fine_tokens) if n > 1)
        return [*map(self._prompt, self._fresh), *map(self._any, self._ladder)]

    def select(
        self, num_tokens: int, num_seqs: int, max_query: int, max_kv: int, start: int | None
    ) -> BatchShape | None:
        ladder, shape = (self._fresh, self._prompt) if start == 0 else (self._ladder, self._any)
        rung = at_least(ladder, num_tokens)
        return None if rung is None else shape(rung)

    def _prompt(self, tokens: int) -> BatchShape:
        return BatchShape(tokens, 1, tokens, tokens, 0)

    def _any(self, tokens: int) -> BatchShape:
        assert self._limits is not None
        rows = min(tokens, self._limits.max_num_seqs)
        return BatchShape(tokens, rows, tokens, self._limits.max_model_len, None)
