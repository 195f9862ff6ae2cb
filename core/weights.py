"""Weights from safetensors files, or seeded random ones, as the tensors the decoder reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from core.facts import ModelFacts

Progress = Callable[[int, int], None]  # bytes done, bytes in all

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


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
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
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

    def new_layer() -> LayerWeights:
        q_size, qkv_size = facts.qkv_sizes[0], sum(facts.qkv_sizes)
        return LayerWeights(
            attn_norm=new(hidden),
            qkv=new(qkv_size, hidden),
            o=new(hidden, q_size),
            mlp_norm=new(hidden),
            gate_up=new(2 * inner, hidden),
            down=new(hidden, inner),
            qkv_bias=new(qkv_size) if facts.qkv_bias else None,
            o_bias=new(hidden) if facts.output_bias else None,
            gate_up_bias=new(2 * inner) if facts.mlp_bias else None,
            down_bias=new(hidden) if facts.mlp_bias else None,
            q_norm=new(facts.head_dim) if facts.qk_norm else None,
            k_norm=new(facts.head_dim) if facts.qk_norm else None,
        )

    hidden, inner = facts.hidden_size, facts.intermediate_size
    embed = new(facts.vocab_size, hidden)
    return ModelWeights(
        embed=embed,
        layers=tuple(new_layer() for _ in range(facts.num_layers)),
        final_norm=new(hidden),
        lm_head=embed if facts.tied_embeddings else new(facts.vocab_size, hidden),
    )


def checkpoint_views(facts: ModelFacts, weights: ModelWeights) -> dict[str, Tensor]:
    """The tensors of a Hugging Face checkpoint by name, as views of `weights` (packed ones too)."""
    views = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.final_norm}
    if not facts.tied_embeddings:
        views["lm_head.weight"] = weights.lm_head

    for i, layer in enumerate(weights.layers):
        at = f"model.layers.{i}."
        views.update((at + name, view) for name, view in _layer_views(facts, layer).items())
    return views


def _layer_views(facts: ModelFacts, layer: LayerWeights) -> dict[str, Tensor]:
    tensors = {
        "input_layernorm.weight": layer.attn_norm,
        "self_attn.q_norm.weight": layer.q_norm,
        "self_attn.k_norm.weight": layer.k_norm,
        "self_attn.o_proj.weight": layer.o,
        "self_attn.o_proj.bias": layer.o_bias,
        "post_attention_layernorm.weight": layer.mlp_norm,
        "mlp.down_proj.weight": layer.down,
        "mlp.down_proj.bias": layer.down_bias,
    }
    views = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for kind, qkv, gate_up in (
        ("weight", layer.qkv, layer.gate_up),
        ("bias", layer.qkv_bias, layer.gate_up_bias),
    ):
        if qkv is not None:
            for name, part in zip("qkv", qkv.split_with_sizes(facts.qkv_sizes), strict=True):
                views[f"self_attn.{name}_proj.{kind}"] = part
        if gate_up is not None:
            views[f"mlp.gate_proj.{kind}"], views[f"mlp.up_proj.{kind}"] = gate_up.chunk(2)
    return views


def random_weights(facts: ModelFacts, device: torch.device | str, seed: int) -> ModelWeights:
    """Normal weights of deviation 0.02 and norm gains around 1, made on the device from `seed`."""
    weights = allocate(facts, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, view in checkpoint_views(facts, weights).items():
        if name.endswith("norm.weight"):
            view.normal_(1.0, 0.1, generator=generator)
        else:
            view.normal_(0.0, 0.02, generator=generator)
    return weights


def read_weights(
    directory: Path,
    facts: ModelFacts,
    device: torch.device | str,
    progress: Progress | None = None,
) -> ModelWeights:
    """The weights of a Hugging Face directory, converted to facts.dtype tensor by tensor.

    Names and shapes of all files are checked before anything is allocated. `rotary_emb.inv_freq` is
    skipped, and so is an `lm_head.weight` that repeats tied embeddings. Raises UserError with file
    and tensor for anything that is missing, superfluous, misshapen or unreadable.
    """
    shapes = checkpoint_views(facts, allocate(facts, "meta"))
    plan = _survey(directory, shapes, facts.tied_embeddings)
    weights = allocate(facts, device)
    views = checkpoint_views(facts, weights)
    num_bytes, total_bytes = 0, sum(view.nbytes for view in views.values())
    for path, names in plan.items():
        with _opened(path) as shard:
            for name in names:
                if name not in views:
                    continue
                views[name].copy_(shard.get_tensor(name))
                num_bytes += views[name].nbytes
                if progress is not None:
                    progress(num_bytes, total_bytes)
    if facts.tied_embeddings:
        _check_redundant_head(plan, weights.embed)
    return weights


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """`safe_open` whose failures are sentences."""
    opener: Any = safe_open  # the package has no types
    if not path.is_file():
        raise UserError(f"{path} is missing; download the checkpoint again.")
    try:
        file = opener(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} ({path.stat().st_size} bytes) is truncated or no safetensors file ({error}); "
            "download it again."
        ) from error
    with file as shard:
        yield shard


def _survey(directory: Path, shapes: dict[str, Tensor], tied: bool) -> dict[Path, list[str]]:
    """Every file to read with the tensors in it, checked against what the decoder needs."""
    shards = _shards(directory)
    plan: dict[Path, list[str]] = {}
    missing = dict.fromkeys(shapes)
    for path, listed in shards.items():
        with _opened(path) as shard:
            names = plan[path] = [str(name) for name in shard.keys()]
            if listed is not None and (strays := listed.symmetric_difference(names)):
                raise UserError(
                    f"{path} and {_INDEX} disagree about {_some(strays)}; download both again."
                )
            _check_names(path, names, shapes, tied)
            for name in names:
                if name in shapes:
                    _check_shape(path, name, shard.get_slice(name).get_shape(), shapes[name])
                    del missing[name]
    if missing:
        where = path if len(shards) == 1 else directory / _INDEX
        raise UserError(
            f"{where} lacks {_some(missing)}, which its config.json asks for; "
            "check that both are of one model."
        )
    return plan


def _shards(directory: Path) -> dict[Path, set[str] | None]:
    """The safetensors files with the tensors that the index lists for each; None without index."""
    if (directory / _SINGLE).is_file():
        return {directory / _SINGLE: None}
    index = directory / _INDEX
    if not index.is_file():
        raise UserError(_no_safetensors(directory))
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        shards: dict[Path, set[str] | None] = {}
        for file in sorted(set(weight_map.values())):
            shards[directory / file] = {name for name in weight_map if weight_map[name] == file}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index} is no index of safetensors files ({type(error).__name__}: {error}); "
            "download it again."
        ) from error
    for path in sorted(directory.iterdir()):
        if _SHARD.fullmatch(path.name) and path not in shards:
            raise UserError(
                f"{path} is a shard that {_INDEX} does not name; remove it, or restore the index "
                "that goes with it."
            )
    return shards


def _no_safetensors(directory: Path) -> str:
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in _PICKLES)
    if pickles:
        return (
            f"{directory} has its weights in {pickles[0]}, a pickle, which can run code and is "
            "never loaded; convert it to safetensors."
        )
    return f"{directory} has neither {_SINGLE} nor {_INDEX}; give a directory that has one of them."


def _check_names(path: Path, names: list[str], shapes: dict[str, Tensor], tied: bool) -> None:
    extra = [
        name
        for name in names
        if name not in shapes
        and not name.endswith("rotary_emb.inv_freq")
        and not (tied and name == "lm_head.weight")
    ]
    if extra:
        raise UserError(
            f"{path} holds {_some(extra)}, which the decoder of its config.json does not have; "
            "check that both are of one model."
        )


def _check_shape(path: Path, name: str, shape: list[int], wanted: Tensor) -> None:
    if tuple(shape) != wanted.shape:
        raise UserError(
            f"{path}: {name} is {list(shape)} where config.json asks for {list(wanted.shape)}; "
            "check that both are of one model."
        )


def _check_redundant_head(plan: dict[Path, list[str]], embed: Tensor) -> None:
    """Refuse a head that differs from tied embeddings: transformers would silently untie them."""
    for path, names in plan.items():
        if "lm_head.weight" in names:
            with _opened(path) as shard:
                head = shard.get_tensor("lm_head.weight")
            if head.shape != embed.shape or not torch.equal(head.to(embed), embed):
                raise UserError(
                    f"{path}: lm_head.weight differs from the embeddings although the config field "
                    "tie_word_embeddings is true; set it to false."
                )


def _some(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    first, *rest = sorted(names)
    return f"{first} (and {len(rest)} more)" if rest else first
