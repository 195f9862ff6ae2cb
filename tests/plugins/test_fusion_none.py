"""`none` through the conformance suite: no span, the plain chain."""

from __future__ import annotations

from core.testing.fusion import FusionGpuSuite, FusionSuite


class TestNone(FusionSuite):
    plugin = "none"


class TestNoneOnGpu(FusionGpuSuite):
    """With nothing to compare, one decoder stands for all."""

    plugin = "none"
    kinds = ("qwen3",)
    caches = ("paged",)
    token_counts = (1, 7)
