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

from core.config import OfferConfig
from core.errors import UserError
from core.seams import Span

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from core.batch import Batch
    from core.facts import ModelFacts
    from core.model import Site
    from core.seams import KVSink

# A node of a layer, and the field of its weight.
_LINEAR = {"qkv_proj": "qkv", "o_proj": "o", "gate_up": "gate_up", "down": "down"}


class OneDnnFusion:
    """The plain nodes but for their matrix products; results differ by the order of sums alone."""

    api: ClassVar[int] = 1
    lossless: ClassVar[bool] = True

    class Config(OfferConfig):
        pack: bool | None = Field(
            None,
            description="keep a second copy of the weights in oneDNN's layout; null: where it "
            "takes less than half of the free memory",
        )

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def spans(self, facts: ModelFacts, device: torch.device) -> list[Span]:
        """A span a linear node. Raises UserError off the CPU, and where torch has no oneDNN."""
        import torch

        if device.type != "cpu" or not torch.backends.mkldnn.is_available():
            what = "CPU" if device.type == "cpu" else "device"
            raise UserError(
                f"fusion 'onednn' needs a CPU and a torch with oneDNN, and this {what} is "
                f"{device} with torch {torch.__version__}: choose --fusion none"
            )
        pack = self.config.pack
        if pack is None:
            pack = _linear_bytes(facts) < psutil.virtual_memory().available / 2
        weights = _Weights(pack)
        runs: dict[str, Callable[..., Any]] = {
            node: partial(_linear, weights, field) for node, field in _LINEAR.items()
        }
        runs["lm_head"] = partial(_lm_head, weights)
        return [Span(name, (name,), run, _is_known) for name, run in runs.items()]


def _is_known(num_tokens: int, facts: ModelFacts, sink: KVSink | None) -> bool:
    """float16, which few CPUs compute in, stays with the plain nodes."""
    import torch

    if facts.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return facts.dtype == torch.float32


def _linear_bytes(facts: ModelFacts) -> int:
    """Bytes of all linear weights."""
    attention = sum(facts.qkv_sizes) + facts.qkv_sizes[0]
    layer = facts.hidden_size * (attention + 3 * facts.intermediate_size)
    weights = facts.num_layers * layer + facts.vocab_size * facts.hidden_size
    return weights * int(facts.dtype.itemsize)


class _Weights:
    """Linear weights as oneDNN is to read them, packed when they are first used.

    One a decoder: weights are told apart by identity, which holds while the decoder keeps them.
    """

    def __init__(self, pack: bool) -> None:
        import torch

        # What torch's own compiler emits for a linear layer on a CPU.
        self.linear = torch.ops.mkldnn._linear_pointwise
        self._reorder = torch.ops.mkldnn._reorder_linear_weight
        self._pack = pack
        self._packed: dict[int, tuple[Tensor, Tensor]] = {}  # with the original, kept alive

    def __call__(self, weight: Tensor) -> Tensor:
        if not self._pack:
            return weight
        if id(weight) not in self._packed:
            self._packed[id(weight)] = weight, self._reorder(weight)
        return self._packed[id(weight)][1]


def _linear(
    weights: _Weights, field: str, sites: tuple[Site], batch: Batch, x: Tensor
) -> tuple[Tensor]:
    layer = sites[0].weights
    bias = getattr(layer, f"{field}_bias", None)
    return (weights.linear(x, weights(getattr(layer, field)), bias, "none", [], ""),)


def _lm_head(weights: _Weights, sites: tuple[Site], batch: Batch, hidden: Tensor) -> tuple[Tensor]:
    rows = hidden[batch.logit_rows]
    logits = weights.linear(rows, weights(sites[0].model.lm_head), None, "none", [], "")
    return (logits if batch.logits is None else batch.logits.copy_(logits),)
