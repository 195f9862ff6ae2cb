"""`onednn` through the conformance suite, packed and not."""

from __future__ import annotations

import pytest
import torch

from core import Engine
from core.errors import UserError
from core.facts import facts_from_config
from core.loading import RANDOM_SHAPES
from core.testing import parity
from core.testing.fusion import FusionSuite
from plugins.fusion.onednn import OneDnnFusion


class TestPacked(FusionSuite):
    plugin = "onednn"
    config = {"pack": True}


class TestUnpacked(FusionSuite):
    plugin = "onednn"
    config = {"pack": False}


class TestBfloat16(FusionSuite):
    plugin = "onednn"
    dtype = torch.bfloat16
    tolerance = parity.PRODUCT[torch.bfloat16]


def facts(dtype: torch.dtype):
    return facts_from_config(RANDOM_SHAPES["random:tiny"], dtype)


def spans_that_apply(dtype: torch.dtype) -> set[str]:
    spans = OneDnnFusion().spans(facts(dtype), torch.device("cpu"))
    return {span.name for span in spans if span.when(1, facts(dtype), None)}


def test_float16_is_left_to_the_plain_nodes():
    assert spans_that_apply(torch.float16) == set()
    assert "gate_up" in spans_that_apply(torch.float32)


def test_a_copy_that_memory_does_not_hold_is_refused(monkeypatch):
    """2 layers of 64: qkv 256, o 128, gate and up 256, down 128 wide; and a head of 320."""
    num_bytes = 4 * (2 * 64 * (256 + 128 + 256 + 128) + 320 * 64)
    memory = type("Memory", (), {"available": num_bytes - 1})
    monkeypatch.setattr("plugins.fusion.onednn.psutil.virtual_memory", lambda: memory)
    given = {"model": "random:tiny", "device": "cpu", "kv_cache_bytes": "1MiB"}
    given |= {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 64}
    with pytest.raises(UserError, match="0.0 GiB are free: give --set fusion.pack=false"):
        Engine(**given)
    with Engine(**given, settings={"fusion.pack": False}) as engine:
        assert engine.generate(["Hello"])[0].token_ids
    memory.available = num_bytes
    with Engine(**given) as engine:
        assert engine.generate(["Hello"])[0].token_ids


def test_float16_is_refused_by_name_and_auto_goes_round_it():
    with pytest.raises(UserError, match="no products in float16: choose --fusion none"):
        Engine(model="random:tiny", device="cpu", dtype="float16", fusion="onednn")
    with Engine(model="random:tiny", device="cpu", dtype="float16") as engine:
        assert engine.config.fusion == "none"


def test_refuses_a_gpu():
    with pytest.raises(UserError, match="this device is cuda .*: choose --fusion none"):
        OneDnnFusion().spans(facts(torch.float32), torch.device("cuda"))


def test_engines_of_one_instance_keep_their_own_weights():
    """Two models, one after the other in the same memory: the second reads its own weights."""
    fusion = OneDnnFusion()
    texts = []
    for seed in (0, 1, 0):
        with Engine(model="random:tiny", device="cpu", seed=seed, fusion=fusion) as engine:
            texts.append(engine.generate(["Hello"])[0].token_ids)
    assert texts[0] == texts[2] != texts[1]
