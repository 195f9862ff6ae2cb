"""Sampling parameters, and the plain-torch sampler whose randomness is a function of (seed, token
position).

A token's noise depends on the request's seed, on the position of the token in its sequence and on
the vocabulary entry, and on nothing else: not on the batch, the row, the step, or on a preemption
in between (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, is the idea; the
mixer is MurmurHash3's finaliser).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from core.errors import UserError
from core.model import Node

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from core.batch import Batch
    from core.model import Site

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends; names as in vLLM.

    `temperature` 0 is greedy. `seed` None takes the engine's seed and the order of arrival.
    `logprobs` 0 returns the log-probability of every chosen token (float, natural log, before
    temperature); None returns none.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UserError(f"max_tokens is {self.max_tokens}: ask for at least 1 token")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(
                f"temperature is {self.temperature}: give 0 (greedy) or a positive number"
            )
        if self.logprobs not in (None, 0):
            raise UserError(
                f"logprobs is {self.logprobs}: only 0 (the chosen token) or None is offered so far"
            )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))


def _signed(value: int) -> int:
    """The int32 with the bits of a uint32; torch has no arithmetic on uint32."""
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014), elementwise."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def seed_state(seed: int) -> int:
    """The 64-bit state that stands for a request's seed; neighbouring seeds are far apart."""
    x = (seed * 0xD1342543DE82EF95 + _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    return x ^ (x >> 27)


def sample_keys(states: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Keys [n, 2] int32 of the tokens at `positions` of requests with these seed states."""
    with np.errstate(over="ignore"):
        keys = _mix64(states + positions.astype(np.uint64) * np.uint64(_GOLDEN))
    return keys.view(np.int32).reshape(-1, 2)


def _fmix32(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser on int32 that wraps; shifts are made logical by masks."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _signed(0x85EBCA6B)
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * _signed(0xC2B2AE35)
    return x ^ ((x >> 16) & 0xFFFF)


def gumbel_scores(logits_RV: Tensor, temperature_R: Tensor, keys_R2: Tensor) -> Tensor:
    """logits / temperature + Gumbel noise, float32 [R, V]; plain logits where the temperature is 0.

    The noise is -log(E) with E = -log(1 - u) and u = (h + 1/2) / 2^32, which keeps 32 bits near u =
    0, the end that wins: a 24-bit uniform would never draw the tail.
    """
    vocab = torch.arange(logits_RV.shape[1], device=logits_RV.device, dtype=torch.int32)
    h = _fmix32(vocab * _signed(0x9E3779B1) + keys_R2[:, :1])
    h = _fmix32(h ^ keys_R2[:, 1:])
    u = (h.to(torch.float32) + torch.where(h < 0, 4294967296.0, 0.0) + 0.5) * 2.0**-32
    exponential = torch.where(u < 1e-4, u + u * u / 2, -torch.log1p(-u))
    hot = temperature_R[:, None] > 0
    scaled = logits_RV.float() / torch.where(hot, temperature_R[:, None], 1.0)
    return torch.where(hot, scaled - torch.log(exponential), scaled)


def _sample(site: Site, batch: Batch, logits: Tensor) -> tuple[Tensor, ...]:
    if batch.all_greedy:
        return (logits.argmax(-1).to(torch.int32),)
    scores = gumbel_scores(logits, batch.temperature, batch.sample_keys)
    return (scores.argmax(-1).to(torch.int32),)


SAMPLE = Node("sample", ("logits",), ("sampled",), _sample)


def chosen_logprobs(logits_RV: Tensor, token_ids_R: Tensor) -> Tensor:
    """Log-probability of each row's token under its raw logits: float32 [R]."""
    wide = logits_RV.float()
    picked = wide.gather(-1, token_ids_R.long()[:, None])[:, 0]
    return picked - wide.logsumexp(-1)
