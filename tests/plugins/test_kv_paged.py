"""`paged` through the conformance suite, at several block sizes."""

from __future__ import annotations

from core.testing.kv import KVManagerSuite
from core.testing.kv_gpu import KVManagerGpuSuite


class TestPaged(KVManagerSuite):
    plugin = "paged"


class TestPagedByTheToken(KVManagerSuite):
    plugin = "paged"
    config = {"block_size": 1}


class TestPagedOdd(KVManagerSuite):
    plugin = "paged"
    config = {"block_size": 5}


class TestPagedOnGpu(KVManagerGpuSuite):
    plugin = "paged"


class TestPagedOddOnGpu(KVManagerGpuSuite):
    plugin = "paged"
    config = {"block_size": 5}
