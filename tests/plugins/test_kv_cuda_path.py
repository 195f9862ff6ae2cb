"""The CUDA route of both offers without a GPU: kernels in Triton's interpreter.

The interpreter runs in a process of its own, because TRITON_INTERPRET must be set before triton is
imported. It is slow, so only the clauses about writing and reading are asked, and traces are short.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed here")

from core.batch import Limits  # noqa: E402
from core.testing.kv import KVManagerSuite  # noqa: E402
from core.testing.oracle import PageOracle  # noqa: E402
from core.testing.rig import Rig  # noqa: E402
from plugins.kv.contiguous import Contiguous  # noqa: E402
from plugins.kv.paged import Paged  # noqa: E402

ROOT = Path(__file__).parents[2]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
CLAUSES = [
    "test_write_then_read_is_dense_attention",
    "test_padding_touches_nothing",
]


@pytest.mark.skipif(INTERPRETING, reason="this is the process that the interpreter runs in")
def test_in_the_interpreter():
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV"))}
    env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    addopts = "addopts=--import-mode=importlib -rf"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-o",
        addopts,
        "-p",
        "no:cacheprovider",
        __file__,
    ]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-2000:]


def _route(offer):
    """`offer` on the CPU, by the route and with the scratch that it has on CUDA."""

    class Interpreted(offer):
        def bind(self, facts, limits, kv_cache_bytes, device):
            from plugins.kv.cuda_path import CudaPath

            super().bind(facts, limits, kv_cache_bytes, device)
            scratch = torch.zeros(
                2, limits.max_num_batched_tokens, facts.num_kv_heads, facts.head_dim
            )
            self.storage.fresh = scratch[0], scratch[1]
            self.path = CudaPath(facts, self.storage)

    return Interpreted


class TestTheRoute:
    __test__ = INTERPRETING

    @pytest.fixture(autouse=True)
    def _two_splits(self, monkeypatch):
        """Not the dozens that would fill a GPU: the interpreter runs programs one by one."""
        from plugins.kv.kernels import decode

        monkeypatch.setattr(decode, "choose_num_splits", lambda *_: 2)

    @pytest.mark.parametrize("clause", CLAUSES)
    @pytest.mark.parametrize("offer", [Paged, Contiguous], ids=lambda offer: offer.__name__)
    def test_clause(self, offer, clause):
        suite = type("S", (KVManagerSuite,), {"offer": _route(offer), "tolerance": 2e-5})
        getattr(suite(), clause)()

    def test_trace(self):
        kv = _route(Paged)(Paged.Config(block_size=5))
        rig = Rig(kv, num_tokens=35, limits=Limits(16, 3, 16))
        counts = PageOracle(rig, seed=14, num_requests=4, max_total=16).run()
        assert counts.num_finished == 4 and counts.num_mixed_steps and counts.num_cached_tokens
