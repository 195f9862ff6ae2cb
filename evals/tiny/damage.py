"""What one kv offer does to the text beside another: passkeys lost, and divergence of logits.

Two engines run one after the other on the same items, and what is compared is paired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np

from evals.intervals import clustered_mean, paired_lower_bound
from evals.tiny.answers import exact, share

if TYPE_CHECKING:
    from torch import Tensor

    from core.engine import Engine
    from core.show import Progress
    from evals.tiny.skills import Item

MARGIN = 0.02  # of accuracy, that a harmless offer may lose
_BLOCK = 256  # positions that are one sample of the interval of the divergence


def damage(
    make_engine: Callable[[Any], Engine],
    kv_a: Any,
    kv_b: Any,
    items: Seq[Item],
    texts: Seq[Seq[int]],
    progress: Progress,
) -> dict[str, Any]:
    """`kv_b` beside the reference `kv_a`, on the same passkey items and the same texts, as ids.

    `make_engine(kv)` builds an engine with a kv offer, given by name, as a class or as an instance.
    `difference` is accuracy under b minus that under a, `difference_bound` its one-sided 95 % lower
    bound. Divergence is KL(a, b) in nats of each position's next token; its interval takes texts,
    then stretches of 256 positions, as samples.
    """
    with make_engine(kv_a) as engine:
        right_a = exact(engine, items, progress, "damage, passkey a")
        references = []
        for ids in texts:
            references.append(log_probabilities(engine, ids))
            progress("damage, logits a", len(references), len(texts))
        name_a = engine.plan.kv.name
    with make_engine(kv_b) as engine:
        right_b = exact(engine, items, progress, "damage, passkey b")
        parts = []
        for ids, reference in zip(texts, references, strict=True):
            parts.append(divergence(engine, ids, reference))
            progress("damage, logits b", len(parts), len(texts))
        name_b = engine.plan.kv.name
    return {
        "kv_a": name_a,
        "kv_b": name_b,
        **_paired(right_a, right_b),
        **_divergence([kl for kl, _ in parts], [same for _, same in parts]),
    }


def _paired(right_a: Seq[bool], right_b: Seq[bool]) -> dict[str, Any]:
    pairs = list(zip(right_a, right_b, strict=True))
    n = len(pairs)
    gained, lost = pairs.count((False, True)), pairs.count((True, False))
    return {
        "n": n,
        "a": share(right_a),
        "b": share(right_b),
        "num_gained": gained,
        "num_lost": lost,
        "difference": (gained - lost) / n,
        "difference_bound": paired_lower_bound(gained, lost, n),
        "margin": MARGIN,
    }


def _divergence(kls: Seq[Any], sames: Seq[Any]) -> dict[str, Any]:
    kl, same = np.concatenate(kls), np.concatenate(sames)
    cut = [(i, part) for i, one in enumerate(kls) for part in _stretches(one)]
    means = [float(part.mean()) for _, part in cut]
    return {
        "num_positions": len(kl),
        "mean_kl": float(kl.mean()),
        "mean_kl_interval": clustered_mean(means, [i for i, _ in cut]),
        "p99_kl": float(np.quantile(kl, 0.99)),
        "max_kl": float(kl.max()),
        "same_top_token": float(same.mean()),
    }


def _stretches(values: Any) -> list[Any]:
    return np.array_split(values, max(1, len(values) // _BLOCK))


def log_probabilities(engine: Engine, token_ids: Seq[int]) -> Tensor:
    """Of every next token after each position, float32 [T, V] on the host."""
    import torch

    def reduce(first: int, logits: Tensor, targets: Tensor) -> Tensor:
        return logits.float().log_softmax(-1).cpu()

    return torch.cat(engine.score(token_ids, reduce))


def divergence(engine: Engine, token_ids: Seq[int], reference: Tensor) -> tuple[Any, Any]:
    """KL from `reference` [T, V] to the engine's log-probabilities, float64 [T] of numpy, and where
    the likeliest token is the same, bool [T]."""

    def reduce(first: int, logits: Tensor, targets: Tensor) -> tuple[Any, Any]:
        q = logits.float().log_softmax(-1)
        p = reference[first : first + len(q)].to(q.device)
        kl = (p.exp() * (p - q)).sum(-1)
        return kl.double().cpu().numpy(), (p.argmax(-1) == q.argmax(-1)).cpu().numpy()

    parts = engine.score(token_ids, reduce)
    kl, same = zip(*parts, strict=True)
    return np.concatenate(kl), np.concatenate(same)
