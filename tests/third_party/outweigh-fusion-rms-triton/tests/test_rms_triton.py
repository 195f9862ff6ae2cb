"""`rms_triton` is held to the contract of its seam, to its oracle, and to a gate of its own."""

from __future__ import annotations

import pytest
import torch
from outweigh_rms_kernel import rms_norm, rms_norm_reference

from core import Engine, SamplingParams
from core.testing.fusion import FusionGpuSuite, FusionSuite

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":

    class TestRmsTritonInterpreted(FusionSuite):
        plugin = "rms_triton"
        kinds = ("qwen3",)
        caches = ("paged",)
        token_counts = (1, 3)  # the interpreter runs a program at a time

else:

    class TestRmsTriton(FusionGpuSuite):
        plugin = "rms_triton"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_tokens", "n"), [(1, 64), (3, 100), (7, 1024)])
def test_kernel_beside_its_oracle(num_tokens: int, n: int, dtype: torch.dtype) -> None:
    """Odd shapes, rows with somebody else's numbers between them, memory full of NaN before."""
    generator = torch.Generator().manual_seed(n)
    wide = torch.randn(num_tokens, n + 5, generator=generator).to(DEVICE, dtype)
    gain = torch.randn(n, generator=generator).to(DEVICE, dtype)
    x = wide[:, :n]
    torch.testing.assert_close(rms_norm(x, gain, 1e-6), rms_norm_reference(x, gain, 1e-6))


def test_gate() -> None:
    """Every norm of every layer is the kernel's, and right in place: 2 a layer and the last."""
    options = {"fusion": "rms_triton", "settings": {"fusion.verify": True}, "graphs": "none"}
    with Engine(model="random:tiny", device=DEVICE, **options) as engine:
        engine.generate(["The sea"], SamplingParams(max_tokens=2, ignore_eos=True))
        counts = engine.report()["counters"]["verified_spans"].values()
        assert sum(c["num_places"] for c in counts) == 2 * engine.facts.num_layers + 1
        assert not any(c["num_deviating"] for c in counts)
