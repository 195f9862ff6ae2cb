"""The default `attend`: for a format with `write` and `gather` alone, and one that forgets."""

from __future__ import annotations

import numpy as np
import torch

from core.batch import Limits
from core.testing import codes
from core.testing.kv import KVManagerSuite
from core.testing.probes import compute
from core.testing.rig import Rig
from plugins.kv.by_gather import attend
from plugins.kv.contiguous import Contiguous


class WriteAndGather(Contiguous):
    """A row a slot, as nested tensors on the CPU: what a plugin's author writes first."""

    graph_safe = False

    def bind(self, facts, limits, kv_cache_bytes, device):
        super().bind(facts, limits, kv_cache_bytes, device)
        self.scale = facts.softmax_scale

    def attend(self, layer, q, batch):
        return attend(self, layer, q, batch, scale=self.scale)

    def sink(self, layer):
        return None


class Window(WriteAndGather):
    """Sees the first token and the last four, and returns them in no order."""

    lossless = False

    def gather(self, slot, layer, lo, hi):
        k, v, positions = super().gather(slot, layer, lo, hi)
        kept = [i for i in range(hi - lo) if lo + i == 0 or lo + i >= hi - 4][::-1]
        return k[kept], v[kept], positions[kept]


class TestWriteAndGather(KVManagerSuite):
    offer = WriteAndGather


def test_masks_by_position_whatever_gather_returns():
    rig = Rig(Window(Window.Config()), num_tokens=64, limits=Limits(32, 2, 32))
    seq = rig.sequence(list(range(12)))
    rig.admit(seq)
    step = rig.begin([], [(seq, 12)])
    rig.write(step, codes.signs, 0)
    out = rig.attend(step, 0, torch.zeros(12, rig.facts.num_heads, rig.facts.head_dim))
    values = codes.signs(rig.hashes(seq), 0, codes.VALUE, rig.facts).repeat(2, 1)
    for position in range(12):
        kept = [i for i in (0, 8, 9, 10, 11) if i <= position]
        np.testing.assert_allclose(out[position], values[kept].mean(0), atol=1e-6)


def test_padding_gives_zero():
    rig = Rig(WriteAndGather(WriteAndGather.Config()), num_tokens=64, limits=Limits(32, 2, 32))
    seq = rig.sequence([1, 2, 3])
    rig.admit(seq)
    compute(rig, seq)
    rig.append(seq, 4)
    step = rig.begin([seq], num_padding_tokens=1, num_padding_rows=1)
    rig.write(step, codes.signs, 0)
    q = torch.ones(2, rig.facts.num_heads, rig.facts.head_dim)
    out = rig.kv.attend(0, q, step.batch)
    assert out[0].any() and not out[1].any()
