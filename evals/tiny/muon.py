"""Muon with the matrices of one shape in one batch: the arithmetic of torch.optim.Muon.

torch.optim.Muon goes through the matrices one by one, thirty small kernels each; for a model this
small that is a fifth of a step. Grouped by shape it is about one hundredth.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
EPSILON = 1e-7


def orthogonalised(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrices, roughly: Newton-Schulz in bfloat16, [n, rows, columns]."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPSILON)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon(nesterov=True, adjust_lr_fn="match_rms_adamw"), batched by shape."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for parameter in group["params"]:
                if "momentum_buffer" not in self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                gradients = [parameter.grad for parameter in parameters]
                buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
                torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
                ahead = torch._foreach_lerp(gradients, buffers, group["momentum"])
                updates = orthogonalised(torch.stack(ahead)).float().contiguous()
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                scale = group["lr"] * 0.2 * math.sqrt(max(shape))
                torch._foreach_add_(parameters, list(updates.unbind()), alpha=-scale)
