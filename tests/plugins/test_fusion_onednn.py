"""`onednn` through the conformance suite, packed and not."""

from __future__ import annotations

import pytest
import torch

from core import Engine
from core.errors import UserError
from core.facts import facts_from_config
from core.loading import RANDOM_SHAPES
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
    tolerance = 8e-3  # two roundings


def facts(dtype: torch.dtype):
    return facts_from_config(RANDOM_SHAPES["random:tiny"], dtype)


def spans_that_apply(dtype: torch.dtype) -> set[str]:
    spans = OneDnnFusion().spans(facts(dtype), torch.device("cpu"))
    return {span.name for span in spans if span.when(1, facts(dtype), None)}


def test_float16_is_left_to_the_plain_nodes():
    assert spans_that_apply(torch.float16) == set()
    assert "gate_up" in spans_that_apply(torch.float32)


def test_packs_where_the_copy_fits_in_memory(monkeypatch):
    """Half of what is free: the rest of the run needs memory too."""

    def packs(num_free_bytes: int) -> bool:
        memory = type("Memory", (), {"available": num_free_bytes})
        monkeypatch.setattr("plugins.fusion.onednn.psutil.virtual_memory", lambda: memory)
        spans = OneDnnFusion().spans(facts(torch.float32), torch.device("cpu"))
        weight = torch.ones(32, 32)
        return spans[0].run.args[0](weight) is not weight

    with Engine(model="random:tiny", device="cpu") as engine:
        weights = engine._parts.model.weights
    layers = [w for one in weights.layers for w in (one.qkv, one.o, one.gate_up, one.down)]
    num_bytes = sum(w.nbytes for w in [*layers, weights.lm_head])
    assert packs(2 * num_bytes + 1) and not packs(2 * num_bytes)


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
