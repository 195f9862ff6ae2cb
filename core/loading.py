"""Where a model comes from: a Hugging Face directory, a hub id, or a shape with random weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.config import did_you_mean
from core.errors import UserError, reason
from core.facts import ModelFacts, facts_from_config
from core.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from core.weights import ModelWeights, Progress, random_weights, read_weights

if TYPE_CHECKING:
    import torch

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# Sub-directories and consolidated files hold the weights again, in other formats.
_HUB_EXTRAS = ["*/*", "consolidated*.safetensors"]
_HUB_ADVICE = {
    "GatedRepoError": "accept its terms on the hub and set HF_TOKEN",
    "RepositoryNotFoundError": "check the name, or set HF_TOKEN if it is private",
    "LocalEntryNotFoundError": "unset HF_HUB_OFFLINE, check the connection",
}


def _shape(hidden: int, inner: int, layers: int, heads: int, **fields: Any) -> dict[str, Any]:
    """A config; what `fields` leave out is as in the small Qwen3 models."""
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
    } | fields


_QWEN2 = {"model_type": "qwen2", "max_position_embeddings": 32768}
# Untied: a tied model this small repeats its last token for ever.
_TINY = {"vocab_size": 320, "max_position_embeddings": 4096, "tie_word_embeddings": False}
# What matters here of the published config.json files; "tiny" is our own. They name no token that
# ends a sequence, because what random weights write has no end.
RANDOM_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "random:qwen3-0.6b": _shape(1024, 3072, 28, 16),
    "random:qwen3-1.7b": _shape(2048, 6144, 28, 16),
    "random:qwen3-4b": _shape(2560, 9728, 36, 32),
    "random:qwen3-8b": _shape(4096, 12288, 36, 32, tie_word_embeddings=False),
    "random:qwen2.5-0.5b": _shape(896, 4864, 24, 14, num_key_value_heads=2, head_dim=64, **_QWEN2),
    "random:tiny": _shape(64, 128, 2, 4, num_key_value_heads=2, head_dim=32, **_TINY),
}


@dataclass(frozen=True)
class LoadedModel:
    """Facts, weights and tokenizer of a model; `notes` are sentences for whoever runs it."""

    facts: ModelFacts
    weights: ModelWeights
    tokenizer: Tokenizer
    name: str
    notes: list[str]


def load_model(
    model: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load `model`: a directory, a hub id `org/name`, or `random:NAME` of a published shape.

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
    config = _read_json(directory / "config.json")
    if not config:
        raise UserError(f"{directory} has no config.json; give a Hugging Face model's directory.")
    facts = facts_from_config(config, dtype, _read_json(directory / "generation_config.json"))
    notes = []
    if config.get("auto_map"):
        notes.append(f"{name} names code in auto_map; it is not run, the built-in decoder is.")
    tokenizer = load_tokenizer(directory, facts.eos_token_ids)
    if not tokenizer.has_text:
        notes.append(f"{name} has no tokenizer files: it takes token ids only and gives no text.")
    weights = read_weights(directory, facts, device, progress)
    return LoadedModel(facts, weights, tokenizer, name, notes)


def _find(model: str) -> tuple[Path, str]:
    """The directory of a model and the name to call it by; a hub id is downloaded if need be."""
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory, directory.resolve().name
    if not _HUB_ID.fullmatch(model):
        raise UserError(
            f"{model!r} is no directory, no hub id org/name and no random weights"
            f"{did_you_mean(model.lower(), RANDOM_SHAPES, 'give one of these')}"
        )
    import huggingface_hub

    try:
        path = huggingface_hub.snapshot_download(
            model, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_EXTRAS
        )
    except Exception as error:  # the client's HTTP library differs from version to version
        advice = _HUB_ADVICE.get(type(error).__name__, "try again")
        raise UserError(
            f"{model} is no directory, and cannot be had from the hub ({reason(error)[:200]}); "
            f"{advice}, or give the directory of a copy."
        ) from error
    return Path(path), model


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        return {**json.loads(path.read_text(encoding="utf-8"))}
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} holds no JSON object ({error}); download it again.") from error
