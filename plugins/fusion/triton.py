"""`triton`: the memory-bound spans of the decoder, and the sampler, as one Triton kernel each.

A layer of Qwen3 takes some fifty elementwise and reduction launches in plain torch; here it takes
4. In small steps the products of small weights are a matter of latency too, and have kernels of
their own: for one row with the norm in front and the addition behind, for up to 16 rows alone, for
up to 64 tokens (of qkv 128), and where K is shared out for 2 to 256, with the addition and the norm
behind. Of a long lone prompt the last layer, from its attention on, is for the last token alone.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

from core.errors import UserError
from core.seams import Span
from plugins.device_limits import num_sms, shared_bytes
from plugins.fusion.options import SpanOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from core.facts import ModelFacts
    from core.seams import KVSink

NAMES = (
    "embed_norm",
    "add_norm",
    "norm",
    "qk_rope_write",
    "act_mul",
    "norm_linear",
    "linear_add",
    "linear",
    "linear_act",
    "linear_add_norm",
    "last_layer",
    "sample",
)
MAX_FEW_ROWS, MAX_TILE_ROWS = 16, 64
MIN_LONG = 257  # tokens of a step whose products are all cuBLAS's
MAX_WEIGHT_BYTES = 16 << 20  # of a weight that is a matter of latency; larger ones are cuBLAS's


def _always(num_tokens: int, facts: ModelFacts, sink: KVSink | None) -> bool:
    return True


def _one_row(num_tokens: int, facts: ModelFacts, sink: KVSink | None) -> bool:
    """In float32 tensor cores and these kernels have nothing to give."""
    return num_tokens == 1 and facts.dtype.itemsize == 2


def _rows(least: int, most: int, weight: str) -> Callable[..., bool]:
    """Steps of least to most tokens, where the weight is small and in half precision."""

    def is_wanted(num_tokens: int, facts: ModelFacts, sink: KVSink | None) -> bool:
        size = facts.dtype.itemsize
        is_small = _num_elements(facts, weight) * size <= MAX_WEIGHT_BYTES
        return least <= num_tokens <= most and size == 2 and is_small

    return is_wanted


def _few_rows(weight: str) -> Callable[..., bool]:
    return _rows(1, MAX_FEW_ROWS, weight)


def _tile_rows(weight: str) -> Callable[..., bool]:
    return _rows(MAX_FEW_ROWS + 1, MAX_TILE_ROWS, weight)


def _tall_rows(weight: str, device: torch.device, *, by_parts: bool) -> Callable[..., bool]:
    """As `_tile_rows`, and more rows where one wave of programs computes them; where these share
    out K (`by_parts`), few rows of a long one too."""

    def is_wanted(num_tokens: int, facts: ModelFacts, sink: KVSink | None) -> bool:
        from plugins.fusion.kernels.few_rows import suits_parts
        from plugins.fusion.kernels.one_tile import suits_tall

        n, k = _num_elements(facts, weight) // facts.hidden_size, facts.hidden_size
        if by_parts:
            n, k = k, n
        if num_tokens <= MAX_FEW_ROWS:
            suits = by_parts and suits_parts(num_tokens, k)
        elif num_tokens > MAX_TILE_ROWS:
            suits = suits_tall(num_tokens, n, k, num_sms(device), by_parts=by_parts)
        else:
            suits = True
        return suits and _rows(1, num_tokens, weight)(num_tokens, facts, sink)

    return is_wanted


def _num_elements(facts: ModelFacts, weight: str) -> int:
    hidden, q, kv = facts.hidden_size, facts.num_heads, facts.num_kv_heads
    return (
        hidden
        * {
            "qkv": (q + 2 * kv) * facts.head_dim,
            "o": q * facts.head_dim,
            "gate_up": 2 * facts.intermediate_size,
            "down": facts.intermediate_size,
        }[weight]
    )


def _writes_blocks(num_tokens: int, facts: ModelFacts, sink: KVSink | None) -> bool:
    """The kernel's tile is a head's halves, so they must be powers of two."""
    is_power = facts.head_dim & (facts.head_dim - 1) == 0
    is_known = sink is not None and sink.kind in ("blocks", "int8_blocks")
    return is_known and is_power and facts.head_dim >= 16


def _reads_last_alone(num_tokens: int, facts: ModelFacts, sink: KVSink | None) -> bool:
    """Long steps, where the attention kernel serves the model and a lone prompt's keys are at
    hand."""
    from plugins.kv.kernels.limits import refusal

    has_keys = sink is not None and sink.kind in ("blocks", "int8_blocks") and bool(sink.fresh)
    is_served = facts.dtype.itemsize == 2 and refusal(facts) is None
    return num_tokens >= MIN_LONG and has_keys and is_served


def _tile_spans(device: torch.device) -> tuple[Span, ...]:
    from plugins.fusion.kernels import runs

    down_add = (("attn_norm", runs.down_add_attn_norm), ("final_norm", runs.down_add_final_norm))
    with_norm: tuple[tuple[tuple[str, ...], Callable[..., Any], str], ...] = (
        (("o_proj", "attn_add", "mlp_norm"), runs.o_add_mlp_norm, "o"),
        *((("down", "mlp_add", norm), run, "down") for norm, run in down_add),
    )
    tall_qkv = _tall_rows("qkv", device, by_parts=False)
    return (
        Span("linear", ("qkv_proj",), runs.qkv_proj_tile, tall_qkv),
        Span("linear_act", ("gate_up", "act_mul"), runs.gate_up_act_tile, _tile_rows("gate_up")),
        *(
            Span("linear_add_norm", nodes, run, _tall_rows(of, device, by_parts=True), 1)
            for nodes, run, of in with_norm
        ),
    )


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
        from plugins.fusion.kernels.last_layer import LAST_LAYER, last_layer
        from plugins.fusion.kernels.one_tile import SHARED_BYTES

        offered = (
            Span("embed_norm", ("embed", "attn_norm"), runs.embed_norm, _always, 2),
            Span("add_norm", ("attn_add", "mlp_norm"), runs.add_mlp_norm, _always),
            Span("add_norm", ("mlp_add", "attn_norm"), runs.add_attn_norm, _always),
            Span("add_norm", ("mlp_add", "final_norm"), runs.add_final_norm, _always),
            Span(
                "qk_rope_write", ("qk_norm", "rope", "kv_write"), runs.qk_rope_write, _writes_blocks
            ),
            # For the nodes that no longer span has claimed.
            Span("norm", ("attn_norm",), runs.attn_norm, _always, -1),
            Span("norm", ("mlp_norm",), runs.mlp_norm, _always, -1),
            Span("norm", ("final_norm",), runs.final_norm, _always, -1),
            Span("act_mul", ("act_mul",), runs.act_mul, _always, -1),
            # An addition that a product takes along needs no norm to share a kernel with.
            Span("norm_linear", ("attn_norm", "qkv_proj"), runs.norm_qkv, _one_row, 1),
            Span(
                "norm_linear",
                ("mlp_norm", "gate_up", "act_mul"),
                runs.norm_gate_up_act,
                _one_row,
                1,
            ),
            Span("linear_add", ("o_proj", "attn_add"), runs.o_add, _one_row, 1),
            Span("linear_add", ("down", "mlp_add"), runs.down_add, _one_row, 1),
            Span("linear", ("qkv_proj",), runs.qkv_proj, _few_rows("qkv")),
            Span("linear", ("o_proj",), runs.o_proj, _few_rows("o")),
            Span("linear", ("down",), runs.down, _few_rows("down")),
            Span("linear_act", ("gate_up", "act_mul"), runs.gate_up_act, _few_rows("gate_up")),
            *(_tile_spans(device) if shared_bytes(device) >= SHARED_BYTES else ()),
            Span("last_layer", LAST_LAYER, last_layer, _reads_last_alone, 3),
            Span("sample", ("sample",), runs.sample, _always),
        )
        return self.config.chosen(offered)
