"""What the device can do at most, for shares of the roofline: given, known, or measured."""

from __future__ import annotations

import argparse
import time
from typing import Any

from evals.speed import bench
from evals.speed.arms import on_cpu
from evals.speed.roofline import Ceilings

_SIDE = 1024  # of the matrices of a product


def ceilings(args: argparse.Namespace) -> tuple[Ceilings | None, dict[str, Any]]:
    """As `evals.speed.bench.ceilings`; what is left open on a CPU is measured."""
    is_cpu = on_cpu(args.device)
    given = argparse.Namespace(
        device=args.device,
        bandwidth=args.bandwidth,
        flops=args.flops,
        measure_bandwidth=is_cpu and args.bandwidth is None,
        bandwidth_bytes=None,
    )
    if is_cpu and args.flops is None:
        given.flops = measured_flops() / 1e12
    return bench.ceilings(given)


def measured_flops(samples: int = 5) -> float:
    """Floating-point operations a second of a float32 matrix product on this CPU, best of
    `samples`."""
    import torch

    a, b = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
    best = float("inf")
    for _ in range(samples + 1):
        begin = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - begin)
    return 2 * _SIDE**3 / best
