"""Tiny Hugging Face checkpoints with random weights, and what transformers computes with them.

Their weights are large, so that greedy text keeps moving, and biases and norm gains are random too,
so that leaving one out shows. Not larger still, because attention that is nearly one-hot magnifies
rounding: with a deviation of 0.3 two orders of the same float32 sums differ by up to 1.6e-4 in the
logits of 100 tokens, with 0.2 by 4e-5.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

VOCAB_SIZE = 300
_DEVIATION = 0.2
_SHARED = {"vocab_size": VOCAB_SIZE, "eos_token_id": None, "bos_token_id": None}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _config(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return _SHARED | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
    }


# QKV bias, YaRN, QK-norm with heads wider than the hidden size, none of these; odd and even numbers
# of query heads a key head; tied embeddings and not.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", _config(96, 160, 3, 6, 2) | {"tie_word_embeddings": True}),
    "qwen2.5-yarn": (
        "qwen2",
        _config(96, 128, 2, 3, 1) | {"rope_parameters": _YARN, "max_position_embeddings": 256},
    ),
    "qwen3": ("qwen3", _config(64, 128, 2, 6, 2) | {"head_dim": 32, "tie_word_embeddings": True}),
    "llama": ("llama", _config(96, 128, 2, 6, 2)),
    "mistral": ("mistral", _config(64, 96, 2, 4, 1) | {"head_dim": 32, "sliding_window": None}),
}


def save_tiny(
    kind: str,
    path: str | Path,
    seed: int = 0,
    *,
    max_shard_size: str = "1GB",
    **config_overrides: Any,
) -> Path:
    """Write a tiny float32 checkpoint of one of `KINDS` through transformers; the directory.

    It has no tokenizer: see `save_tokenizer`. `config_overrides` are fields of its config.
    """
    from transformers import AutoConfig

    model_type, fields = KINDS[kind]
    config = AutoConfig.for_model(model_type, **(fields | config_overrides))
    with torch.random.fork_rng(devices=[]):
        model = _auto_model().from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.normal_(mean, _DEVIATION, generator=generator)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return Path(path)


def save_tokenizer(path: str | Path, text: str = "the quick brown fox, the lazy dog. ") -> None:
    """Write a byte-level BPE tokenizer of at most `VOCAB_SIZE` ids into a model directory.

    Merges come from `text`. Ids 0 and 1 are the special tokens <|end|> and <|pad|>; the last id is
    the added token <tool>, which is not special.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    wrap: Any = PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 1,
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 4, trainer)
    tokenizer.add_tokens(["<tool>"])
    fast = wrap(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.save_pretrained(path)


def reference_logits(path: str | Path, ids: Seq[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """transformers' logits after each of `ids`, [T, V] in `dtype`."""
    model = _reference(path, dtype)
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits


def reference_generate(path: str | Path, ids: Seq[int], num_tokens: int) -> list[int]:
    """transformers' greedy continuation of `ids` in float32: `num_tokens` ids, or up to an EOS."""
    prompt = torch.tensor([list(ids)])
    output = _reference(path, torch.float32).generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    continuation: list[int] = output[0, len(ids) :].tolist()
    return continuation


def _reference(path: str | Path, dtype: torch.dtype) -> Any:
    return _auto_model().from_pretrained(path, dtype=dtype, local_files_only=True).eval()


def _auto_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM
