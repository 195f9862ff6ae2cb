"""`paged_int8`: the blocks of `paged` with keys and values in INT8, half of bfloat16's bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from core.errors import UserError
from plugins.kv.blocks import num_columns
from plugins.kv.paged import Paged

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from core.batch import Limits
    from core.facts import ModelFacts
    from core.weights import ModelWeights
    from plugins.kv.channel_storage import Layout
    from plugins.kv.smoothing import KeyMoments


class PagedInt8(Paged):
    """INT8 codes with a float32 scale for each token and head, of K and of V; keys are smoothed.

    With k_scales "channel" keys have a scale for each channel over a block instead, and those of a
    block that is not full yet are kept as they came: in plain torch, for the CPU.
    """

    lossless: ClassVar[bool] = False
    # Of the kv suite: attention's worst error over values in [-1, 1), and bytes of a token of its
    # tiny model: 2 tensors, 2 layers, 2 heads of 32 codes and a scale.
    held_to: ClassVar[Mapping[str, float]] = {"tolerance": 0.02, "bytes_per_token": 288}

    class Config(Paged.Config):
        k_scales: Literal["token", "channel"] = Field(
            "token",
            description="what has a scale of its own: each token of a head, or each channel of a "
            "block, whose keys stay in full precision until it is full; channel needs no smoothing "
            "and has no kernels for CUDA",
        )
        k_smoothing: Literal["weights", "calibrated", "none"] = Field(
            "weights",
            description="what the factors that even out key channels come from; none: rounded raw",
        )
        k_shift: bool = Field(
            True,
            description="smoothed keys lose the constant of their bias too, which softmax cancels",
        )
        key_range: str | None = Field(
            None, description="file of plugins.kv.smoothing.record_keys, for calibrated smoothing"
        )

        @model_validator(mode="after")
        def _calibrated_by_a_file(self) -> Self:
            if (self.k_smoothing == "calibrated") != (self.key_range is not None):
                raise ValueError(
                    "k_smoothing=calibrated and key_range=FILE go together: record the file with "
                    "plugins.kv.smoothing.record_keys, or choose k_smoothing=weights"
                )
            if self.k_scales == "channel" and self.k_smoothing == "calibrated":
                raise ValueError(
                    "k_scales=channel smooths nothing, which k_smoothing=calibrated asks for: "
                    "drop k_smoothing and key_range, or choose k_scales=token"
                )
            return self

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._moments: list[KeyMoments] = []

    def block_bytes(self, facts: ModelFacts) -> int:
        from plugins.kv.int8_storage import token_bytes

        if self._by_channel:
            return self._layout(facts).block_bytes(facts, self.block_size)
        return token_bytes(facts) * self.block_size

    def overhead_bytes(self, facts: ModelFacts, limits: Limits) -> int:
        from plugins.kv import channel_storage, int8_storage

        columns = num_columns(limits, self.block_size)
        storage = channel_storage if self._by_channel else int8_storage
        return storage.overhead_bytes(facts, limits, columns)

    def tail_bytes(self, facts: ModelFacts) -> int:
        from plugins.kv.channel_storage import tail_bytes

        return tail_bytes(facts, self.block_size) if self._by_channel else 0

    @property
    def _by_channel(self) -> bool:
        return self.config.k_scales == "channel"

    def _layout(self, facts: ModelFacts) -> Layout:
        """Values have a scale a token and head, as they have without k_scales."""
        from plugins.kv.channel_storage import Layout

        return Layout(8, facts.head_dim)

    def weights(self, weights: ModelWeights) -> None:
        """What the weights say of the keys. Without this call keys are rounded raw."""
        from plugins.kv.smoothing import key_moments

        if self.config.k_smoothing != "none" and not self._by_channel:
            self._moments = [key_moments(layer) for layer in weights.layers]

    def bind(
        self, facts: ModelFacts, limits: Limits, kv_cache_bytes: int, device: torch.device
    ) -> None:
        from plugins.kv import channel_storage, int8_storage
        from plugins.kv.channel_path import ChannelPath
        from plugins.kv.smoothing import read_range

        self.bind_host(facts, limits, kv_cache_bytes)
        sizes = {
            "num_blocks": self.pool.num_blocks + 1,
            "block_size": self.block_size,
            "table_width": self.tables.num_columns,
        }
        if self._by_channel:
            layout = self._layout(facts)
            storage = channel_storage.allocate(facts, limits, device, layout=layout, **sizes)
            self.storage, self.path = storage, ChannelPath(facts, storage)
            return
        self.storage = int8_storage.allocate(facts, limits, device, **sizes)
        self.path = int8_storage.device_path(facts, self.storage)
        self._smooth(facts, limits)
        if self.config.key_range is not None:
            self.calibrate(read_range(self.config.key_range, facts).to(device))

    def _smooth(self, facts: ModelFacts, limits: Limits) -> None:
        from plugins.kv.smoothing import from_weights, mean_turn, no_turn

        if not self._moments:
            return
        turn = mean_turn(facts, limits.max_model_len)
        if not self.config.k_shift:
            turn = no_turn(turn)
        for layer, moments in enumerate(self._moments):
            shift, factor = from_weights(moments, turn, facts.num_kv_heads)
            self.storage.k_shift[layer], self.storage.k_factor[layer] = shift, factor

    def calibrate(self, key_range: Tensor) -> None:
        """Factors by the smallest and largest key of each channel, [2, L, K, D], in place.

        For an empty cache: raises UserError where blocks are held or kept by other factors.
        """
        from plugins.kv.smoothing import from_range

        usage = self.usage()
        if usage.num_held or usage.num_cached:
            raise UserError(
                f"the cache holds {usage.num_held + usage.num_cached} tokens that were written by "
                "other factors: calibrate before the first request"
            )
        self.storage.k_factor.copy_(from_range(key_range, self.storage.k_shift))
