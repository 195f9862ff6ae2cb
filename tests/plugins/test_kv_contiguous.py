"""`contiguous` through the conformance suite."""

from __future__ import annotations

from core.testing.kv import KVManagerSuite
from core.testing.kv_gpu import KVManagerGpuSuite


class TestContiguous(KVManagerSuite):
    plugin = "contiguous"


class TestContiguousOnGpu(KVManagerGpuSuite):
    plugin = "contiguous"
