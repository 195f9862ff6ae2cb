"""core/model.py and core/rope.py: the plain nodes compute what transformers computes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core.facts import ModelFacts
from core.loading import LoadedModel, load_model
from core.model import EMBED, FINAL_NORM, LAYER, LM_HEAD, Node, Site, rms_norm, rotate
from core.rope import rope_tables
from core.testing.parity import FLOAT32_LOGITS
from core.testing.tiny import KINDS, VOCAB_SIZE, reference_generate, reference_logits, save_tiny


class OneSequence:
    """Keys and values of one sequence, kept as they come; causal attention over all of them."""

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, k: Tensor, v: Tensor, batch: Any) -> None:
        if layer in self.stored:
            old_k, old_v = self.stored[layer]
            k, v = torch.cat((old_k, k)), torch.cat((old_v, v))
        self.stored[layer] = k, v

    def attend(self, layer: int, q: Tensor, batch: Any) -> Tensor:
        k, v = self.stored[layer]
        visible = batch.positions[:, None] >= torch.arange(len(k))
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1),
            k.transpose(0, 1),
            v.transpose(0, 1),
            attn_mask=visible,
            scale=self.facts.softmax_scale,
            enable_gqa=True,
        )
        return out.transpose(0, 1).flatten(1)


class PlainDecoder:
    """The chain of plain nodes, one after the other."""

    def __init__(self, model: LoadedModel, max_model_len: int = 256) -> None:
        self.facts, self.kv = model.facts, OneSequence(model.facts)
        cos, sin = rope_tables(model.facts, max_model_len, "cpu")

        def site(layer: int) -> Site:
            block = model.weights.layers[layer] if layer >= 0 else None
            kv: Any = self.kv
            return Site(layer, model.facts, model.weights, block, cos, sin, kv, None)

        self.chain: list[tuple[Node, Site]] = [(EMBED, site(-1))]
        for layer in range(model.facts.num_layers):
            self.chain += [(node, site(layer)) for node in LAYER]
        self.chain += [(FINAL_NORM, site(-1)), (LM_HEAD, site(-1))]

    @torch.no_grad()
    def logits(self, ids: list[int], start: int = 0, fed_back: int = 0) -> Tensor:
        """Logits after each of `ids`, which stand at `start`; an id of -1 is `fed_back`."""
        num_tokens = len(ids)
        batch = SimpleNamespace(
            token_ids=torch.tensor(ids, dtype=torch.int32),
            positions=torch.arange(start, start + num_tokens, dtype=torch.int32),
            token_slots=torch.zeros(num_tokens, dtype=torch.int32),
            last_token=torch.tensor([fed_back], dtype=torch.int32),
            logit_rows=torch.arange(num_tokens, dtype=torch.int32),
            logits=None,
        )
        live: dict[str, Tensor] = {}
        for node, site in self.chain:
            out = node.run(site, batch, *[live[name] for name in node.reads])
            live.update(zip(node.writes, out, strict=True))
        return live["logits"]


def prompt(num_tokens: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


def load(path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(str(path), dtype=dtype, device="cpu", seed=0, progress=lambda *_: None)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path)
    # 100 tokens: beyond the original 64 of the YaRN model.
    ids = prompt(100)
    ours, theirs = PlainDecoder(load(tmp_path)).logits(ids), reference_logits(tmp_path, ids)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=0, atol=FLOAT32_LOGITS)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"tie_word_embeddings": False}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"num_key_value_heads": 6}),
        ("qwen3", {"num_key_value_heads": 1}),
    ],
)
def test_variants_of_a_kind_too(kind: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    save_tiny(kind, tmp_path, seed=3, **overrides)
    ids = prompt(40)
    ours, theirs = PlainDecoder(load(tmp_path)).logits(ids), reference_logits(tmp_path, ids)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=FLOAT32_LOGITS)


@pytest.mark.parametrize("kind", ["qwen2", "qwen2.5-yarn", "qwen3", "llama"])
def test_greedy_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path)
    ids = prompt(50)
    decoder, ours = PlainDecoder(load(tmp_path)), []
    last = int(decoder.logits(ids)[-1].argmax())
    for position in range(len(ids), len(ids) + 24):
        ours.append(last)
        # The id is fed back on the device, as the engine does it.
        last = int(decoder.logits([-1], position, fed_back=last)[-1].argmax())
    assert ours == reference_generate(tmp_path, ids, 24)
    assert len(set(ours)) > 8, "the fixture has collapsed into a loop"


@pytest.mark.parametrize("kind", ["qwen2", "qwen2.5-yarn", "qwen3", "llama"])
def test_bfloat16_errs_no_more_than_transformers(kind: str, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path)
    ids = prompt(100)
    exact = reference_logits(tmp_path, ids)
    theirs = (reference_logits(tmp_path, ids, torch.bfloat16).float() - exact).abs().mean()
    ours = PlainDecoder(load(tmp_path, torch.bfloat16)).logits(ids)
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - exact).abs().mean() <= 1.2 * theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nodes_round_where_transformers_rounds(dtype: torch.dtype) -> None:
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, 32, generator=generator).to(dtype)
    norm = qwen3.Qwen3RMSNorm(32, eps=1e-6).to(dtype)
    torch.nn.init.normal_(norm.weight, 1.0, 0.3, generator=generator)
    assert torch.equal(rms_norm(x, norm.weight, 1e-6), norm(x))

    angles = torch.randn(7, 16, generator=generator)
    full = torch.cat((angles, angles), -1)
    cos, sin = full.cos().to(dtype), full.sin().to(dtype)
    y = x[:, :1] * 2
    theirs = qwen3.apply_rotary_pos_emb(x, y, cos, sin, unsqueeze_dim=1)
    ours = rotate(angles.cos(), angles.sin(), x, y)
    assert all(map(torch.equal, ours, theirs))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        YARN,
        YARN | {"rope_theta": 1e6, "factor": 40.0, "original_max_position_embeddings": 4096},
        YARN | {"attention_factor": 0.7},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
        YARN | {"truncate": False, "beta_fast": 8, "beta_slow": 2},
        YARN | {"factor": 1.0},
        YARN | {"beta_fast": 1, "beta_slow": 1},
    ],
    ids=str,
)
def test_rope_tables_are_those_of_transformers_bit_for_bit(rope: dict[str, Any]) -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    from core.facts import facts_from_config

    config = Qwen3Config(
        head_dim=64, max_position_embeddings=256, rope_parameters={"rope_theta": 1e4} | rope
    )
    positions = torch.arange(1000)[None]
    theirs = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions)
    ours = rope_tables(facts_from_config(config.to_dict(), torch.float32), 1000, "cpu")
    for table, reference in zip(ours, theirs, strict=True):
        assert table.shape == (1000, 32) and table.dtype == torch.float32
        assert torch.equal(torch.cat((table, table), -1), reference[0])
