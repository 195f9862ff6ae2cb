"""`triton` through the conformance suite: on a GPU, and without one in Triton's interpreter.

The interpreter runs in a process of its own, because TRITON_INTERPRET must be set before triton is
imported; in float32, and with shorter steps, since it runs a program at a time.
"""

from __future__ import annotations

import pytest
import torch

from core.testing import parity
from core.testing.fusion import FusionGpuSuite, FusionSuite
from core.testing.interpreter import INTERPRETING, run_in_the_interpreter

if INTERPRETING:

    class TestTritonInterpreted(FusionSuite):
        plugin = "triton"
        kinds = ("qwen2.5-yarn", "qwen3")
        caches = ("paged",)
        token_counts = (1, 3)

    class TestTritonInterpretedHalf(FusionSuite):
        """The spans for few rows, for those of one tile, and for many rows of which one is read are
        not offered in float32."""

        plugin = "triton"
        kinds = ("qwen2.5-yarn", "qwen3")
        caches = ("paged",)
        token_counts = (1, 3, 20)
        dtype = torch.float16
        tolerance = 2e-3

else:

    def test_in_the_interpreter():
        pytest.importorskip("triton", reason="needs triton, which is not installed here")
        assert "skipped" not in run_in_the_interpreter(__file__)

    class TestTriton(FusionGpuSuite):
        plugin = "triton"
        token_counts = (*FusionGpuSuite.token_counts, 300)

    class TestTritonFloat32(FusionGpuSuite):
        plugin = "triton"
        dtype = torch.float32
        tolerance = parity.SPAN[torch.float32]
