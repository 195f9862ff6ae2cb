"""`paged_int8`: the blocks of `paged` with keys and values in INT8, half of bfloat16's bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from core.errors import UserError
from plugins.kv.blocks import num_columns
from plugins.kv.paged import Paged

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import torch
    from torch import Tensor

    from core.batch import Limits
    from core.facts import ModelFacts
    from core.seams import KVSink
    from core.weights import LayerWeights


class PagedInt8(Paged):
    """INT8 codes with a float32 scale for each token, head and of K and V, keys smoothed.

    Plain torch on every device, so far, and it needs the host's view of a step: no graphs.
    """

    lossless: ClassVar[bool] = False
    graph_safe: ClassVar[bool] = False

    class Config(Paged.Config):
        k_smoothing: Literal["weights", "calibrated", "none"] = Field(
            "weights", description="where the factors that even out key channels come from"
        )
        key_stats: str | None = Field(
            None, description="safetensors file of plugins.kv.smoothing.record_keys, if calibrated"
        )

        @model_validator(mode="after")
        def _calibrated_has_stats(self) -> Self:
            if (self.k_smoothing == "calibrated") != (self.key_stats is not None):
                raise ValueError(
                    "k_smoothing=calibrated and key_stats=FILE go together; record the file with "
                    "plugins.kv.smoothing.record_keys, or choose k_smoothing=weights"
                )
            return self

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._expected: list[Tensor] = []  # [K * D] a layer

    def block_bytes(self, facts: ModelFacts) -> int:
        from plugins.kv.int8_storage import token_bytes

        return token_bytes(facts) * self.block_size

    def overhead_bytes(self, facts: ModelFacts, limits: Limits) -> int:
        from plugins.kv.int8_storage import overhead_bytes

        return overhead_bytes(facts, limits, num_columns(limits, self.block_size))

    def weights(self, layers: Seq[LayerWeights]) -> None:
        """What the weights say of the size of the keys. Without this call nothing is smoothed."""
        from plugins.kv.smoothing import expected_keys

        if self.config.k_smoothing == "weights":
            self._expected = [expected_keys(layer) for layer in layers]

    def bind(
        self, facts: ModelFacts, limits: Limits, kv_cache_bytes: int, device: torch.device
    ) -> None:
        from plugins.kv.int8_path import Int8Path
        from plugins.kv.int8_storage import allocate

        self.bind_host(facts, limits, kv_cache_bytes)
        self.storage = allocate(
            facts,
            limits,
            device,
            num_blocks=self.pool.num_blocks + 1,
            block_size=self.block_size,
            table_width=self.tables.num_columns,
        )
        self.path = Int8Path(facts, self.storage)
        self._smooth(facts)

    def _smooth(self, facts: ModelFacts) -> None:
        from plugins.kv.smoothing import from_weights, read_stats

        smoothing = self.storage.smoothing
        for layer, expected in enumerate(self._expected):
            smoothing[layer] = from_weights(expected.view_as(smoothing[layer]))
        if self.config.key_stats is not None:
            self.calibrate(read_stats(self.config.key_stats, facts))

    def calibrate(self, key_absmax: Tensor) -> None:
        """Smooth by the largest |k| of each channel, [L, K, D], in place. For an empty cache only.

        Raises UserError where blocks are held or kept: they were written by other factors.
        """
        from plugins.kv.smoothing import from_stats

        usage = self.usage()
        if usage.num_held or usage.num_cached:
            raise UserError(
                f"the cache holds {usage.num_held + usage.num_cached} tokens that were written by "
                "other factors: calibrate before the first request"
            )
        self.storage.smoothing.copy_(from_stats(key_absmax))

    def sink(self, layer: int) -> KVSink | None:
        """None: only `write` knows codes and scales."""
        return None
