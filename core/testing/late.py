"""A device that runs late, on a CPU: what is launched is computed when somebody waits for it.

On a CPU a step has run when its launch returns, so overlap has nothing to hide behind: a token that
is read before its event, or a staging buffer that is written before its copy, is right by chance.
Here work is queued in order, as on a CUDA stream, and done as late as it may be. Whatever depends
on the order that the host happens to run in comes out wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from core.executor import Executor
from core.staging import Staging

if TYPE_CHECKING:
    from torch import Tensor

    from core.batch import Batch, BatchShape, HostBatch
    from core.schedule import StepPlan
    from core.staging import Arrays

_UNREAD = 1  # what a token reads as until its step has run: an id that looks like any other


class LateDevice:
    """A stream. `num_waits` counts how often the host asked for a staging buffer too early."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], object]] = deque()
        self._num_done = 0
        self._running = False
        self.num_waits = 0

    @property
    def num_queued(self) -> int:
        """Pieces of work so far; a place in the stream."""
        return self._num_done + len(self._queue)

    def enqueue(self, work: Callable[[], object]) -> None:
        self._queue.append(work)

    @torch.inference_mode()
    def run_until(self, place: int) -> bool:
        """Do what stands before `place`; True if anything was left to do."""
        was_behind = self._num_done < place
        self._running = True
        try:
            while self._num_done < place:
                self._num_done += 1
                self._queue.popleft()()
        finally:
            self._running = False
        return was_behind

    def in_order(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, run behind all that is queued, as what a host puts into a stream is."""

        @wraps(function)
        def run(*args: Any) -> Any:
            if not self._running:
                self.run_until(self.num_queued)
            return function(*args)

        return run

    def staging(self, arrays: Arrays, num_host: int) -> Staging:
        """The staging of a GPU: a ring of host buffers, and events behind their copies."""
        device: Any = SimpleNamespace(type="cuda")
        with mock.patch("core.staging.torch", _Torch(self)):
            return Staging(arrays, device, num_host)


class _Event:
    """torch.cuda.Event, as far as Staging uses it."""

    def __init__(self, device: LateDevice) -> None:
        self._device, self._place = device, 0

    def record(self) -> None:
        self._place = self._device.num_queued

    def synchronize(self) -> None:
        self._device.num_waits += self._device.run_until(self._place)


class _Buffer(torch.Tensor):
    """Device memory: copies into it, or into its first bytes, are queued. Views of it are ordinary
    tensors."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl
    late: LateDevice

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        self.late.enqueue(partial(torch.Tensor.copy_, self, source))
        return self

    def __getitem__(self, place: Any) -> Tensor:
        part = super().__getitem__(place).as_subclass(_Buffer)
        part.late = self.late
        return part

    def cpu(self, memory_format: Any = None) -> Tensor:
        return self.clone().as_subclass(_Pinned)


class _Pinned(torch.Tensor):
    """Host memory, which only CUDA can pin."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def pin_memory(self) -> Tensor:  # type: ignore[override]
        return self


class _Torch:
    """The module, with buffers and events of a late device."""

    def __init__(self, late: LateDevice) -> None:
        self._late = late
        self.cuda = SimpleNamespace(Event=partial(_Event, late))

    def zeros(self, size: int, dtype: torch.dtype, device: object) -> Tensor:
        buffer = torch.zeros(size, dtype=dtype).as_subclass(_Buffer)
        buffer.late = self._late
        return buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class LateExecutor(Executor):
    """Launches into the stream of `late`. No graphs, and no log-probabilities."""

    late: LateDevice

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        def staging(arrays: Arrays, device: object, num_host: int) -> Staging:
            return self.late.staging(arrays, num_host)

        with mock.patch("core.executor.Staging", staging):
            super().__init__(*args, **kwargs)
        kv: Any = self._kv
        for name in ("begin_step", "save", "restore"):
            setattr(kv, name, self.late.in_order(getattr(kv, name)))
        self.sampler.admit = self.late.in_order(self.sampler.admit)  # type: ignore[method-assign]

    def _stage(self, plan: StepPlan, eagerly: bool = False) -> tuple[Batch, BatchShape | None]:
        batch, captured = super()._stage(plan, eagerly)
        assert batch.host is not None
        batch.host = _copied(batch.host)  # what a launch reads of the host, it reads at once
        if eagerly:
            self.late.run_until(self.late.num_queued)
        return batch, captured

    def _run_step(self, batch: Batch) -> None:
        self.late.enqueue(partial(super()._run_step, batch))

    def _sample(self, batch: Batch) -> Tensor:
        sampled = torch.full((len(batch.sample_slots),), _UNREAD, dtype=torch.int32)
        sample = super()._sample
        self.late.enqueue(lambda: sampled.copy_(sample(batch)))
        return sampled

    def _send_home(self, *tensors: Tensor) -> tuple[list[Any], Callable[[], None]]:
        place = self.late.num_queued
        self._staging.mark()

        def wait() -> None:
            self.late.run_until(place)

        return [tensor.numpy() for tensor in tensors], wait


def _copied(host: HostBatch) -> HostBatch:
    arrays: dict[str, Any] = {
        name: x.copy() for name, x in host._asdict().items() if isinstance(x, np.ndarray)
    }
    return host._replace(**arrays)


@contextmanager
def running_late() -> Iterator[LateDevice]:
    """Engines that are built meanwhile run on a late device of their own, the one given here."""
    late = LateDevice()
    executor = type("LateExecutor", (LateExecutor,), {"late": late})
    with mock.patch("core.compose.Executor", executor):
        yield late
