"""Weights from safetensors files, or seeded random ones, as the tensors the decoder reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from core.errors import UserError, explained

if TYPE_CHECKING:
    from torch import Tensor

    from core.facts import ModelFacts

Progress = Callable[[int, int], None]  # bytes done, bytes in all

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEAD = "lm_head.weight"
_IGNORED = ("rotary_emb.inv_freq", _HEAD)  # where the decoder does not want them

# The modules of a checkpoint, below model.layers.N, whose weights each field of LayerWeights holds;
# the field with _bias holds their biases.
_MODULES = {
    "attn_norm": ["input_layernorm"],
    "q_norm": ["self_attn.q_norm"],
    "k_norm": ["self_attn.k_norm"],
    "o": ["self_attn.o_proj"],
    "mlp_norm": ["post_attention_layernorm"],
    "down": ["mlp.down_proj"],
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
}


@dataclass(frozen=True)
class LayerWeights:
    """One block. Linear weights are [out, in]; qkv and gate_up are packed, in that order."""

    attn_norm: Tensor
    qkv: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True)
class ModelWeights:
    """All tensors of a decoder; `lm_head` is `embed` itself where the embeddings are tied."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Tensor


def allocate(facts: ModelFacts, device: torch.device | str) -> ModelWeights:
    """Every tensor of the decoder in facts.dtype, not filled. On "meta" it costs nothing."""

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=facts.dtype, device=device)

    hidden, inner = facts.hidden_size, facts.intermediate_size
    q_size, qkv_size = facts.qkv_sizes[0], sum(facts.qkv_sizes)
    embed = new(facts.vocab_size, hidden)
    layers = [
        LayerWeights(
            attn_norm=new(hidden),
            qkv=new(qkv_size, hidden),
            o=new(hidden, q_size),
            mlp_norm=new(hidden),
            gate_up=new(2 * inner, hidden),
            down=new(hidden, inner),
            qkv_bias=new(qkv_size) if facts.qkv_bias else None,
            q_norm=new(facts.head_dim) if facts.qk_norm else None,
            k_norm=new(facts.head_dim) if facts.qk_norm else None,
        )
        for _ in range(facts.num_layers)
    ]
    lm_head = embed if facts.tied_embeddings else new(facts.vocab_size, hidden)
    return ModelWeights(embed, tuple(layers), new(hidden), lm_head)


def checkpoint_views(facts: ModelFacts, weights: ModelWeights) -> dict[str, Tensor]:
    """The tensors of a Hugging Face checkpoint by name, as views of `weights` (packed ones too)."""
    views = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.final_norm}
    if not facts.tied_embeddings:
        views[_HEAD] = weights.lm_head
    for i, layer in enumerate(weights.layers):
        for name, modules in _MODULES.items():
            for field, kind in ((name, "weight"), (f"{name}_bias", "bias")):
                if (packed := getattr(layer, field, None)) is not None:
                    sizes = facts.qkv_sizes if name == "qkv" else len(packed) // len(modules)
                    for module, view in zip(modules, packed.split(sizes), strict=True):
                        views[f"model.layers.{i}.{module}.{kind}"] = view
    return views


def random_weights(facts: ModelFacts, device: torch.device | str, seed: int) -> ModelWeights:
    """Normal weights of deviation 0.02 and norm gains around 1, made on the device from `seed`."""
    weights = allocate(facts, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, view in checkpoint_views(facts, weights).items():
        mean, deviation = (1.0, 0.1) if name.endswith("norm.weight") else (0.0, 0.02)
        view.normal_(mean, deviation, generator=generator)
    return weights


def read_weights(
    directory: Path, facts: ModelFacts, device: torch.device | str, progress: Progress
) -> ModelWeights:
    """The weights of a Hugging Face directory, converted to facts.dtype tensor by tensor.

    Names and shapes of all files are checked before anything is allocated. `rotary_emb.inv_freq` is
    skipped, and so is an `lm_head.weight` that repeats tied embeddings. Raises UserError with file
    and tensor for anything that is missing, superfluous, misshapen or unreadable.
    """
    files = _files(directory)
    _check(directory, files, checkpoint_views(facts, allocate(facts, "meta")))
    weights, head = allocate(facts, device), None
    views = checkpoint_views(facts, weights)
    num_bytes, total_bytes = 0, sum(view.nbytes for view in views.values())
    for path, names in files.items():
        with _opened(path) as shard:
            for name in names:
                if name in views:
                    views[name].copy_(shard.get_tensor(name))
                    num_bytes += views[name].nbytes
                    progress(num_bytes, total_bytes)
                elif name == _HEAD:
                    head = shard.get_tensor(name)
    # transformers would silently untie them.
    if head is not None and not torch.equal(head.to(weights.embed), weights.embed):
        what = f"{_HEAD} of {directory} differs from the embeddings"
        raise UserError(f"{what} although tie_word_embeddings is true; set that to false.")
    return weights


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """`safe_open` whose failures, of opening and of reading, are sentences."""
    size = path.stat().st_size if path.is_file() else 0
    what = f"{path} ({size} bytes) is missing, truncated or no safetensors file"
    opener: Any = safe_open  # the package has no types
    with explained(what, "download it again.", caught=(SafetensorError, OSError)):
        with opener(path, framework="pt", device="cpu") as shard:
            yield shard


def _files(directory: Path) -> dict[Path, list[str]]:
    """The safetensors files of a directory, each with the names of its tensors."""
    single, index = directory / _SINGLE, directory / _INDEX
    if single.is_file():
        with _opened(single) as file:
            return {single: [str(name) for name in file.keys()]}
    if not index.is_file():
        what = f"{directory} has neither {_SINGLE} nor {_INDEX}; give a directory that has one of"
        why = "pickles such as pytorch_model.bin can run code and are never loaded: convert"
        raise UserError(f"{what} them ({why}).")
    files: dict[Path, list[str]] = {}
    with explained(f"{index} is no index of safetensors files", "download it again."):
        for name, file in json.loads(index.read_text("utf-8"))["weight_map"].items():
            files.setdefault(directory / file, []).append(name)
    return files


def _check(directory: Path, files: dict[Path, list[str]], wanted: dict[str, Tensor]) -> None:
    """Refuse names and shapes that are not those which config.json asks for."""
    found = {name for names in files.values() for name in names}
    extra = {name for name in found.difference(wanted) if not name.endswith(_IGNORED)}
    for what, differing in (("holds", extra), ("lacks", set(wanted) - found)):
        if differing:
            more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
            what = f"{directory} {what} {min(differing)}{more}, unlike the decoder of its"
            raise UserError(f"{what} config.json; check that both are of one model.")
    for path, names in files.items():
        with _opened(path) as shard:
            for name in wanted.keys() & names:
                shape, asked = shard.get_slice(name).get_shape(), list(wanted[name].shape)
                if shape != asked:
                    what = f"{name} is {shape} where config.json asks for {asked}"
                    raise UserError(f"{path}: {what}; check that both are of one model.")
