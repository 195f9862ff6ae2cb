"""`rms_triton`: RMSNorm as one Triton kernel, a program a token.

Biao Zhang, Rico Sennrich: Root Mean Square Layer Normalization, NeurIPS 2019 (arXiv:1910.07467).
The plain node takes five launches. Rounding is the plain node's: the sum in float32, the normalised
value to the dtype of the model, then the gain.

The kernel stands in `outweigh_rms_kernel`, because importing a plugin imports no triton. It runs on
CUDA, and under TRITON_INTERPRET=1 on a CPU.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from core import UserError, hookimpl
from core.seams import Span
from plugins.fusion.options import SpanOptions

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    import torch
    from torch import Tensor

    from core.batch import Batch
    from core.facts import ModelFacts
    from core.hookspecs import Register
    from core.model import Site
    from core.seams import KVSink


def run_norm(gain: str, sites: tuple[Site, ...], batch: Batch, residual: Tensor) -> tuple[Tensor]:
    """hidden [T, hidden] of residual [T, hidden]; `gain` names the field of the weights."""
    from outweigh_rms_kernel import rms_norm

    (site,) = sites
    weights = site.model if site.weights is None else site.weights
    return (rms_norm(residual, getattr(weights, gain), site.facts.rms_norm_eps),)


def always(num_tokens: int, facts: ModelFacts, sink: KVSink | None) -> bool:
    return True


class RmsTriton:
    """The three norms of the decoder; everything else is left to the plain nodes."""

    api: ClassVar[int] = 1
    lossless: ClassVar[bool] = True

    class Config(SpanOptions):
        names = ("attn_norm", "mlp_norm", "final_norm")

    def __init__(self, config: Config) -> None:
        self.config = config

    def spans(self, facts: ModelFacts, device: torch.device) -> Seq[Span]:
        """Raises UserError off CUDA, unless Triton's interpreter stands in for it."""
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            what = f"fusion 'rms_triton' runs on CUDA and the device is {device}"
            raise UserError(f"{what}: choose another, or set TRITON_INTERPRET=1 to try it slowly")
        names = self.Config.names
        return self.config.chosen(Span(n, (n,), partial(run_norm, n), always) for n in names)


@hookimpl
def outweigh_register_fusion(register: Register) -> None:
    register("rms_triton", RmsTriton)
