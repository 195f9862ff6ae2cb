"""CUDA graphs: capture into one memory pool, and replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from core.batch import BatchShape


class GraphPool:
    """The graphs of one engine. The model's end at the logits; samplers are small graphs of their
    own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._models: dict[BatchShape, torch.cuda.CUDAGraph] = {}
        self._samplers: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.num_bytes = 0

    def model(self, shape: BatchShape) -> Callable[[], None] | None:
        """The replay of a shape, or None if it was not captured."""
        graph = self._models.get(shape)
        return None if graph is None else graph.replay

    def sampler(self, shape: BatchShape, variant: int) -> Callable[[], Tensor] | None:
        """The replay of a variant (bits of core.sampling) for the rows of a shape: it returns the
        sampled ids, [R]. None if it was not captured."""
        entry = self._samplers.get((shape.num_seqs, variant))
        if entry is None:
            return None
        graph, sampled = entry

        def replay() -> Tensor:
            graph.replay()
            return sampled

        return replay

    def capture_model(self, shape: BatchShape, run: Callable[[], None]) -> None:
        self._models[shape], _ = self._capture(run)

    def capture_sampler(self, shape: BatchShape, variant: int, run: Callable[[], Tensor]) -> None:
        graph, sampled = self._capture(run)
        assert sampled is not None
        self._samplers[shape.num_seqs, variant] = graph, sampled

    def _capture(
        self, run: Callable[[], Tensor | None]
    ) -> tuple[torch.cuda.CUDAGraph, Tensor | None]:
        """One eager pass first: it compiles kernels and builds plans, which capture must not do."""
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        # torch's one capture stream, shared by all engines: cuBLAS keeps 32 MiB of workspace for
        # every stream that it has seen, which graphs point to and nobody can give back.
        capture = torch.cuda.graph(graph, pool=self._pool)
        stream = capture.capture_stream
        assert stream is not None
        torch.cuda.current_stream(self._device).synchronize()
        with torch.cuda.stream(stream):
            run()
        stream.synchronize()
        with capture:
            out = run()
        self.num_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return graph, out
