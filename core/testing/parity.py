"""How far a result may be from transformers', and a kernel from its oracle: every number of it.

The promise in bfloat16 and float16: teacher-forced, the error of our logits against transformers in
float32 is at most `FACTOR` times the error that transformers itself has in that dtype, and a token
differs only where it is behind the likeliest by less than that noise. `Transformers` measures the
noise of a checkpoint on a device, `held_to` is the promise. In float32 logits are within
`FLOAT32_LOGITS`.

Kernels, spans and caches are compared with plain torch in tolerances that follow from the epsilon
of their dtype (`torch.finfo`: the distance from 1 to the next number, so that rounding to nearest
is off by at most half of it, relatively):

- float32 results differ by the order of their sums alone. A sum of n terms in another order is off
  by about sqrt(n) roundings, and no test sums more than 6,400 terms: `SUM` = 80 epsilons.
- In half precision the sums are float32 still, and what differs is where a value falls that is
  rounded: to a neighbour, one epsilon away at most. A span rounds twice (a norm before its gain, a
  rotation before its sum): two epsilons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

FACTOR = 2.0  # the error of what is ours over that of the plain computation in the same dtype
FLOAT32_LOGITS = 1e-4  # absolute; the whole of a tiny decoder in another order is off by 4e-5
SUM = 80  # float32 epsilons between two orders of a sum

_SUM = SUM * torch.finfo(torch.float32).eps


def _by_dtype(single: float, num_epsilons: float) -> Mapping[torch.dtype, float]:
    """`single` for float32, and as many epsilons of their own for float16 and bfloat16."""
    halves = {d: num_epsilons * torch.finfo(d).eps for d in (torch.float16, torch.bfloat16)}
    return {torch.float32: single, **halves}


# Relative and absolute at once: times (1 + |wanted|).
SPAN = _by_dtype(_SUM, 2)  # a span beside its nodes, or its kernel beside its reference
PRODUCT = _by_dtype(_SUM, 1)  # a matrix product: the result is rounded once
CHAIN = _by_dtype(10 * _SUM, 10)  # the end of two layers: five spans, each on what the last left
# Scores and their weighted mean: two sums, one after the other. Weights and result are rounded.
ATTENTION = _by_dtype(2 * _SUM, 2)
# Where weights stay in float32 or in INT8 with a low part: the result is rounded, half an epsilon,
# and queries are rounded to 2^-16 of their largest channel, which is 9e-5 of a value at most.
_LOW_PART = 6 * 2.0**-16
INT8_DECODE = {d: _LOW_PART + e for d, e in _by_dtype(0.0, 0.5).items()}

# Nats, of log-probabilities over INT8 keys and values: codes that lie on the edge fall to one side
# here and to the other there, a hundredth of what INT8 costs.
MEAN_KL_OF_TIES, MAX_KL_OF_TIES = 1e-6, 1e-4

# Absolute, over values in [-1, 1): the result is rounded by a quarter of an epsilon at most, and
# the weights, which sum to 1, by half of one before their sum is taken and half of one after.
CACHE = _by_dtype(_SUM, 1.25)

# `fusion.verify` and whoever compares errors: relative to the root mean square of a row. Where the
# plain nodes are exact or lucky, a span may still have the error of one rounding, a quarter of an
# epsilon in root mean square; in float32, where they are the oracle themselves, that of a sum.
FLOOR = _by_dtype(64 * torch.finfo(torch.float32).eps, 0.25)

# Of a score (a logit over its temperature, and noise): two logarithms in float32, each good to a
# few epsilons of at most 22, the largest that noise gets. Ids whose scores are nearer are tied.
TIE = 2e-5
RELATIVE_TIE = 1e-6


@dataclass(frozen=True)
class Error:
    """Of logits, all rows together: in root mean square, at worst, and of margins: the most that
    any id gains on the one that float32 finds likeliest. No id further behind can overtake it."""

    rms: float
    worst: float
    margin: float

    @classmethod
    def of(cls, found: Tensor, reference32: Tensor) -> Error:
        """Of `found` [n, V] against `reference32` [n, V]."""
        off = found.double() - reference32.double()
        first = off.gather(1, reference32.argmax(-1, keepdim=True))
        worst = float(off.abs().max())
        return cls(float(off.square().mean().sqrt()), worst, float((off - first).max()))


def held_to(found: Tensor, reference32: Tensor, reference16: Tensor) -> Error:
    """Assert the promise; the error of `found`.

    All are [n, V], logits or log-probabilities after the same tokens: ours, transformers' in
    float32, transformers' in the dtype of ours. Raises AssertionError with the numbers.
    """
    assert found.shape == reference32.shape, f"{found.shape} and {reference32.shape}"
    assert found.isfinite().all(), "logits are not finite"
    found, reference32 = found.double(), reference32.double()
    noise, error = Error.of(reference16, reference32), Error.of(found, reference32)
    for name in ("rms", "worst"):
        allowed = FACTOR * getattr(noise, name)
        assert getattr(error, name) <= allowed, (
            f"the {name} error of the logits is {getattr(error, name):.3g} and transformers' own "
            f"{getattr(noise, name):.3g}, of which {FACTOR:g} times are allowed"
        )
    tokens_held_to(found.argmax(-1), reference32, noise)
    return error


def tokens_held_to(tokens: Tensor, reference32: Tensor, noise: Error) -> int:
    """Assert the rule for greedy tokens [n], chosen where `reference32` [n, V] stands; the number
    that differ from float32's.

    One may, if float32 finds it less likely by no more than `FACTOR` times what an id gains on the
    likeliest in transformers' half precision: `noise`, the error of those logits, there or at more
    places.
    """
    best = reference32.double().max(-1).values
    behind = best - reference32.double().gather(1, tokens.to(best.device).long()[:, None])[:, 0]
    allowed = FACTOR * noise.margin
    row = int(behind.argmax())
    assert behind[row] <= allowed, (
        f"token {int(tokens[row])} of row {row} is {float(behind[row]):.3g} less likely than the "
        f"best in float32, where the noise is {allowed:.3g}"
    )
    return int((behind > 0).sum())


class Transformers:
    """transformers with one checkpoint on one device, in float32 and in a half precision."""

    def __init__(
        self, path: str | Path, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
    ) -> None:
        from transformers import AutoModelForCausalLM

        wrap: Any = AutoModelForCausalLM
        self.device = device
        self._models = [
            wrap.from_pretrained(path, dtype=d, local_files_only=True).to(device).eval()
            for d in (torch.float32, dtype)
        ]

    @torch.no_grad()
    def logits(self, ids: Seq[int], last: int = 0) -> tuple[Tensor, Tensor]:
        """After each of the `last` of `ids` (0: all): [n, V] in float32 and in the other dtype."""
        tokens = torch.tensor([list(ids)], device=self.device)
        one, other = (model(tokens, logits_to_keep=last).logits[0] for model in self._models)
        return one, other
