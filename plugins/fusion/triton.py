"""`triton`: the memory-bound spans of the decoder, and the sampler, as one Triton kernel each.

A layer of Qwen3 takes some fifty elementwise and reduction launches in plain torch; here it takes
4.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from core.errors import UserError
from core.seams import Span
from plugins.fusion.options import SpanOptions

if TYPE_CHECKING:
    import torch

    from core.facts import ModelFacts
    from core.seams import KVSink

NAMES = ("embed_norm", "add_norm", "qk_rope_write", "act_mul", "sample")


def _always(num_tokens: int, facts: ModelFacts, sink: KVSink | None) -> bool:
    return True


def _writes_blocks(num_tokens: int, facts: ModelFacts, sink: KVSink | None) -> bool:
    """The kernel's tile is a head's halves, so they must be powers of two."""
    is_power = facts.head_dim & (facts.head_dim - 1) == 0
    is_known = sink is not None and sink.kind in ("blocks", "int8_blocks")
    return is_known and is_power and facts.head_dim >= 16


class TritonFusion:
    """Rounds where the plain nodes round: results differ by the order of sums alone."""

    api: ClassVar[int] = 1
    lossless: ClassVar[bool] = True

    class Config(SpanOptions):
        names = NAMES

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def spans(self, facts: ModelFacts, device: torch.device) -> tuple[Span, ...]:
        """Raises UserError off CUDA, unless Triton's interpreter stands in for it."""
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise UserError(
                f"fusion 'triton' runs its kernels on CUDA and the device is {device}: "
                "choose --fusion none"
            )
        from plugins.fusion.kernels import runs

        offered = (
            Span("embed_norm", ("embed", "attn_norm"), runs.embed_norm, _always),
            Span("add_norm", ("attn_add", "mlp_norm"), runs.add_mlp_norm, _always),
            Span("add_norm", ("mlp_add", "attn_norm"), runs.add_attn_norm, _always),
            Span("add_norm", ("mlp_add", "final_norm"), runs.add_final_norm, _always),
            Span(
                "qk_rope_write", ("qk_norm", "rope", "kv_write"), runs.qk_rope_write, _writes_blocks
            ),
            Span("act_mul", ("act_mul",), runs.act_mul, _always),
            Span("sample", ("sample",), runs.sample, _always),
        )
        only = self.config.only
        return tuple(span for span in offered if only is None or span.name in only)
