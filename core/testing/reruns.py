"""A pool of "graphs" for any device: a replay calls what was captured again.

It keeps what matters of a real pool: tensors that a capture left are written in place, pieces see
the batch and the values of their capture, and what stood in any of them before a step is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from core.batch import Batch, HostBatch
from core.capture import GraphPool, Piece

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")


class RerunPool(GraphPool):
    """Patch it over `core.executor.GraphPool`, then call `Executor.capture`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._static, self.models, self.samplers = {}, {}, {}
        self._left: list[Tensor] = []

    def capture_model(self, batch: Batch, step: Seq[Piece]) -> None:
        """With a step of no rows for attention in plain torch, which looks at the host's view."""
        none = np.zeros(0, np.int32)
        start = np.zeros(1, np.int32)
        batch.host = HostBatch(0, 0, 0, none, start, none, none, none, batch.shape)
        super().capture_model(batch, step)
        self._left += self._static.values()
        self.models[batch.shape].insert(0, self._poison)

    def capture_sampler(self, key: tuple[int, int], run: Callable[[], Tensor]) -> None:
        """What its rows need is part of a capture."""
        (batch,) = run.args  # type: ignore[attr-defined]  # a functools.partial

        def of_variant() -> Tensor:
            batch.needs = key[1]
            return run()

        super().capture_sampler(key, of_variant)
        replay = self.samplers[key]
        # On a CPU nothing is copied on its way to the host, where a step in flight reads it later.
        self.samplers[key] = lambda: replay().clone()

    def _poison(self, batch: Batch) -> None:
        """Other shapes share the memory, so a step finds there what it has not written itself."""
        for tensor in self._left:
            tensor.fill_(float("nan"))

    def _warm_up(self, run: Callable[[], object]) -> None:
        run()

    def _record(self, run: Callable[[], _T]) -> tuple[Callable[..., None], _T]:
        out = run()
        left = _tensors(out)
        self._left += [tensor for tensor in left if tensor.is_floating_point()]

        def replay(*_: Any) -> None:
            for place, value in zip(left, _tensors(run()), strict=True):
                place.copy_(value)

        return replay, out


def _tensors(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, torch.Tensor) else list(out.values())
