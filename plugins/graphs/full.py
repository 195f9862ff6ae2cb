"""Capture everything: decode steps, lone prompts and mixed steps, attention inside the graph.

What a lone short prompt waits for in an eager engine is the host: some 15 ms of launches for 1 to 3
ms of kernels (Qwen3-0.6B on an H200). Replaying prefill as well removes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from core.batch import BatchShape
from core.config import OfferConfig
from plugins.graphs.ladder import at_least, prompt_rungs, rungs

if TYPE_CHECKING:
    from core.batch import Limits

_FEWEST_MIXED_TOKENS = 64
_MOST_CHUNKS = 16  # behind the first: a small budget cuts a long context into hundreds


class FullGraphs:
    """Three ladders: rows of decode steps, tokens of lone fresh prompts, tokens of mixed steps.

    Beside them, for lone prompts that are longer than a step: the whole chunks behind the
    first.
    """

    api = 1
    captures = True

    class Config(OfferConfig):
        fine: int = Field(
            8, ge=1, description="spacing of the decode ladder's lower rungs, in sequences"
        )
        fine_tokens: int = Field(
            32, ge=1, description="spacing of the prefill ladders' lower rungs, in tokens"
        )
        coarse_tokens: int = Field(
            128, ge=32, description="widest spacing of the ladder of lone prompts, in tokens"
        )
        max_tokens: int = Field(
            8192, ge=1, description="largest captured prefill or mixed step, in tokens"
        )
        mixed: bool = Field(
            True,
            description="capture steps that mix prompts, chunks and decodes, or several prompts",
        )

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        self._rows: tuple[int, ...] = ()
        self._fresh: tuple[int, ...] = ()
        self._starts = range(0)  # of whole chunks
        self._mixed: tuple[int, ...] = ()
        self._limits: Limits | None = None

    def shapes(self, limits: Limits) -> list[BatchShape]:
        top = min(limits.max_num_batched_tokens, self.config.max_tokens)
        self._limits = limits
        self._rows = rungs(limits.max_num_seqs, self.config.fine)
        longest = min(top, limits.max_model_len)
        fresh = prompt_rungs(longest, self.config.fine_tokens, self.config.coarse_tokens)
        self._fresh = tuple(n for n in fresh if n > 1)
        # Of max_model_len tokens the last is never a prompt's: it is there to be generated.
        whole = limits.max_num_batched_tokens
        captures = 1 < whole <= self.config.max_tokens
        self._starts = range(whole, limits.max_model_len - whole, whole) if captures else range(0)
        self._starts = self._starts[:_MOST_CHUNKS]
        # A mixed step carries max_num_seqs rows whatever it holds, so short rungs would save
        # nothing.
        mixed = rungs(top, 4 * self.config.fine_tokens) if self.config.mixed else ()
        self._mixed = tuple(n for n in mixed if n >= min(top, _FEWEST_MIXED_TOKENS) and n > 1)
        return [
            *(self._decode(n) for n in self._rows),
            *(self._prompt(n) for n in self._fresh),
            *(self._chunk(start) for start in self._starts),
            *(self._mix(n) for n in self._mixed),
        ]

    def select(
        self, num_tokens: int, num_seqs: int, max_query: int, max_kv: int, start: int | None
    ) -> BatchShape | None:
        if max_query == 1:
            ladder, size, shape = self._rows, num_seqs, self._decode
        elif start == 0:
            ladder, size, shape = self._fresh, num_tokens, self._prompt
        elif num_tokens == self._whole and start in self._starts:
            return self._chunk(start)
        else:
            ladder, size, shape = self._mixed, num_tokens, self._mix
        rung = at_least(ladder, size)
        return None if rung is None else shape(rung)

    def _decode(self, rows: int) -> BatchShape:
        return BatchShape(rows, rows, 1, self._longest, None)

    def _prompt(self, tokens: int) -> BatchShape:
        return BatchShape(tokens, 1, tokens, tokens, 0)

    def _chunk(self, start: int) -> BatchShape:
        return BatchShape(self._whole, 1, self._whole, start + self._whole, start)

    def _mix(self, tokens: int) -> BatchShape:
        assert self._limits is not None
        return BatchShape(tokens, self._limits.max_num_seqs, tokens, self._longest, None)

    @property
    def _whole(self) -> int:
        """Tokens of a whole chunk."""
        assert self._limits is not None
        return self._limits.max_num_batched_tokens

    @property
    def _longest(self) -> int:
        assert self._limits is not None
        return self._limits.max_model_len
