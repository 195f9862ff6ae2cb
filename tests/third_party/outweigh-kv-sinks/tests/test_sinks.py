"""`sinks`: the whole contract, where nothing is forgotten and where something is; and the paper's
own set of keys, spelled out.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from outweigh_kv_sinks import Sinks

from core import Engine, SamplingParams
from core.batch import Limits
from core.testing import codes
from core.testing.kv import MAX_LEN, KVManagerSuite
from core.testing.rig import Rig, tiny_facts

NUM_SINKS, WINDOW, BUDGET = 2, 8, 64
NUM_ROWS = NUM_SINKS + WINDOW + BUDGET


class TestSinks(KVManagerSuite):
    """The longest sequence of the suite fits the window."""

    plugin = "sinks"


class TestForgetfulSinks(KVManagerSuite):
    plugin = "sinks"
    config = {"num_sinks": NUM_SINKS, "window": WINDOW}
    limits = Limits(MAX_LEN, 4, BUDGET)
    bytes_per_token = tiny_facts().kv_bytes_per_token * NUM_ROWS / MAX_LEN


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_what_a_query_sees(chunk: int) -> None:
    """Uniform attention gives the mean of the values that are seen, however a prompt is cut."""
    config = Sinks.Config(num_sinks=NUM_SINKS, window=WINDOW)
    rig = Rig(Sinks(config), num_tokens=MAX_LEN, limits=Limits(MAX_LEN, 2, BUDGET))
    seq = rig.sequence([i % 50 for i in range(70)])
    rig.admit(seq)
    values = codes.signs(rig.hashes(seq), 1, codes.VALUE, rig.facts).repeat(2, 1)
    while seq.remaining:
        step = rig.begin([], [(seq, min(chunk, seq.remaining))])
        rig.write(step, codes.signs, 1)
        (row,) = step.rows
        q = torch.zeros(row.hi - row.lo, rig.facts.num_heads, rig.facts.head_dim)
        out = rig.attend(step, 1, q)
        for i, p in enumerate(range(row.lo, row.hi)):
            seen = [j for j in range(p + 1) if j < NUM_SINKS or j > p - WINDOW]
            np.testing.assert_allclose(out[i], values[seen].mean(0), atol=1e-6)
        rig.end(step)
    k, _, positions = rig.kv.gather(seq.slot, 1, 0, 70)
    assert positions.tolist() == [*range(NUM_SINKS), *range(70 - WINDOW, 70)]
    assert k.shape == (NUM_SINKS + WINDOW, rig.facts.num_kv_heads, rig.facts.head_dim)


def generate(prompt: str, **options: object) -> list[int]:
    with Engine(model="random:tiny", device="cpu", kv_cache_bytes=1 << 24, **options) as engine:
        (output,) = engine.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))
        return output.token_ids


def test_gate() -> None:
    """Within the window the tokens are those of the reference; beyond it they are its own."""
    narrow = {"kv": "sinks", "settings": {"kv.window": 64}, "max_num_batched_tokens": 64}
    assert generate("The sea", **narrow) == generate("The sea", kv="contiguous")
    long = "The sea, the sea, " * 20
    assert generate(long, **narrow) != generate(long, kv="contiguous")
