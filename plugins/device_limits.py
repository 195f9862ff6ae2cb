"""What a device has room for, where kernels choose by it.

Of a device that is none of CUDA the numbers are an H200's: the interpreter computes what the GPU
would, and the compiler needs none.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_H200_SMS, _H200_SHARED_BYTES = 132, 227 << 10


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors."""
    import torch

    if not _is_there(device):
        return _H200_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have."""
    if not _is_there(device):
        return _H200_SHARED_BYTES
    from triton.runtime import driver

    utils: Any = driver.active.utils
    return int(utils.get_device_properties(device.index or 0)["max_shared_mem"])


def _is_there(device: torch.device) -> bool:
    import torch

    return device.type == "cuda" and torch.cuda.is_available()
