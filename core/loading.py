"""Where a model comes from: a Hugging Face directory, a hub id, or a shape with random weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import UserError
from core.facts import ModelFacts, facts_from_config
from core.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from core.weights import ModelWeights, Progress, random_weights, read_weights

if TYPE_CHECKING:
    import torch

_RANDOM = "random:"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


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


# What matters here of the published config.json files; "tiny" is our own. They name no token that
# ends a sequence, because what random weights write has no end.
RANDOM_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": _shape(1024, 3072, 28, 16),
    "qwen3-1.7b": _shape(2048, 6144, 28, 16),
    "qwen3-4b": _shape(2560, 9728, 36, 32),
    "qwen3-8b": _shape(4096, 12288, 36, 32, tie_word_embeddings=False),
    "qwen2.5-0.5b": _shape(
        896,
        4864,
        24,
        14,
        model_type="qwen2",
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32768,
    ),
    "tiny": _shape(
        64,
        128,
        2,
        4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=320,
        max_position_embeddings=4096,
        tie_word_embeddings=False,  # tied, a model this small repeats its last token for ever
    ),
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
    if model.startswith(_RANDOM):
        return _load_random(model, dtype, device, seed)
    directory = Path(model).expanduser()
    if directory.is_dir():
        return _load_directory(directory, directory.resolve().name, dtype, device, progress)
    if directory.exists():
        raise UserError(f"{model} is a file; give the directory of a Hugging Face model.")
    if not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise UserError(_not_found(model))
    return _load_directory(_download(model), model, dtype, device, progress)


def _load_random(
    model: str, dtype: torch.dtype, device: torch.device | str, seed: int
) -> LoadedModel:
    shape = model.removeprefix(_RANDOM)
    if shape not in RANDOM_SHAPES:
        raise UserError(
            f"{model!r} is not a known shape{_did_you_mean(shape)}; "
            f"choose one of {', '.join(_RANDOM + name for name in RANDOM_SHAPES)}."
        )
    facts = facts_from_config(RANDOM_SHAPES[shape], dtype)
    weights = random_weights(facts, device, seed)
    note = f"{model} has random weights (seed {seed}) and byte tokens: it writes gibberish."
    return LoadedModel(facts, weights, ByteTokenizer(facts.eos_token_ids), model, [note])


def _load_directory(
    directory: Path,
    name: str,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None,
) -> LoadedModel:
    config = _read_json(directory / "config.json")
    if config is None:
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


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None where there is no file."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); download it again.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object; download it again.")
    return content


def _did_you_mean(shape: str) -> str:
    close = get_close_matches(shape.lower(), RANDOM_SHAPES, n=2)
    return f" (did you mean {' or '.join(_RANDOM + name for name in close)}?)" if close else ""


def _not_found(model: str) -> str:
    if "/" in model or "\\" in model or model.startswith(("~", ".")):
        return f"No such directory: {model}; give a directory, a hub id org/name, or random:NAME."
    return (
        f"{model!r} is neither a directory nor a hub id org/name{_did_you_mean(model)}; "
        f"for random weights say random:NAME with one of {', '.join(RANDOM_SHAPES)}."
    )


def _download(model: str) -> Path:
    """The cached snapshot of a hub id, downloaded if need be."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        # Sub-directories and consolidated files hold the weights again, in other formats.
        return Path(
            snapshot_download(
                model,
                allow_patterns=list(_HUB_FILES),
                ignore_patterns=["*/*", "consolidated*.safetensors"],
            )
        )
    except GatedRepoError as error:
        reason, action = "is gated", "accept its terms on the hub and set HF_TOKEN"
        cause: Exception = error
    except RepositoryNotFoundError as error:
        reason, action = "is not on the hub or is private", "check the name, or set HF_TOKEN"
        cause = error
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            reason, action = "is not (wholly) cached and HF_HUB_OFFLINE is set", "unset it"
        else:
            reason, action = "is not cached and the hub cannot be reached", "check the connection"
        cause = error
    except Exception as error:  # the client's HTTP library differs from version to version
        detail = " ".join(str(error).split())[:200]
        reason, action = f"could not be downloaded ({type(error).__name__}: {detail})", "try again"
        cause = error
    raise UserError(
        f"{model} {reason} (nor is there such a directory); {action}, or give a copy's directory."
    ) from cause
