"""What the model loses on text: bits per byte beside a byte model, and the loss by position.

Losses are teacher-forced and read the stored keys and values (`Engine.score`). A document is cut
into windows that know nothing of each other; each of its tokens is predicted in one of them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from core.errors import UserError
from evals.intervals import clustered_mean, clustered_ratio
from evals.tiny.documents import Document, spans

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from core.engine import Engine
    from core.show import Progress
    from evals.tiny.kneser_ney import KneserNey

Range = tuple[int, int]  # of positions, the first and the one behind the last


@dataclass(frozen=True)
class Positions:
    """Which positions of a window are compared, and which are one row of the table."""

    early: Range
    late: Range
    buckets: list[Range]

    @classmethod
    def of(cls, window_tokens: int) -> Positions:
        """Of 8,192 tokens: early is 256 to 511, late 4,096 to 8,191; others in proportion."""
        edges = [max(1, window_tokens // parts) for parts in (128, 32, 16, 8, 4, 2, 1)]
        buckets = [pair for pair in itertools.pairwise([1, *edges]) if pair[0] < pair[1]]
        return cls((edges[1], edges[2]), (edges[5], edges[6]), buckets)


@dataclass(frozen=True)
class Window:
    """One window of a document, `kind/name`.

    `nats` float64 [n - 1] is the loss of each token but the first. `bytes_before` and `num_bytes`
    place those tokens in the document's UTF-8.
    """

    document: str
    kind: str
    nats: NDArray[Any]
    bytes_before: int
    num_bytes: int


def losses(
    engine: Engine,
    documents: list[Document],
    window_tokens: int,
    most_windows: int | None,
    progress: Progress,
) -> list[Window]:
    """Every window of the documents, or `most_windows` of each, spread over it."""
    found: list[Window] = []
    cut = [spans(engine, document, window_tokens, most_windows) for document in documents]
    total = sum(map(len, cut))
    for document, its_spans in zip(documents, cut, strict=True):
        for span in its_spans:
            nats = token_nats(engine, span.token_ids)
            place = span.bytes_before, span.num_bytes
            found.append(Window(document.place, document.kind, nats, *place))
            progress("losses", len(found), total)
    return found


def token_nats(engine: Engine, token_ids: list[int]) -> NDArray[Any]:
    """Loss of each token but the first, given those before it, float64 [n - 1]."""
    import torch.nn.functional as F

    def reduce(first: int, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits[: len(targets)].float(), targets, reduction="none").cpu()

    parts = engine.score(token_ids, reduce)
    return np.concatenate([part.double().numpy() for part in parts])


def bits_per_byte(
    windows: list[Window], documents: list[Document], byte_model: KneserNey, progress: Progress
) -> dict[str, Any]:
    """Of the windows that lie in `documents`, beside the byte model on the same bytes.

    The byte model reads whole documents, so that it knows what stands before a window. Intervals
    draw documents, then their windows.
    """
    of_bytes: dict[str, NDArray[Any]] = {}
    for document in documents:
        of_bytes[document.place] = byte_model.nats(document.text)
        progress("byte model", len(of_bytes), len(documents))
    chosen = [window for window in windows if window.document in of_bytes]
    rows = np.array([_row(window, of_bytes[window.document]) for window in chosen])
    nats, byte_nats, num_bytes = rows.T
    bits, byte_bits = nats / math.log(2), byte_nats / math.log(2)
    names = [window.document for window in chosen]
    by_document = {}
    for name in of_bytes:
        its = np.array([n == name for n in names])
        size = num_bytes[its].sum()
        by_document[name] = {
            "num_windows": int(its.sum()),
            "num_bytes": int(size),
            "bits_per_byte": float(bits[its].sum() / size),
            "byte_model": float(byte_bits[its].sum() / size),
            "ratio": float(nats[its].sum() / byte_nats[its].sum()),
        }
    return {
        "n": len(chosen),
        "num_tokens": sum(len(window.nats) for window in chosen),
        "num_bytes": int(num_bytes.sum()),
        "estimate": float(nats.sum() / byte_nats.sum()),
        "interval": clustered_ratio(nats, byte_nats, names),
        "bits_per_byte": float(bits.sum() / num_bytes.sum()),
        "bits_per_byte_interval": clustered_ratio(bits, num_bytes, names),
        "byte_model": float(byte_bits.sum() / num_bytes.sum()),
        "byte_model_order": byte_model.order,
        "by_document": by_document,
    }


def _row(window: Window, byte_nats: NDArray[Any]) -> tuple[float, float, int]:
    """Nats of the model, nats of the byte model, bytes."""
    end = window.bytes_before + window.num_bytes
    return window.nats.sum(), byte_nats[window.bytes_before : end].sum(), window.num_bytes


def by_position(windows: list[Window], window_tokens: int) -> dict[str, Any]:
    """Mean loss at the late positions minus that at the early ones of the same window, in nats.

    A token's position is the number of tokens before it. Of windows of full length; intervals draw
    documents, then their windows. Raises UserError where there is none.
    """
    positions = Positions.of(window_tokens)
    early, late = positions.early, positions.late
    full = [window for window in windows if len(window.nats) >= late[1] - 1]
    if not full:
        longest = max((len(window.nats) + 1 for window in windows), default=0)
        raise UserError(
            f"the longest window has {longest} tokens of {window_tokens}: give longer documents, "
            "lower --window, or leave out the part position"
        )
    differences = [_mean(window, late) - _mean(window, early) for window in full]
    names = [window.document for window in full]
    kinds = list(dict.fromkeys(window.kind for window in full))
    pairs = list(zip(full, differences, strict=True))
    return {
        "n": len(full),
        "num_documents": len(set(names)),
        "early": early,
        "late": late,
        "estimate": float(np.mean(differences)),
        "interval": clustered_mean(differences, names),
        "by_kind": {
            kind: {
                "n": sum(window.kind == kind for window in full),
                "estimate": float(np.mean([d for window, d in pairs if window.kind == kind])),
            }
            for kind in kinds
        },
        "buckets": _table(full, names, positions.buckets),
    }


def _table(windows: list[Window], names: list[str], buckets: list[Range]) -> list[dict[str, Any]]:
    rows = []
    for bucket in buckets:
        means = [_mean(window, bucket) for window in windows]
        row = {"nats": float(np.mean(means)), "interval": clustered_mean(means, names)}
        rows.append({"first": bucket[0], "last": bucket[1] - 1, **row})
    return rows


def _mean(window: Window, positions: Range) -> float:
    return float(window.nats[positions[0] - 1 : positions[1] - 1].mean())
