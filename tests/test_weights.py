"""core/weights.py and core/loading.py: checkpoints, hub ids, random weights, and every refusal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import UserError
from core.facts import facts_from_config
from core.loading import RANDOM_SHAPES, LoadedModel, load_model
from core.testing.tiny import KINDS, save_tiny, save_tokenizer
from core.weights import allocate, checkpoint_views

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def load(model: str | Path, dtype: torch.dtype = torch.float32, **options: Any) -> LoadedModel:
    options = {"seed": 0, "progress": lambda done, total: None} | options
    return load_model(str(model), dtype=dtype, device="cpu", **options)


def refusal(model: str | Path) -> str:
    """The one sentence that loading `model` raises."""
    with pytest.raises(UserError) as caught:
        load(model)
    sentence = str(caught.value)
    assert "\n" not in sentence and ";" in sentence
    return sentence


def tensors(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return checkpoint_views(loaded.facts, loaded.weights)


def same(a: LoadedModel, b: LoadedModel) -> bool:
    return all(
        torch.equal(x, y) for x, y in zip(*(tensors(m).values() for m in (a, b)), strict=True)
    )


def edit_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    content = load_file(path)
    change(content)
    save_file(content, path, metadata={"format": "pt"})


@pytest.fixture
def qwen2(tmp_path: Path) -> Path:
    return save_tiny("qwen2", tmp_path / "qwen2")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = save_tiny("llama", tmp_path / "sharded", max_shard_size="200KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    return path


# ------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_of_a_checkpoint_lands_in_its_place(kind: str, tmp_path: Path) -> None:
    save_tiny(kind, tmp_path)
    stored, loaded = load_file(tmp_path / SINGLE), load(tmp_path)
    views = tensors(loaded)
    assert set(views) == set(stored)
    for name, view in views.items():
        assert torch.equal(view, stored[name]), name


def test_packed_projections_are_one_storage_in_order(qwen2: Path) -> None:
    stored, loaded = load_file(qwen2 / SINGLE), load(qwen2)
    layer, at = loaded.weights.layers[1], "model.layers.1."
    names = [f"{at}self_attn.{part}_proj" for part in "qkv"]
    assert torch.equal(layer.qkv, torch.cat([stored[f"{name}.weight"] for name in names]))
    assert layer.qkv_bias is not None
    assert torch.equal(layer.qkv_bias, torch.cat([stored[f"{name}.bias"] for name in names]))
    names = [f"{at}mlp.{part}_proj.weight" for part in ("gate", "up")]
    assert torch.equal(layer.gate_up, torch.cat([stored[name] for name in names]))
    assert layer.qkv.is_contiguous() and layer.gate_up.is_contiguous()
    views = tensors(loaded)
    assert views[names[1]].untyped_storage().data_ptr() == layer.gate_up.data_ptr()


def test_tied_embeddings_are_one_tensor_and_untied_ones_two(qwen2: Path, sharded: Path) -> None:
    tied, untied = load(qwen2).weights, load(sharded).weights
    assert tied.lm_head is tied.embed
    assert untied.lm_head is not untied.embed and not torch.equal(untied.lm_head, untied.embed)


def test_shards_hold_the_same_model_as_one_file(sharded: Path, tmp_path: Path) -> None:
    assert same(load(sharded), load(save_tiny("llama", tmp_path / "whole")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_converted_as_torch_converts(dtype: torch.dtype, qwen2: Path) -> None:
    stored, loaded = load_file(qwen2 / SINGLE), load(qwen2, dtype)
    assert loaded.facts.dtype == dtype
    for name, view in tensors(loaded).items():
        assert view.dtype == dtype and torch.equal(view, stored[name].to(dtype)), name


def test_a_bfloat16_checkpoint_is_read_exactly(qwen2: Path) -> None:
    def narrow(content: dict[str, torch.Tensor]) -> None:
        content.update({name: tensor.bfloat16() for name, tensor in content.items()})

    edit_tensors(qwen2 / SINGLE, narrow)
    stored, loaded = load_file(qwen2 / SINGLE), load(qwen2)
    for name, view in tensors(loaded).items():
        assert view.dtype == torch.float32 and torch.equal(view, stored[name].float()), name


def test_progress_counts_every_byte_once(sharded: Path) -> None:
    calls: list[tuple[int, int]] = []
    loaded = load(sharded, progress=lambda done, total: calls.append((done, total)))
    total = sum(view.nbytes for view in tensors(loaded).values())
    assert len(calls) == len(tensors(loaded)) and {call[1] for call in calls} == {total}
    assert [call[0] for call in calls] == sorted({call[0] for call in calls})
    assert calls[-1][0] == total


def test_name_notes_and_eos(qwen2: Path) -> None:
    loaded = load(qwen2)
    assert loaded.name == "qwen2" and loaded.facts.eos_token_ids == ()
    assert len(loaded.notes) == 1 and "token ids" in loaded.notes[0]
    save_tokenizer(qwen2)
    (qwen2 / "generation_config.json").write_text('{"eos_token_id": [0, 9]}')
    edit_json(qwen2 / "config.json", auto_map={"AutoModel": "modeling.Evil"}, eos_token_id=3)
    (qwen2 / "modeling.py").write_text("raise SystemExit('remote code was run')")
    loaded = load(qwen2)
    assert loaded.facts.eos_token_ids == (0, 9)
    assert len(loaded.notes) == 1 and "auto_map" in loaded.notes[0]


def test_ignored_extras(qwen2: Path) -> None:
    before = load(qwen2)

    def add(content: dict[str, torch.Tensor]) -> None:
        content["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        content["lm_head.weight"] = content["model.embed_tokens.weight"].clone()

    edit_tensors(qwen2 / SINGLE, add)
    assert same(before, load(qwen2))


# ----------------------------------------------------------------------------------- refusals


def test_an_lm_head_that_is_not_the_tied_embedding(qwen2: Path) -> None:
    edit_tensors(
        qwen2 / SINGLE,
        lambda content: content.update(
            {"lm_head.weight": content["model.embed_tokens.weight"] + 1}
        ),
    )
    sentence = refusal(qwen2)
    assert f"lm_head.weight of {qwen2} differs" in sentence and "tie_word_embeddings" in sentence


@pytest.mark.parametrize("left", [0.0, 1e-5, 0.01, 0.5, 0.999])
def test_a_truncated_file(left: float, qwen2: Path) -> None:
    path = qwen2 / SINGLE
    content = path.read_bytes()
    size = math.ceil(len(content) * left)
    path.write_bytes(content[:size])
    sentence = refusal(qwen2)
    assert str(path) in sentence and f"{size} bytes" in sentence and "truncated" in sentence


def test_a_file_that_is_no_safetensors(qwen2: Path) -> None:
    (qwen2 / SINGLE).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    assert SINGLE in refusal(qwen2)


def test_a_missing_tensor(qwen2: Path, sharded: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    edit_tensors(qwen2 / SINGLE, lambda content: content.pop(name))
    sentence = refusal(qwen2)
    assert f"{qwen2} lacks {name}," in sentence
    # More layers asked for than are there: how many tensors is told.
    edit_json(sharded / "config.json", num_hidden_layers=3)
    sentence = refusal(sharded)
    assert f"{sharded} lacks model.layers.2." in sentence and "(and 8 more)" in sentence


def test_a_missing_head_of_an_untied_model(qwen2: Path) -> None:
    edit_json(qwen2 / "config.json", tie_word_embeddings=False)
    assert "lacks lm_head.weight" in refusal(qwen2)


def test_a_wrong_shape(qwen2: Path) -> None:
    edit_json(qwen2 / "config.json", vocab_size=301)
    sentence = refusal(qwen2)
    assert "model.embed_tokens.weight is [300, 96]" in sentence and "[301, 96]" in sentence
    assert SINGLE in sentence


def test_superfluous_tensors(qwen2: Path) -> None:
    edit_tensors(
        qwen2 / SINGLE,
        lambda content: content.update({f"score.{i}": torch.ones(1) for i in range(3)}),
    )
    sentence = refusal(qwen2)
    assert f"{qwen2} holds score.0 (and 2 more)" in sentence


def test_a_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"{shard} (0 bytes) is missing" in refusal(sharded)
    assert "No such file" in refusal(sharded)


def test_a_truncated_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert str(shard) in refusal(sharded)


def test_a_shard_that_the_index_does_not_name_is_not_read(sharded: Path, tmp_path: Path) -> None:
    (sharded / "model-00007-of-00009.safetensors").write_text("of another download")
    assert same(load(sharded), load(save_tiny("llama", tmp_path / "whole")))


def test_an_index_that_lies(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    name, other = "model.norm.weight", set(index["weight_map"].values())
    shard = (other - {index["weight_map"][name]}).pop()
    index["weight_map"][name] = shard
    (sharded / INDEX).write_text(json.dumps(index))
    sentence = refusal(sharded)
    assert str(sharded / shard) in sentence and name in sentence


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}'])
def test_an_index_that_is_none(text: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(text)
    assert INDEX in refusal(sharded)


def test_pickles_are_never_read(qwen2: Path) -> None:
    (qwen2 / SINGLE).rename(qwen2 / "pytorch_model.bin")
    assert "pickles such as pytorch_model.bin" in refusal(qwen2)


def test_a_directory_without_weights_or_config(qwen2: Path) -> None:
    (qwen2 / SINGLE).unlink()
    assert SINGLE in refusal(qwen2) and INDEX in refusal(qwen2)
    (qwen2 / "config.json").write_text("{'a'")
    assert "config.json is no JSON object" in refusal(qwen2)
    (qwen2 / "config.json").write_text("[]")
    assert "config.json is no JSON object" in refusal(qwen2)
    (qwen2 / "config.json").unlink()
    assert "has no config.json" in refusal(qwen2)


def test_unsupported_models_are_refused_before_their_weights_are_read(qwen2: Path) -> None:
    (qwen2 / SINGLE).unlink()
    edit_json(qwen2 / "config.json", model_type="deepseek_v3", auto_map={"AutoModel": "m.M"})
    with pytest.raises(UserError, match="model_type is 'deepseek_v3'"):
        load(qwen2)


# ---------------------------------------------------------------------------------- hub, paths


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, without a network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_cached_hub_id_is_loaded_offline(hub: Path) -> None:
    repository, commit = hub / "models--org--tiny", "0" * 40
    save_tiny("qwen3", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    loaded = load("org/tiny")
    assert loaded.name == "org/tiny"
    assert same(loaded, load(repository / "snapshots" / commit))


def test_a_hub_id_that_is_not_cached(hub: Path) -> None:
    sentence = refusal("org/absent")
    assert "org/absent" in sentence and "HF_HUB_OFFLINE" in sentence and "cached" in sentence


def test_only_model_files_are_asked_for(monkeypatch: pytest.MonkeyPatch, qwen2: Path) -> None:
    from fnmatch import fnmatch

    import huggingface_hub

    asked: dict[str, Any] = {}

    def download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(qwen2)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load("org/model").name == "org/model"
    assert asked["repo_id"] == "org/model"

    def fetched(file: str) -> bool:
        return any(fnmatch(file, p) for p in asked["allow_patterns"]) and not any(
            fnmatch(file, p) for p in asked["ignore_patterns"]
        )

    for file in ("config.json", SINGLE, INDEX, "model-00001-of-00002.safetensors"):
        assert fetched(file), file
    for file in ("tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja"):
        assert fetched(file), file
    for file in ("pytorch_model.bin", "model.gguf", "modeling.py", "onnx/config.json"):
        assert not fetched(file), file
    assert not fetched("consolidated.safetensors") and not fetched("original/x.safetensors")


def test_a_hub_error_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(*_: Any, **__: Any) -> str:
        raise ConnectionResetError("reset\nby peer")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert "ConnectionResetError: reset by peer" in refusal("org/model")


@pytest.mark.parametrize(
    "path", ["/no/such/dir", "./absent/model", "../x", "a/b/c", "~/nope", "x/"]
)
def test_a_path_that_is_not_there(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(path).startswith(f"'{path}' is no directory, no hub id org/name and no random")


def test_a_file_is_no_model(qwen2: Path) -> None:
    assert f"'{qwen2 / SINGLE}' is no directory" in refusal(qwen2 / SINGLE)


def test_a_bare_word_gets_a_near_miss() -> None:
    assert "did you mean random:qwen3-0.6b" in refusal("Qwen3-0.6B")
    assert "give one of these: tiny, random:qwen3-0.6b, random:" in refusal("something-else")


# -------------------------------------------------------------------------------------- random


def test_random_weights_are_a_function_of_the_seed() -> None:
    one, two, other = (load("random:tiny", seed=seed) for seed in (7, 7, 8))
    assert same(one, two) and not same(one, other)
    assert len(one.notes) == 1 and "gibberish" in one.notes[0] and "7" in one.notes[0]
    assert one.name == "random:tiny" and one.facts.eos_token_ids == ()


def test_random_weights_have_the_promised_spread() -> None:
    loaded = load("random:tiny", torch.bfloat16)
    for name, view in tensors(loaded).items():
        assert view.dtype == torch.bfloat16
        mean, deviation = (1.0, 0.1) if name.endswith("norm.weight") else (0.0, 0.02)
        error = 5 * deviation / math.sqrt(view.numel())
        assert abs(view.float().mean() - mean) < error, name
        assert abs(view.float().std() - deviation) < error, name


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    load("random:tiny")
    assert torch.equal(torch.get_rng_state(), before)


def test_tiny_is_as_promised() -> None:
    facts = load("random:tiny").facts
    assert (facts.num_layers, facts.hidden_size, facts.head_dim) == (2, 64, 32)
    assert (facts.num_heads, facts.num_kv_heads, facts.max_position) == (4, 2, 4096)
    assert facts.vocab_size >= 260 and facts.qk_norm


@pytest.mark.parametrize(
    ("shape", "num_parameters"),
    [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen2.5-0.5b", 494_032_768),
    ],
)
def test_published_shapes_have_the_published_sizes(shape: str, num_parameters: int) -> None:
    facts = facts_from_config(RANDOM_SHAPES[f"random:{shape}"], torch.bfloat16)
    views = checkpoint_views(facts, allocate(facts, "meta"))
    assert sum(view.numel() for view in views.values()) == num_parameters


def test_an_unknown_shape_gets_near_misses() -> None:
    sentence = refusal("random:qwen3-0.5b")
    assert "random:qwen3-0.6b" in sentence and "did you mean" in sentence
    assert "random:qwen3-0.6b" in refusal("random:0.6b")
