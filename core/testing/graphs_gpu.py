"""The graphs suite on CUDA: what is replayed, what it costs the host, and what it leaves behind.

The strategy runs in an engine over a tiny random model, with graphs and without at the same padded
shape.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch

from core import Engine, SamplingParams
from core.seams import offered
from core.testing.graphs import GraphSuite

if TYPE_CHECKING:
    from core.batch import Batch, BatchShape

_ROWS, _TOKENS = 20, 256
_PROMPT = 3  # tokens of a prompt that is there to be decoded
_SEGMENT_BYTES = 20 << 20  # what the allocator may keep of a freed pool's neighbours


@pytest.mark.gpu
class GraphGpuSuite(GraphSuite):
    """All of the policy half too, on the machine that captures."""

    @pytest.fixture(autouse=True)
    def _needs_cuda(self) -> None:
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        if not self.make().captures:
            pytest.skip("captures is False: there is nothing to replay")

    def engine(self, **options: Any) -> Engine:
        """An engine with this strategy, and prompts that share nothing."""
        defaults = {
            "model": "random:tiny",
            "device": "cuda",
            "graphs": self.make(),
            "max_model_len": 600,
            "max_num_seqs": _ROWS,
            "max_num_batched_tokens": _TOKENS,
            "kv_cache_bytes": 1 << 26,
            "enable_prefix_caching": False,
        }
        return Engine(**{**defaults, **options})

    def test_replay_equals_eager_bit_for_bit(self) -> None:
        """At every rung of every ladder, and one below and above it: the same padded shape."""
        with self.engine() as engine:
            shapes = list(self.make().shapes(engine.limits))
            watch = Watch(engine)
            for lengths in workloads(shapes):
                params = SamplingParams(max_tokens=3, ignore_eos=True)
                outputs = engine.generate(_prompts(lengths), params)
                assert not [output.error for output in outputs if output.error]
        assert not watch.differing, f"replay and eager differ at {watch.differing[0]}"
        unused = set(shapes) - watch.replayed
        assert not unused, f"captured and never replayed: {min(unused, key=lambda s: s[:4])}"

    def test_replay_neither_allocates_nor_waits(self) -> None:
        """Steady decode steps allocate nothing on the device and never wait for it. What runs
        eagerly between pieces allocates, from what torch's allocator holds already."""
        with self.engine() as engine:
            strategy = self.make()
            strategy.shapes(engine.limits)
            if strategy.select(7, 7, 1, engine.limits.max_model_len, None) is None:
                pytest.skip("no decode step of 7 rows is captured")
            what = "segment" if offered(strategy, "cut") else "allocation"
            for prompt in _prompts([_PROMPT] * 7):
                engine.add_request(prompt, SamplingParams(max_tokens=60, ignore_eos=True))
            for _ in range(10):
                engine.step()
            allocated, num_eager = _num_allocated(what), engine.counters.num_eager_steps
            torch.cuda.set_sync_debug_mode("error")
            try:
                events = [event for _ in range(30) for event in engine.step()]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            # A step that raises, as a call that waits does here, ends its requests.
            ended = [event.output for event in events if event.output]
            assert not ended, ended[0].error or "the steps are not steady: somebody has finished"
            assert _num_allocated(what) == allocated
            assert engine.counters.num_eager_steps == num_eager

    def test_memory_comes_back_on_close(self) -> None:
        """Pool, static buffers, cache and weights."""
        before = self._run_and_close()  # libraries keep workspaces of their own, once
        after = self._run_and_close()
        assert after[0] - before[0] < 1 << 20, "bytes are still allocated"
        assert after[1] - before[1] < _SEGMENT_BYTES, "bytes are still reserved"

    def _run_and_close(self) -> tuple[int, int]:
        """Bytes allocated and reserved on the device once an engine has been used and closed."""
        with self.engine() as engine:
            engine.generate(_prompts([1, 5, 40]), SamplingParams(max_tokens=4, ignore_eos=True))
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


class Watch:
    """Runs every step that an engine replays eagerly too, and compares the logits."""

    def __init__(self, engine: Engine) -> None:
        self._executor = cast(Any, engine._executor)
        self._trash = engine.limits.trash_slot
        self.replayed: set[BatchShape] = set()
        self.differing: list[BatchShape] = []
        models = self._executor._pool.models
        for shape, steps in models.items():
            models[shape] = [partial(self._both, shape, steps)]

    def _both(self, shape: BatchShape, steps: Seq[Callable[[Batch], object]], batch: Batch) -> None:
        assert batch.logits is not None
        live = batch.sample_slots != self._trash
        for step in steps:
            step(batch)
        replayed = batch.logits[live]
        batch.logits.fill_(float("nan"))
        self._executor._run_step(batch)
        if len(replayed):
            self.replayed.add(shape)
        if not torch.equal(replayed, batch.logits[live]):
            self.differing.append(shape)


def workloads(shapes: list[BatchShape]) -> Iterator[list[int]]:
    """Lengths of prompts, in tokens, that lead to a step one below, at and one above each shape;
    chunks behind a prefix are the last of as many as the budget makes of it."""
    for size in _around({shape.num_seqs for shape in shapes if not shape.lone}, 1, _ROWS):
        yield [_PROMPT] * size
    for size in _around({shape.num_tokens for shape in shapes if shape.fresh}, 2, _TOKENS):
        yield [size]
    for shape in shapes:
        if shape.start:
            yield [shape.max_kv - 1]
            yield [shape.max_kv]
            yield [shape.max_kv + 1]
    others = {s.num_tokens for s in shapes if not s.lone and not s.decode_only}
    for size in _around(others, 2, _TOKENS):
        yield [2, size - 2] if size > 3 else [size]


def _around(sizes: set[int], low: int, high: int) -> list[int]:
    near = {size + by for size in sizes for by in (-1, 0, 1)}
    return sorted(size for size in near if low <= size <= high)


def _prompts(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(3, 250, n).tolist() for n in lengths]


def _num_allocated(what: str) -> int:
    return int(torch.cuda.memory_stats()[f"{what}.all.allocated"])
