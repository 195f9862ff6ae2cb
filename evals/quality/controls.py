"""Offers that are known for what they do to a text, on any device.

An evaluation must fail those but the last: whoever passes them measures nothing.

    python -m evals.quality -p evals.quality.controls --kv loud_values --parts generation …

`per_token_int4` is a known bad format: reading and recall fail it. `loud_values` makes sampled text
repeat itself, as a wrong scale of the values does: generation fails it, given some hundred texts.
`bfloat16_kv` is the floor of noise that others are held beside: what a cache in bfloat16 costs a
model in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from core import hookimpl
from plugins.kv.paged import Paged

if TYPE_CHECKING:
    from torch import Tensor

    from core.batch import Batch
    from core.hookspecs import Register
    from core.seams import KVSink

_MAX_CODE = 7
_LOUD = 1.5


class _Changed(Paged):
    """`paged` over keys and values that are changed when they are written."""

    lossless: ClassVar[bool] = False

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        super().write(layer, self.key(k), self.value(v), batch)

    def key(self, k: Tensor) -> Tensor:
        return k

    def value(self, v: Tensor) -> Tensor:
        return v

    def sink(self, layer: int) -> KVSink | None:
        """None: what a span writes by itself would be as it was."""
        return None


class PerTokenInt4(_Changed):
    """4 bits with one scale for each token and head, keys not smoothed."""

    def key(self, k: Tensor) -> Tensor:
        wide = k.float()
        scale = (wide.abs().amax(-1, keepdim=True) / _MAX_CODE).clamp(min=1e-12)
        return ((wide / scale).round() * scale).to(k.dtype)

    def value(self, v: Tensor) -> Tensor:
        return self.key(v)


class LoudValues(_Changed):
    """Values that are too large by half."""

    def value(self, v: Tensor) -> Tensor:
        return v * _LOUD


class Bfloat16KV(_Changed):
    """Keys and values rounded to bfloat16, whatever the model computes in."""

    def key(self, k: Tensor) -> Tensor:
        return k.bfloat16().to(k.dtype)

    def value(self, v: Tensor) -> Tensor:
        return self.key(v)


@hookimpl
def outweigh_register_kv(register: Register) -> None:
    register("bfloat16_kv", Bfloat16KV)
    register("per_token_int4", PerTokenInt4)
    register("loud_values", LoudValues)
