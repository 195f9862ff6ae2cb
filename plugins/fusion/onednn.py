"""`onednn`: the decoder's matrix products by oneDNN, on a CPU, over weights in its own layout.

A decode step on a CPU is as fast as it reads the weights. Measured at 135 M parameters on two cores
that read 33 GB/s: float32 as torch sends it to MKL 10 GB/s, oneDNN over the same weights 14, over
its own layout 20; and at 2,048 tokens 190, 206 and 215 GFLOP/s. In bfloat16 torch goes to oneDNN
itself, but with weights that are not packed; the results are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import psutil
from pydantic import Field

from core.errors import UserError
from core.seams import Span
from plugins.fusion.options import SpanOptions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from core.batch import Batch
    from core.facts import ModelFacts
    from core.model import Site
    from core.seams import KVSink
    from core.weights import ModelWeights

# A node of a layer, and the field of its weight.
_LINEAR = {"qkv_proj": "qkv", "o_proj": "o", "gate_up": "gate_up", "down": "down"}


class OneDnnFusion:
    """The plain nodes but for their matrix products; results differ by the order of sums alone."""

    api: ClassVar[int] = 1
    lossless: ClassVar[bool] = True

    class Config(SpanOptions):
        names = (*_LINEAR, "lm_head")

        pack: bool = Field(
            True, description="keep a second copy of the weights, in oneDNN's own layout"
        )

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        self._products: _Products | None = None  # of the decoder that is being built

    def spans(self, facts: ModelFacts, device: torch.device) -> tuple[Span, ...]:
        """A span a linear node. Raises UserError off the CPU, and where torch has no oneDNN."""
        import torch

        if device.type != "cpu" or not torch.backends.mkldnn.is_available():
            what = "CPU" if device.type == "cpu" else "device"
            raise UserError(
                f"fusion 'onednn' needs a CPU and a torch with oneDNN, and this {what} is "
                f"{device} with torch {torch.__version__}: choose --fusion none"
            )
        self._products = products = _Products()
        runs: dict[str, Callable[..., Any]] = {
            node: partial(_linear, products, field) for node, field in _LINEAR.items()
        }
        runs["lm_head"] = partial(_lm_head, products)
        offered = (Span(name, (name,), run, _is_known) for name, run in runs.items())
        return self.config.chosen(offered)

    def weights(self, weights: ModelWeights) -> None:
        """Pack them. Raises UserError where the memory does not hold the copy."""
        products, self._products = self._products, None
        assert products is not None, "spans come first"
        if self.config.pack and _multiplies(weights.embed.dtype):
            used = self.config.names if self.config.only is None else self.config.only
            fields = [field for node, field in _LINEAR.items() if node in used]
            linear = [getattr(w, field) for w in weights.layers for field in fields]
            products.pack([*linear, *[weights.lm_head] * ("lm_head" in used)])


def _is_known(num_tokens: int, facts: ModelFacts, sink: KVSink | None) -> bool:
    return _multiplies(facts.dtype)


def _multiplies(dtype: torch.dtype) -> bool:
    """float16, which few CPUs compute in, and bfloat16 without its instructions stay plain."""
    import torch

    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class _Products:
    """Products with the linear weights of one decoder, by what torch's own compiler emits for them
    on a CPU."""

    def __init__(self) -> None:
        import torch

        self.linear = torch.ops.mkldnn._linear_pointwise
        self._packed: dict[int, tuple[Tensor, Tensor]] = {}  # by identity; with what is packed

    def pack(self, weights: list[Tensor]) -> None:
        """Copy the weights into oneDNN's layout."""
        import torch

        needed, free = sum(w.nbytes for w in weights), psutil.virtual_memory().available
        if needed > free:
            raise UserError(
                f"oneDNN's copy of the weights takes {needed / 2**30:.1f} GiB and "
                f"{free / 2**30:.1f} GiB are free: give --set fusion.pack=false"
            )
        for weight in weights:
            self._packed[id(weight)] = weight, torch.ops.mkldnn._reorder_linear_weight(weight)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        _, packed = self._packed.get(id(weight), (None, weight))
        y: Tensor = self.linear(x, packed, bias, "none", [], "")
        return y


def _linear(
    products: _Products, field: str, sites: tuple[Site], batch: Batch, x: Tensor
) -> tuple[Tensor]:
    layer = sites[0].weights
    return (products(x, getattr(layer, field), getattr(layer, f"{field}_bias", None)),)


def _lm_head(
    products: _Products, sites: tuple[Site], batch: Batch, hidden: Tensor
) -> tuple[Tensor]:
    logits = products(hidden[batch.logit_rows], sites[0].model.lm_head)
    return (logits if batch.logits is None else batch.logits.copy_(logits),)
