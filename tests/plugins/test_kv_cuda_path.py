"""The CUDA route of all offers without a GPU: kernels in Triton's interpreter.

The interpreter runs in a process of its own, because TRITON_INTERPRET must be set before triton is
imported. It is slow, so only the clauses about writing and reading are asked, and traces are short.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is not installed here")

from core.batch import BatchShape, Limits  # noqa: E402
from core.testing import parity  # noqa: E402
from core.testing.dense import run_dense_step, worst_error  # noqa: E402
from core.testing.interpreter import HERE, INTERPRETING, run_in_the_interpreter  # noqa: E402
from core.testing.kv import KVManagerSuite  # noqa: E402
from core.testing.oracle import PageOracle  # noqa: E402
from core.testing.rig import Rig  # noqa: E402
from plugins.kv import cudnn  # noqa: E402
from plugins.kv.contiguous import Contiguous  # noqa: E402
from plugins.kv.paged import Paged  # noqa: E402
from plugins.kv.paged_int8 import PagedInt8  # noqa: E402

CLAUSES = [
    "test_write_then_read_is_dense_attention",
    "test_padding_touches_nothing",
]


@pytest.mark.skipif(INTERPRETING, reason=HERE)
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)


def _route(offer):
    """`offer` on the CPU, by the route and with the scratch that it has on CUDA."""

    class Interpreted(offer):
        def bind(self, facts, limits, kv_cache_bytes, device):
            from plugins.kv.cuda_path import CudaPath
            from plugins.kv.int8_cuda_path import Int8CudaPath

            super().bind(facts, limits, kv_cache_bytes, device)
            scratch = torch.zeros(
                2, limits.max_num_batched_tokens, facts.num_kv_heads, facts.head_dim
            )
            self.storage.fresh = scratch[0], scratch[1]
            if offer is Used:
                v = self.storage.v.transpose(-1, -2).contiguous()
                self.storage.v = v.transpose(-1, -2)
                self.path = Int8CudaPath(facts, self.storage)
            else:
                self.path = CudaPath(facts, self.storage)

    return Interpreted


class Used(PagedInt8):
    """Smoothed unevenly, over memory that somebody has used."""

    def bind(self, facts, limits, kv_cache_bytes, device):
        super().bind(facts, limits, kv_cache_bytes, device)
        s, generator = self.storage, torch.Generator().manual_seed(1)
        for stale, value in ((s.k, 100), (s.v, -100), (s.k_scale, 10), (s.v_scale, torch.nan)):
            stale.fill_(value)
        pairs = torch.rand(*s.k_factor.shape[:2], facts.head_dim // 2, generator=generator)
        s.k_factor.copy_(torch.cat((pairs, pairs), -1) * 0.7 + 0.3)
        s.k_shift.copy_(torch.rand(s.k_shift.shape, generator=generator) - 0.5)


EXACT = parity.ATTENTION[torch.float32]
TOLERANCE = {Paged: EXACT, Contiguous: EXACT, Used: 0.02}  # what `Used` declares


class TestTheRoute:
    __test__ = INTERPRETING

    @pytest.fixture(autouse=True)
    def _two_splits(self, monkeypatch):
        """Not the dozens that would fill a GPU: the interpreter runs programs one by one."""
        from plugins.kv.kernels import decode, decode_int8

        for module in (decode, decode_int8):
            monkeypatch.setattr(module, "choose_num_splits", lambda *_, **__: 2)

    @pytest.mark.parametrize("clause", CLAUSES)
    @pytest.mark.parametrize("offer", list(TOLERANCE), ids=lambda offer: offer.__name__)
    def test_clause(self, offer, clause):
        suite = {"offer": _route(offer), "tolerance": TOLERANCE[offer]}
        getattr(type("S", (KVManagerSuite,), suite)(), clause)()

    @pytest.mark.parametrize("offer", [Paged, Used], ids=lambda offer: offer.__name__)
    def test_trace(self, offer):
        kv = _route(offer)(offer.Config(block_size=5))
        rig = Rig(kv, num_tokens=35, limits=Limits(16, 3, 16))
        counts = PageOracle(rig, seed=14, num_requests=4, max_total=16).run()
        assert counts.num_finished == 4 and counts.num_mixed_steps and counts.num_cached_tokens

    @pytest.mark.parametrize("offer", list(TOLERANCE), ids=lambda offer: offer.__name__)
    def test_whole_chunks_behind_a_prefix(self, offer, monkeypatch):
        """Plain torch stands for cuDNN, and 8 tokens are whole. INT8 stays on its kernel."""
        seen = []

        def attention(q_THD, k_SKD, v_SKD, *, is_causal, scale):
            seen.append((len(q_THD), len(k_SKD), is_causal))
            k, v = (x.repeat_interleave(q_THD.shape[1] // x.shape[1], 1) for x in (k_SKD, v_SKD))
            scores = torch.einsum("thd,shd->hts", q_THD, k) * scale
            if is_causal:
                scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
            return torch.einsum("hts,shd->thd", scores.softmax(-1), v), scores.logsumexp(-1)

        monkeypatch.setattr(cudnn, "CHUNK", 8)
        monkeypatch.setattr(cudnn, "attention", attention)
        config = offer.Config() if offer is Contiguous else offer.Config(block_size=5)
        kv = _route(offer)(config)
        rig = Rig(kv, num_tokens=300, limits=Limits(64, 3, 16))
        if offer is not Used:
            scratch = torch.full((2, 32, rig.facts.num_kv_heads, rig.facts.head_dim), torch.nan)
            kv.storage.prefix = scratch[0], scratch[1]
        first, seq = rig.sequence([3] * 7), rig.sequence(list(range(45)))
        for one in (first, seq):
            rig.admit(one)
        run_dense_step(rig, [], [(first, 7)])
        for n in (8, 16, 8, 5, 8):  # at 0, 8, 24, 32 and 37
            lo = seq.num_computed
            out = run_dense_step(rig, [], [(seq, n)])
            assert worst_error(rig, seq, lo, out) <= TOLERANCE[offer]
        parts = [(16, 8, False), (16, 16, True)] * 2 + [(8, 24, False), (8, 8, True)] * 2
        assert seen == ([] if offer is Used else parts)

    def test_steps_without_a_tile_plan_none(self):
        kv = _route(Paged)(Paged.Config())
        rig = Rig(kv, num_tokens=6000, limits=Limits(4096, 2, 1024))
        seq = rig.sequence([5] * 3000)
        rig.admit(seq)
        seq.num_computed = 1024
        host = rig.begin([], [(seq, 1024)]).batch.host
        scratch = torch.zeros(2, 1, 2, 32)
        planned = {}
        for prefix in (None, (scratch[0], scratch[1])):
            kv.storage.prefix = prefix
            for start in (0, 1000, 1024, None):
                tiles = np.full(kv.path.metadata(rig.limits)["tiles"][0], 77, np.int32)
                shape = BatchShape(1024, 1, 1024, 2048, start)
                kv.path.plan(host._replace(shape=shape), {"tiles": tiles})
                planned[prefix is not None, start] = bool((tiles != 77).any())
        assert [key for key, is_planned in planned.items() if not is_planned] == [
            (False, 0), (True, 0), (True, 1024)
        ]  # fmt: skip

    @pytest.mark.parametrize("block_size", [5, 16])
    def test_int8_stores_and_reads_what_plain_torch_does(self, block_size):
        """Codes and scales bit for bit; fresh prompts, chunks and decodes up to rounding."""
        made = []
        for offer in (Used, _route(Used)):
            kv = offer(Used.Config(block_size=block_size))
            rig = Rig(kv, num_tokens=200, limits=Limits(96, 3, 64))
            short, long = rig.sequence([7] * 18), rig.sequence([9] * 60)
            for seq in (short, long):
                rig.admit(seq)
            out = run_dense_step(rig, [], [(short, 18)])  # fresh
            rig.append(short, 3)
            out += run_dense_step(rig, [short], [(long, 40)])
            rig.append(short, 4)
            out += run_dense_step(rig, [short], [(long, 20)])
            for seq in (short, long):
                rig.append(seq, 5)
            out += run_dense_step(rig, [short, long])
            gathered = [kv.gather(seq.slot, 1, 0, seq.num_computed) for seq in (short, long)]
            planes = [plane[:, 1:] for plane in kv.storage.planes()]  # not the trash block
            made.append((out, [x for one in gathered for x in one], planes))
        plain, kernels = made
        for expected, got in zip(plain[0], kernels[0], strict=True):
            assert np.abs(got - expected).max() <= 1e-4
        for expected, got in zip(plain[1] + plain[2], kernels[1] + kernels[2], strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
