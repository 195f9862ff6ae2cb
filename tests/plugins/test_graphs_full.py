"""`full` through the conformance suite."""

from __future__ import annotations

from core.testing.graphs import GraphSuite
from core.testing.graphs_gpu import GraphGpuSuite


class TestFull(GraphSuite):
    plugin = "full"


class TestFullShort(GraphSuite):
    """A step longer than the longest graph runs eagerly."""

    plugin = "full"
    config = {"max_tokens": 70, "fine_tokens": 7, "fine": 3}


class TestFullWithoutMixedSteps(GraphSuite):
    plugin = "full"
    config = {"mixed": False}


class TestFullOnGpu(GraphGpuSuite):
    plugin = "full"
