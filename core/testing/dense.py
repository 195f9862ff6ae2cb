"""Dense attention in float64 over values in [-1, 1): what every cache format approximates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np

from core.testing import codes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from core.batch import Sequence
    from core.testing.rig import Rig

_QUERY_SCALE = 4.0  # softmax weights within one row then differ by some hundreds


def run_dense_step(
    rig: Rig, decodes: Seq[Sequence], prefills: Seq[tuple[Sequence, int]] = ()
) -> list[NDArray[np.float32]]:
    """One step over spread keys, values and queries: attention of each layer, [n, H, D]."""
    step = rig.begin(decodes, prefills)
    out = []
    for layer in range(rig.facts.num_layers):
        rig.write(step, codes.floats, layer)
        asked = [queries(rig, row.seq, row.lo, row.hi, layer) for row in step.rows]
        out.append(rig.attend(step, layer, rig.tensor(np.concatenate(asked))))
    rig.end(step)
    return out


def queries(rig: Rig, seq: Sequence, lo: int, hi: int, layer: int) -> NDArray[np.float32]:
    """What tokens lo..hi-1 ask, [n, H, D]."""
    facts = dataclasses.replace(rig.facts, num_kv_heads=rig.facts.num_heads)
    return _QUERY_SCALE * codes.floats(rig.hashes(seq)[lo:hi], layer, codes.QUERY, facts)


def worst_error(rig: Rig, seq: Sequence, lo: int, out: list[NDArray[np.float32]]) -> float:
    """The largest absolute error of `out`, attention of tokens lo.. of `seq` in each layer."""
    hashes, hi = rig.hashes(seq)[: seq.num_computed], seq.num_computed
    errors = []
    for layer, got in enumerate(out):
        q = _rounded(rig, queries(rig, seq, lo, hi, layer))
        k = _rounded(rig, codes.floats(hashes, layer, codes.KEY, rig.facts))
        v = _rounded(rig, codes.floats(hashes, layer, codes.VALUE, rig.facts))
        errors.append(
            float(
                np.abs(got - _attention(q, k, v, rig.seen(lo, hi), rig.facts.softmax_scale)).max()
            )
        )
    return max(errors)


def _attention(
    q: NDArray[np.float64],
    k: NDArray[np.float64],
    v: NDArray[np.float64],
    seen: NDArray[np.bool_],
    scale: float,
) -> NDArray[np.float64]:
    """q [t, H, D] over those of k and v [s, K, D] that are seen [t, s]: [t, H, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = np.einsum("thd,shd->hts", q, k) * scale
    weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    weights /= weights.sum(-1, keepdims=True)
    out: NDArray[np.float64] = np.einsum("hts,shd->thd", weights, v)
    return out


def _rounded(rig: Rig, array: NDArray[np.float32]) -> NDArray[np.float64]:
    """`array` in the dtype that the plugin was given, exactly."""
    return rig.tensor(array).double().cpu().numpy()
