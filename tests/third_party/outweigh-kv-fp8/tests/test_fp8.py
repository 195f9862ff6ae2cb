"""`fp8` is held to the contract of its seam, and to gates of its own."""

from __future__ import annotations

import torch
from outweigh_kv_fp8 import encode

from core import Engine, SamplingParams
from core.testing.kv import KVManagerSuite


class TestFp8(KVManagerSuite):
    plugin = "fp8"


def test_a_value_is_off_by_a_sixteenth_of_itself_at_most() -> None:
    """Of normal numbers; below 2**-6 of the scale steps are even."""
    values = torch.rand(50, 2, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    codes, scales = encode(values)
    error = (codes.float() * scales[..., None] - values).abs()
    assert (error <= torch.maximum(values.abs() / 16, scales[..., None] * 2**-10)).all()
    assert error.max() > 1e-3  # it is lossy, as declared


def engine(kv: str) -> Engine:
    options = {"device": "cpu", "dtype": "bfloat16", "kv_cache_bytes": 1 << 25, "seed": 0}
    return Engine(model="tiny", kv=kv, max_model_len=512, max_num_seqs=4, **options)


def test_gate() -> None:
    """1.8 times the room of `paged` in the same bytes, and the text that it writes: everywhere."""
    room, tokens = {}, {}
    for kv in ("paged", "fp8"):
        with engine(kv) as running:
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            (output,) = running.generate(["The old lighthouse keeper"], params)
            room[kv], tokens[kv] = running.report()["kv_cache_tokens"], output.token_ids
    assert room["fp8"] >= 1.8 * room["paged"]
    assert tokens["fp8"] == tokens["paged"]
