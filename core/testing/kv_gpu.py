"""The kv suite on CUDA in bfloat16, and what only a GPU can show: replay from a captured graph."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch

from core.testing import codes, parity
from core.testing.kv import KVManagerSuite
from core.testing.probes import compute
from core.testing.rig import GARBAGE

if TYPE_CHECKING:
    from torch import Tensor

    from core.batch import Batch
    from core.testing.rig import Rig, Step

_LAYER = 1


@pytest.mark.gpu
class KVManagerGpuSuite(KVManagerSuite):
    """`tolerance`: weights and output are rounded to bfloat16, sums are float32."""

    device: ClassVar[str] = "cuda"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    tolerance: ClassVar[float] = parity.CACHE[torch.bfloat16]

    @pytest.mark.parametrize("num_padding_rows", [0, 1])
    def test_replay_equals_eager(self, num_padding_rows: int) -> None:
        """A decode step is captured once, and replayed for the next over edges of blocks."""
        rig = self.rig()
        if not rig.kv.graph_safe:
            pytest.skip("graph_safe is False")
        running = [rig.sequence([20 + i] * n) for i, n in enumerate((14, 30, 5))]
        for seq in running:
            rig.admit(seq)
            compute(rig, seq)
            rig.append(seq, 1)
        graph: torch.cuda.CUDAGraph | None = None
        for token in range(4):
            step = rig.begin(running, num_padding_rows=num_padding_rows)
            inputs = _inputs(rig, step)
            if graph is None:
                batch, static = dataclasses.replace(step.batch, host=None), inputs
                graph, replayed = _capture(rig, batch, static)
            _copy(step.batch, inputs, batch, static)
            replayed.fill_(GARBAGE)
            graph.replay()
            n = len(running)
            assert torch.equal(replayed[:n], _layer(rig, step.batch, inputs)[:n])
            rig.end(step)
            for seq in running:
                rig.append(seq, token)


def _inputs(rig: Rig, step: Step) -> list[Tensor]:
    """Keys, values and queries of one layer of a step, [T, K, D], [T, K, D] and [T, H, D]."""
    facts = rig.facts
    wide = dataclasses.replace(facts, num_kv_heads=facts.num_heads)
    inputs = []
    for kind, shapes in ((codes.KEY, facts), (codes.VALUE, facts), (codes.QUERY, wide)):
        inputs.append(rig.content(step, codes.floats, _LAYER, kind, shapes))
    return inputs


def _layer(rig: Rig, batch: Batch, inputs: list[Tensor]) -> Tensor:
    k, v, q = inputs
    rig.kv.begin_step(batch)
    rig.kv.write(_LAYER, k, v, batch)
    return rig.kv.attend(_LAYER, q, batch)


def _capture(rig: Rig, batch: Batch, inputs: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """One eager pass first: it compiles kernels, which capture must not do."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _layer(rig, batch, inputs)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = _layer(rig, batch, inputs)
    return graph, out


def _copy(step: Batch, inputs: list[Tensor], batch: Batch, static: list[Tensor]) -> None:
    """What the core's staging does: the same addresses get the new step's numbers."""
    for name in ("positions", "token_slots", "slots", "query_start", "seq_lens", "num_decodes"):
        getattr(batch, name).copy_(getattr(step, name))
    for old, new in zip(static, inputs, strict=True):
        old.copy_(new)
