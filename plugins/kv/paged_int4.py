"""`paged_int4`: blocks of 4-bit codes, keys by channel and values by group: 0.32 of bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from plugins.kv.blocks import num_columns
from plugins.kv.paged import Paged

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from core.batch import Limits
    from core.facts import ModelFacts
    from plugins.kv.channel_storage import Layout


class PagedInt4(Paged):
    """INT4 codes, two a byte, with a scale for each channel of K over a block and for groups of V.

    Keys of a block that is not full yet are kept as they came. In plain torch, for the CPU.
    """

    lossless: ClassVar[bool] = False
    graph_safe: ClassVar[bool] = False
    # Of the kv suite: attention's worst error over values in [-1, 1), of which 0.11 was seen; bytes
    # of a token of its tiny model: 2 layers, 2 heads, of K and V 16 of codes, 4 of scales each.
    held_to: ClassVar[Mapping[str, float]] = {"tolerance": 0.15, "bytes_per_token": 160}
    # Of evals.quality, more than INT8 may cost. 4 bits by channel have a mean KL of 1e-2 in small
    # models and turn 4 to 6 tokens of 100; 4 bits by token, of keys with a large bias, 1 and 50.
    quality: ClassVar[Mapping[str, float]] = {
        "mean_kl": 2e-2,
        "tail_kl": 0.2,
        "top1": 0.9,
        "delta_nats": 0.02,
        "rep4": 0.05,
        "recall": 0.04,
        "tasks": 0.04,
    }

    class Config(Paged.Config):
        block_size: int = Field(
            32,
            ge=1,
            description="tokens a block, over which a key channel has one scale; prefixes are "
            "shared in whole blocks",
        )
        v_group: int = Field(
            32,
            ge=1,
            description="channels of a value that share a scale, at most: the next divisor of "
            "head_dim below it where it is none",
        )

    config: Config

    def block_bytes(self, facts: ModelFacts) -> int:
        return self._layout().block_bytes(facts, self.block_size)

    def overhead_bytes(self, facts: ModelFacts, limits: Limits) -> int:
        from plugins.kv.channel_storage import overhead_bytes

        return overhead_bytes(facts, limits, num_columns(limits, self.block_size))

    def tail_bytes(self, facts: ModelFacts) -> int:
        from plugins.kv.channel_storage import tail_bytes

        return tail_bytes(facts, self.block_size)

    def bind(
        self, facts: ModelFacts, limits: Limits, kv_cache_bytes: int, device: torch.device
    ) -> None:
        from plugins.kv.channel_path import ChannelPath
        from plugins.kv.channel_storage import allocate

        self.bind_host(facts, limits, kv_cache_bytes)
        self.storage = allocate(
            facts,
            limits,
            device,
            layout=self._layout(),
            num_blocks=self.pool.num_blocks + 1,
            block_size=self.block_size,
            table_width=self.tables.num_columns,
        )
        self.path = ChannelPath(facts, self.storage)

    def _layout(self) -> Layout:
        from plugins.kv.channel_storage import Layout

        return Layout(4, self.config.v_group)
