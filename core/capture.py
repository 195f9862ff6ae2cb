"""CUDA graphs: cut a step into pieces, capture them into one memory pool, and replay."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence as Seq
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from core.chain import execute, interface

if TYPE_CHECKING:
    from torch import Tensor

    from core.batch import Batch, BatchShape
    from core.model import Operation


class Piece(NamedTuple):
    """A run of operations that is one graph, or that runs eagerly between graphs.

    `reads` are values that it takes from the pieces before it, `writes` those that it leaves for
    the pieces after it.
    """

    operations: list[Operation]
    eager: bool
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def run(
        self, batch: Batch, live: Mapping[str, Tensor], static: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Compute what it writes; what has a place in `static` is put there."""
        found = execute(self.operations, batch, {name: live[name] for name in self.reads})
        return {name: _put(found[name], static.get(name)) for name in self.writes}


def _put(value: Tensor, place: Tensor | None) -> Tensor:
    return value if place is None or place is value else place.copy_(value)


def pieces(operations: Seq[Operation], eager: Container[str]) -> list[Piece]:
    """The step, cut wherever an operation computes a node of `eager`: a span that holds one runs
    eagerly as a whole."""
    found: list[Piece] = []
    rest = list(operations)
    for is_eager, group in groupby(operations, lambda op: any(n in eager for n in op.nodes)):
        run = list(group)
        rest = rest[len(run) :]
        reads, writes = interface(run, rest)
        # Nothing is left by the last: logits stand in their static buffer.
        found.append(Piece(run, is_eager, reads, writes if rest else ()))
    return found


class GraphPool:
    """The graphs of one engine: `models` end at the logits, `samplers` are small graphs of their
    own.

    A model is what a step runs in order, each with its batch: replays, and between them pieces that
    are eager. A value that passes from graph to graph stays in the pool, held while the rest of its
    shape is captured; graphs of other shapes use the same memory. What an eager piece reads or
    writes lies in a static tensor, one for all layers and shapes: the host has to name it at each
    replay, and a tensor of the pool that it held for that would be lost to all other graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._static: dict[str, Tensor] = {}  # as long as the largest shape, which comes first
        self.models: dict[BatchShape, list[Callable[[Batch], object]]] = {}
        # By rows and variant (bits of core.sampling): gives the sampled ids, [R].
        self.samplers: dict[tuple[int, int], Callable[[], Tensor]] = {}

    def capture_model(self, batch: Batch, step: Seq[Piece]) -> None:
        """A graph for each piece that is not eager. Shapes come in descending order."""
        live: dict[str, Tensor] = {}

        def warm_up() -> None:
            for piece in step:
                live.update(piece.run(batch, live, {}))

        self._warm_up(warm_up)
        static: dict[str, Tensor] = {}
        for name in {n for piece in step if piece.eager for n in piece.reads + piece.writes}:
            whole = self._static.setdefault(name, torch.empty_like(live[name]))
            static[name] = whole[: len(live[name])]
        live.clear()
        model = self.models[batch.shape] = []
        for piece in step:
            if piece.eager:
                model.append(partial(piece.run, live=static, static=static))
                live.update(static)
            else:
                replay, left = self._record(partial(piece.run, batch, dict(live), static))
                model.append(replay)
                live.update(left)

    def capture_sampler(self, key: tuple[int, int], run: Callable[[], Tensor]) -> None:
        """`key` is the one in `samplers`."""
        self._warm_up(run)
        step, sampled = self._record(run)

        def replay() -> Any:
            step()
            return sampled

        self.samplers[key] = replay

    def _warm_up(self, run: Callable[[], object]) -> None:
        """One eager pass: it compiles kernels and builds plans, which capture must not do."""
        # torch's one capture stream, shared by all engines: cuBLAS keeps 32 MiB of workspace for
        # every stream that it has seen, which graphs point to and nobody can give back.
        stream: Any = torch.cuda.graph(torch.cuda.CUDAGraph()).capture_stream
        torch.cuda.current_stream(self._device).synchronize()
        with torch.cuda.stream(stream):
            run()
        stream.synchronize()

    def _record(self, run: Callable[[], Any]) -> tuple[Callable[..., None], Any]:
        """Capture `run`: its replay, which heeds no argument, and what `run` gave, for replays
        write there."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = run()
        return lambda *_: graph.replay(), out
