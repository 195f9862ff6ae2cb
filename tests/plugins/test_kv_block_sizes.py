"""Block sizes beside those of the suites: kernels are compiled for each.

The clauses that reach the device, and a trace of the page oracle in a pool that is scarce.
"""

from __future__ import annotations

import pytest
import torch

from core.testing.kv import MAX_LEN, KVManagerSuite
from core.testing.kv_gpu import KVManagerGpuSuite
from core.testing.oracle import PageOracle
from plugins.kv.paged import Paged
from plugins.kv.paged_int8 import PagedInt8

GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)
CASES = [(Paged, 8), (Paged, 32), (Paged, 64)]
CASES += [(PagedInt8, 5), (PagedInt8, 8), (PagedInt8, 32), (PagedInt8, 64)]
INT8_TOLERANCE = {"cpu": 0.012, "cuda": 0.025}  # as test_kv_paged_int8.py has them


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize(("offer", "block_size"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_block_size(offer, block_size, device):
    base = KVManagerGpuSuite if device == "cuda" else KVManagerSuite
    members = {"offer": offer, "config": {"block_size": block_size}}
    if offer is PagedInt8:
        members["tolerance"] = INT8_TOLERANCE[device]
    suite = type("Suite", (base,), members)()
    assert suite.rig().kv.block_size == block_size
    suite.test_write_then_read_is_dense_attention()
    suite.test_chunks_do_not_show()
    suite.test_padding_touches_nothing()
    if device == "cuda":
        suite.test_replay_equals_eager(1)
    oracle = PageOracle(suite.rig(2 * MAX_LEN), seed=1, num_requests=8, max_total=MAX_LEN - 10)
    counts = oracle.run()
    assert counts.num_finished == 8 and counts.num_mixed_steps and counts.num_preemptions
