"""Where a model comes from: the embedded one, a Hugging Face directory, a hub id, or a shape with
random weights."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from core.config import did_you_mean, json_object
from core.errors import UserError, explained
from core.facts import ModelFacts, facts_from_config
from core.inputs import read_text
from core.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from core.weights import ModelWeights, Progress, random_weights, read_weights

EMBEDDED = "tiny"  # what evals/tiny trained, part of this distribution
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# Sub-directories and consolidated files hold the weights again, in other formats.
_HUB_EXTRAS = ["*/*", "consolidated*.safetensors"]

# What matters here of the published config.json files; "tiny" is our own, and untied because a tied
# model this small repeats its last token for ever. They name no token that ends a sequence, because
# what random weights write has no end.
_FIELDS = """model_type hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim vocab_size max_position_embeddings tie_word_embeddings""".split()
_SHAPES = {
    "qwen3-0.6b": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 40960, True),
    "qwen3-1.7b": ("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, 40960, True),
    "qwen3-4b": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, 40960, True),
    "qwen3-8b": ("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 40960, False),
    "qwen2.5-0.5b": ("qwen2", 896, 4864, 24, 14, 2, 64, 151936, 32768, True),
    "tiny": ("qwen3", 64, 128, 2, 4, 2, 32, 320, 4096, False),
}
RANDOM_SHAPES: Mapping[str, Mapping[str, Any]] = {
    f"random:{name}": {"rope_theta": 1000000, **dict(zip(_FIELDS, shape, strict=True))}
    for name, shape in _SHAPES.items()
}


class LoadedModel(NamedTuple):
    """Facts, weights and tokenizer of a model; `notes` are sentences for whoever runs it."""

    facts: ModelFacts
    weights: ModelWeights
    tokenizer: Tokenizer
    name: str
    notes: list[str]


def load_model(
    model: str, *, dtype: torch.dtype, device: torch.device | str, seed: int, progress: Progress
) -> LoadedModel:
    """Load `model`: "tiny", a directory, a hub id `org/name`, or `random:NAME`, a published shape.

    Weights are converted to `dtype` on `device`. `seed` matters to random weights only.
    `progress(done, total)` counts bytes. HF_HUB_OFFLINE=1 keeps to what is cached. Pickles are
    never read and code of a model never run. Raises UserError for whatever is not there, not
    readable or not supported.
    """
    if model in RANDOM_SHAPES:
        facts = facts_from_config(RANDOM_SHAPES[model], dtype)
        note = f"{model} has random weights (seed {seed}) and byte tokens: it writes gibberish."
        weights = random_weights(facts, device, seed)
        return LoadedModel(facts, weights, ByteTokenizer(), model, [note])
    directory, name = _find(model)
    config, facts = _read_facts(directory, dtype)
    notes = []
    if config.get("auto_map"):
        notes.append(f"{name} names code in auto_map; it is not run, the built-in decoder is.")
    tokenizer = load_tokenizer(directory)
    if not tokenizer.has_text:
        notes.append(f"{name} has no tokenizer files: it takes token ids only and gives no text.")
    weights = read_weights(directory, facts, device, progress)
    return LoadedModel(facts, weights, tokenizer, name, notes)


def check_model(model: str) -> None:
    """Refuse what is no model, as far as can be told without its weights and without a network."""
    if model not in RANDOM_SHAPES and (Path(model).is_dir() or not _HUB_ID.fullmatch(model)):
        _read_facts(_find(model)[0], torch.float32)


def _read_facts(directory: Path, dtype: torch.dtype) -> tuple[dict[str, Any], ModelFacts]:
    """The config of a Hugging Face directory, and what it says."""
    config = _read_json(directory / "config.json")
    if not config:
        raise UserError(f"{directory} has no config.json; give a Hugging Face model's directory.")
    generation = _read_json(directory / "generation_config.json")
    return config, facts_from_config(config, dtype, generation)


def _find(model: str) -> tuple[Path, str]:
    """The directory of a model and the name to call it by; a hub id is downloaded if need be."""
    if model == EMBEDDED:
        return Path(str(importlib.resources.files("evals.tiny") / "model")), model
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory, directory.resolve().name
    if not _HUB_ID.fullmatch(model):
        hint = did_you_mean(model.lower(), [EMBEDDED, *RANDOM_SHAPES], "give one of these")
        what = f"{model!r} is no directory, no hub id org/name and no random weights"
        raise UserError(f"{what}{hint}")
    import huggingface_hub

    advice = "check the name and the connection, unset HF_HUB_OFFLINE, set HF_TOKEN where it is"
    advice += " gated or private, or give the directory of a copy."
    with explained(f"{model} is no directory, and cannot be had from the hub", advice):
        wanted: dict[str, Any] = {"allow_patterns": _HUB_FILES, "ignore_patterns": _HUB_EXTRAS}
        path = huggingface_hub.snapshot_download(model, **wanted)
    return Path(path), model


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no file."""
    text = read_text(str(path)) if path.is_file() else "{}"
    return json_object(text, str(path), "download it again.")
