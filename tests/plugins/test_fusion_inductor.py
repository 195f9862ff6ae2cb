"""`inductor` through the conformance suite: with the C++ compiler here, with Triton on a GPU."""

from __future__ import annotations

import shutil

import pytest
import torch

from core.testing import parity
from core.testing.fusion import FusionGpuSuite, FusionSuite

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU, which is not here"
)


@needs_compiler
class TestInductor(FusionSuite):
    """The kind with every node stands for all: the C++ compiler takes a quarter of a minute."""

    plugin = "inductor"
    kinds = ("qwen3",)
    caches = ("paged",)
    token_counts = (1, 7, 63)


class TestInductorOnGpu(FusionGpuSuite):
    plugin = "inductor"


class TestInductorOnGpuFloat32(FusionGpuSuite):
    plugin = "inductor"
    dtype = torch.float32
    tolerance = parity.SPAN[torch.float32]
