"""`decode` through the conformance suite."""

from __future__ import annotations

from core.testing.graphs import GraphSuite
from core.testing.graphs_gpu import GraphGpuSuite


class TestDecode(GraphSuite):
    plugin = "decode"


class TestDecodeCoarse(GraphSuite):
    plugin = "decode"
    config = {"fine": 16}


class TestDecodeOnGpu(GraphGpuSuite):
    plugin = "decode"
