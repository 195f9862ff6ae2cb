"""The metadata of a step: one packed host buffer, one copy to the device, static views on both
sides.

Graphs bake addresses, so every per-step input lives at a fixed offset of one device buffer. On CUDA
the host side is a ring of pinned buffers: a buffer is written again only after an event behind its
last copy (two plans in flight that share one pinned buffer is a known way to read the wrong batch).
That is the event of the step, which somebody has waited for by then as a rule: not where several
rounds of table changes turn the ring while a step is in flight. On the CPU both are one memory.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from core.batch import Limits

    Arrays = dict[str, tuple[tuple[int, ...], str]]  # name -> (shape, numpy dtype name)

_ALIGN = 16  # bytes


def core_sections(limits: Limits) -> dict[str, tuple[tuple[int, ...], str]]:
    """The core's own arrays. Those of one length share an array, to be padded in one assignment.

    "rows": slots, seq_lens, logit_rows, sample_slots; "tokens", which comes last, as `token_rows`.
    """
    rows, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    return {
        "num_decodes": ((1,), "int32"),
        "rows": ((4, rows), "int32"),
        "query_start": ((rows + 1,), "int32"),
        "temperature": ((rows,), "float32"),
        "sample_keys": ((rows, 2), "int32"),
        "filters": ((rows, 3), "float32"),
        "penalties": ((rows, 4), "float32"),
        "tokens": ((3 * _width(tokens),), "int32"),
    }


def token_rows(tokens: Any, num_tokens: int) -> Any:
    """The first of the array "tokens", of host or device, as [3, T]: token_ids, positions,
    token_slots. So what a step uses is in one piece, however many tokens it has."""
    return tokens[: 3 * _width(num_tokens)].reshape(3, -1)[:, :num_tokens]


def _width(num_tokens: int) -> int:
    """Elements of a row, whose start kernels like to find at a multiple of 16 bytes."""
    return math.ceil(num_tokens / 4) * 4


class Staging:
    """Host ring and device buffer for a set of named arrays, the last of which is "tokens"."""

    def __init__(self, arrays: Arrays, device: torch.device, num_host: int) -> None:
        size = sum(_padded(*array) for array in arrays.values())
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self.device = _views(self._device, arrays)
        self._new_event: Any = torch.cuda.Event if device.type == "cuda" else None
        pinned = num_host if self._new_event else 0
        self._ring = [self._device.cpu().pin_memory() for _ in range(pinned)] or [self._device]
        self._waits: list[Any] = [lambda: None] * len(self._ring)  # for a buffer's last copy
        self._parts: dict[int, list[Tensor]] = {}  # of the last step's length, device first
        views = [_views(buffer, arrays) for buffer in self._ring]
        self._host = [{name: v.numpy() for name, v in one.items()} for one in views]
        self._turn = 0

    def host(self) -> dict[str, NDArray[Any]]:
        """The arrays of the next step, to be overwritten; waits until their last copy has ended."""
        (self._waits[self._turn] or self.mark())()
        return self._host[self._turn]

    def send(self, num_tokens: int) -> None:
        """Copy what `host()` gave to the device, the rows of so many tokens, in stream order, and
        turn the ring."""
        if self._new_event:
            if num_tokens not in self._parts:
                end = len(self._device) - 4 * (len(self.device["tokens"]) - 3 * _width(num_tokens))
                self._parts = {num_tokens: [x[:end] for x in (self._device, *self._ring)]}
            part, *sources = self._parts[num_tokens]
            part.copy_(sources[self._turn], non_blocking=True)
            self._waits[self._turn] = None
            self._turn = (self._turn + 1) % len(self._ring)

    def mark(self) -> Any:
        """A function to wait for all that the stream has been given, and so for every copy."""
        if self._new_event is None:
            return lambda: None
        event = self._new_event()
        event.record()
        behind = cache(event.synchronize)  # whoever waits again asks the driver no more
        self._waits = [wait or behind for wait in self._waits]
        return behind


def _padded(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes from the start of an array to the start of the next."""
    return math.ceil(math.prod(shape) * np.dtype(dtype).itemsize / _ALIGN) * _ALIGN


def _views(buffer: Tensor, arrays: Arrays) -> dict[str, Tensor]:
    views: dict[str, Tensor] = {}
    offset = 0
    for name, (shape, dtype) in arrays.items():
        section = buffer[offset : offset + _padded(shape, dtype)]
        flat = section.view(getattr(torch, np.dtype(dtype).name))
        views[name] = flat[: math.prod(shape)].view(shape)
        offset += _padded(shape, dtype)
    return views
