"""The metadata of a step: one packed host buffer, one copy to the device, static views on both
sides.

Graphs bake addresses, so every per-step input lives at a fixed offset of one device buffer. On CUDA
the host side is a ring of pinned buffers: a buffer is written again only after the event of its
last copy (two plans in flight that share one pinned buffer is a known way to read the wrong batch).
On the CPU host and device are one memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from core.batch import Limits

_ALIGN = 16  # bytes


class Section(NamedTuple):
    """One array of the packed buffer."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def core_sections(limits: Limits) -> dict[str, tuple[tuple[int, ...], str]]:
    """The core's own arrays. Those of one length share an array, to be padded in one assignment.

    "rows": slots, seq_lens, logit_rows, sample_slots; "tokens": token_ids, positions, token_slots.
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
        "tokens": ((3, tokens), "int32"),
    }


class Staging:
    """Host ring and device buffer for a set of named arrays."""

    def __init__(
        self, arrays: Mapping[str, tuple[tuple[int, ...], str]], device: torch.device, num_host: int
    ) -> None:
        self._sections, num_bytes = _lay_out(arrays)
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.device = {name: _view(self._device, s) for name, s in self._sections.items()}
        self._on_cuda = device.type == "cuda"
        if self._on_cuda:
            self._ring = [
                torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(num_host)
            ]
            self._copied = [torch.cuda.Event() for _ in range(num_host)]
        else:
            self._ring = [self._device]
        self._host = [
            {name: _view(buffer, s).numpy() for name, s in self._sections.items()}
            for buffer in self._ring
        ]
        self._turn = 0

    def host(self) -> dict[str, NDArray[Any]]:
        """The arrays of the next step, to be overwritten; waits until their last copy has ended."""
        if self._on_cuda:
            self._copied[self._turn].synchronize()
        return self._host[self._turn]

    def send(self) -> None:
        """Copy what `host()` gave to the device, in stream order, and turn the ring."""
        if self._on_cuda:
            self._device.copy_(self._ring[self._turn], non_blocking=True)
            self._copied[self._turn].record()
            self._turn = (self._turn + 1) % len(self._ring)


def _lay_out(
    arrays: Mapping[str, tuple[tuple[int, ...], str]],
) -> tuple[dict[str, Section], int]:
    sections: dict[str, Section] = {}
    offset = 0
    for name, (shape, dtype_name) in arrays.items():
        dtype = np.dtype(dtype_name)
        sections[name] = Section(offset, shape, dtype)
        offset += math.ceil(math.prod(shape) * dtype.itemsize / _ALIGN) * _ALIGN
    return sections, offset


def _view(buffer: Tensor, section: Section) -> Tensor:
    num_bytes = math.prod(section.shape) * section.dtype.itemsize
    flat = buffer[section.offset : section.offset + num_bytes]
    return flat.view(getattr(torch, section.dtype.name)).view(section.shape)
