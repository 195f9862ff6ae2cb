"""core/facts.py: what a config.json says, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import UserError
from core.facts import ModelFacts, facts_from_config
from core.testing.tiny import KINDS, save_tiny

BASE: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}
YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 128}


def facts(**fields: Any) -> ModelFacts:
    config = {name: value for name, value in (BASE | fields).items() if value != "absent"}
    return facts_from_config(config, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_facts_of_a_saved_checkpoint_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    save_tiny(kind, tmp_path)
    ours = facts_from_config(json.loads((tmp_path / "config.json").read_text()), torch.bfloat16)
    theirs = AutoConfig.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(theirs)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == attention.head_dim
    assert ours.softmax_scale == attention.scaling
    assert ours.vocab_size == theirs.vocab_size
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope_scaling.get("rope_type", "default") == theirs.rope_parameters["rope_type"]
    assert ours.qkv_bias == (attention.q_proj.bias is not None)
    assert attention.o_proj.bias is mlp.down_proj.bias is None
    assert ours.qk_norm == hasattr(attention, "q_norm")
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.dtype == torch.bfloat16
    assert ours.kv_bytes_per_token == 4 * ours.num_layers * ours.num_kv_heads * ours.head_dim


def test_heads_default_as_in_transformers() -> None:
    assert facts(num_key_value_heads="absent").num_kv_heads == 6
    assert facts(num_key_value_heads=None).num_kv_heads == 6
    assert facts(head_dim=None).head_dim == 16
    assert facts(head_dim=32).qkv_sizes == (192, 64, 64)
    assert facts(model_type="qwen3").head_dim == 128


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 5e5}}),
        (
            {"rope_theta": 5e5, "rope_scaling": YARN | {"type": "yarn"}},
            {"rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 5e5}},
        ),
        (
            {"rope_scaling": YARN | {"rope_type": "yarn", "beta_fast": 16, "truncate": False}},
            {
                "rope_parameters": YARN
                | {"rope_type": "yarn", "rope_theta": 1e4, "beta_fast": 16, "truncate": False}
            },
        ),
    ],
)
def test_both_spellings_of_rope_say_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert facts(**old) == facts(**new)
    assert facts(**old).rope_theta == old.get("rope_theta", 10000.0)


def test_yarn_lengthens_the_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert facts(rope_scaling=scaling).max_position == 2048
    assert facts(rope_scaling=scaling, max_position_embeddings=2048).max_position == 2048
    # Neither original length nor factor: the one is the context, the other the ratio.
    assert facts(rope_scaling={"type": "yarn", "factor": 2.0}).max_position == 1024
    ratio = facts(rope_scaling={"type": "yarn", "original_max_position_embeddings": 128})
    assert ratio.rope_scaling["factor"] == 4.0


def test_eos_ids_come_from_the_generation_config_first() -> None:
    def eos(config: object, generation: object = "absent") -> tuple[int, ...]:
        generated = None if generation == "absent" else {"eos_token_id": generation}
        fields = BASE | {"eos_token_id": config}
        return facts_from_config(fields, torch.float32, generated).eos_token_ids

    assert eos(None) == ()
    assert eos(7) == (7,)
    assert eos(0) == (0,)
    assert eos([7, 8]) == (7, 8)
    assert eos(7, [9, 7]) == (9, 7)
    assert eos(7, 9) == (9,)
    assert eos(7, None) == (7,)


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"model_type": "qwen3_moe"}, "model_type", "qwen3_moe"),
        ({"model_type": "gemma2"}, "model_type", "gemma2"),
        ({"model_type": "absent"}, "model_type", "None"),
        ({"model_type": "qwen2_5_vl", "vision_config": {}}, "model_type", "qwen2_5_vl"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config", "awq"),
        ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding_window", "64"),
        ({"use_sliding_window": True}, "sliding_window", "4096"),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            "sliding_window",
            "64",
        ),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window", "4096"),
        ({"model_type": "mistral"}, "sliding_window", "4096"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type", "llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type", "linear"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type", "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type", "longrope"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters",
            "full_attention",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "partial_rotary_factor",
            "0.25",
        ),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias", "True"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias", "True"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias", "True"),
        ({"num_key_value_heads": 4}, "num_key_value_heads", "4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads", "0"),
        ({"head_dim": "16"}, "head_dim", "'16'"),
        ({"hidden_size": "absent"}, "hidden_size", "None"),
        ({"vocab_size": 0}, "vocab_size", "0"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers", "many"),
    ],
)
def test_refusals_name_the_field_and_its_value(
    fields: dict[str, Any], name: str, value: str
) -> None:
    with pytest.raises(UserError) as refusal:
        facts(**fields)
    sentence = str(refusal.value)
    assert name in sentence and value in sentence
    assert sentence.endswith(".") and "\n" not in sentence


@pytest.mark.parametrize(
    "fields",
    [
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"] * 4},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "llama", "sliding_window": 64},
        {"partial_rotary_factor": 1.0},
        {"rope_scaling": {"rope_type": "default"}},
        {"quantization_config": None},
        {"model_type": "qwen2", "attention_bias": True},
        {"model_type": "llama", "mlp_bias": False},
        {"hidden_act": "silu"},
    ],
)
def test_what_has_no_effect_is_not_refused(fields: dict[str, Any]) -> None:
    assert facts(**fields).num_layers == 4
