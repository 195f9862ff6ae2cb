"""From logits to a token: log-probabilities, penalties, filters, and Gumbel noise from a key.

A step runs the cheapest variant that serves all of its rows. Greedy and hot ones are the `sample`
node alone, in small graphs of their own; filters and penalties change the logits in front of it,
eagerly, so that a fused sampler still works and nobody pays for a sort that no row asked for.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from core.errors import UserError
from core.model import Node
from core.sampling import Needs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence as Seq

    from torch import Tensor

    from core.batch import Batch, Sequence, TokenLogprob
    from core.model import Site

_IN_PROMPT, _STOPS, _ONCE = 1, 2, 4  # an entry of a history: two marks, and the count above them


class Logprobs(NamedTuple):
    """Log-probabilities at n positions, on the device or the host: of the tokens themselves [n],
    and of the k likeliest [n, k], best first, with their ids."""

    chosen: Any
    top_ids: Any
    top: Any

    def pairs(self, row: int, num_top: int) -> TokenLogprob:
        """One position as a sequence keeps it: of the token, and {id: log-probability}."""
        ids, values = self.top_ids[row, :num_top].tolist(), self.top[row, :num_top].tolist()
        return float(self.chosen[row]), dict(zip(ids, values, strict=True))


def token_logprobs(logits_RV: Tensor, token_ids_R: Tensor, num_top: int) -> Logprobs:
    """Under the raw logits, natural, in float32; ids int32."""
    wide = logits_RV.float()
    total = wide.logsumexp(-1, keepdim=True)
    chosen = wide.gather(-1, token_ids_R.long()[:, None]) - total
    top = wide.topk(min(num_top, wide.shape[1]))
    return Logprobs(chosen[:, 0], top.indices.to(torch.int32), top.values - total)


class Sampler:
    """What a step does to its logits before the `sample` node, and the history that it needs.

    The history of a slot, kept for requests that ask for it: how often it has written each token
    (counted on the device within the step, so that an overlapped step sees the one before it), and
    which tokens are in its prompt or end it. It is set whenever a request takes a slot, so that a
    resumed one finds its own output counted and a new one nothing of the owner before.
    """

    def __init__(self, num_slots: int, vocab_size: int, staged: Mapping[str, Tensor]) -> None:
        """`staged` has "filters" [R, 3] and "penalties" [R, 4], float32, a row a logits row."""
        self._shape, self._staged = (num_slots, vocab_size), staged
        self._history: Tensor | None = None  # [S + 1, V] int32

    def reserve(self) -> None:
        """Make room for histories, once. Raises UserError where the device has none."""
        device = self._staged["filters"].device
        try:
            if self._history is None:
                self._history = torch.zeros(self._shape, dtype=torch.int32, device=device)
        except torch.OutOfMemoryError as error:
            what = f"penalties and min_tokens need {4 * math.prod(self._shape) >> 20} MiB"
            advice = "lower --gpu-memory-utilization or --max-num-seqs"
            raise UserError(f"{what} on {device}, which has less left: {advice}") from error

    def admit(self, seq: Sequence, stop_ids: Seq[int]) -> None:
        """Set the history of the slot that `seq` has taken; all of its tokens are known."""
        assert self._history is not None, "reserve comes first"
        prompt, output = np.split(seq.token_ids[: seq.num_known], [seq.num_prompt])
        history = _ONCE * np.bincount(output, minlength=self._shape[1]).astype(np.int32)
        history[prompt] |= _IN_PROMPT
        history[[i for i in stop_ids if i < len(history)]] |= _STOPS
        values = torch.from_numpy(history)
        if self._history.is_cuda:
            values = values.pin_memory()
        # In stream order, behind the steps in flight of the slot's last owner.
        self._history[seq.slot].copy_(values, non_blocking=True)

    def adjusted(self, batch: Batch) -> Tensor:
        """The logits that the `sample` node reads: the batch's own, or a float32 copy of them with
        penalties applied and what is filtered out or held off at -inf."""
        assert batch.logits is not None
        logits, num_rows = batch.logits, len(batch.logits)
        if batch.needs & Needs.PENALISED and self._history is not None:
            history = self._history[batch.sample_slots.long()]
            logits = penalised(logits.float(), history, self._staged["penalties"][:num_rows])
        if batch.needs & Needs.FILTERED:
            logits = filtered(logits.float(), batch.temperature, self._staged["filters"][:num_rows])
        return logits

    def count(self, batch: Batch, sampled_R: Tensor) -> None:
        """What the step has sampled is output from now on. Padding rows share the trash slot."""
        if batch.needs & Needs.PENALISED and self._history is not None:
            self._history[batch.sample_slots.long(), sampled_R.long()] += _ONCE


def penalised(logits_RV: Tensor, history_RV: Tensor, penalties_R4: Tensor) -> Tensor:
    """Repetition, presence and frequency penalty, in that order, and stops held off where the
    fourth column is 1. Rows of (1, 0, 0, 0) are the same, bit for bit."""
    repetition, presence, frequency, holds_off = penalties_R4[:, :, None].unbind(1)
    counts = history_RV // _ONCE
    factor = torch.where(history_RV & ~_STOPS > 0, repetition, 1.0)
    logits = torch.where(logits_RV > 0, logits_RV / factor, logits_RV * factor)
    logits = logits - frequency * counts - presence * (counts > 0)
    return logits.masked_fill((holds_off > 0) & (history_RV & _STOPS > 0), float("-inf"))


def filtered(logits_RV: Tensor, temperature_R: Tensor, filters_R3: Tensor) -> Tensor:
    """-inf for what min-p, then top-k, then top-p leave out of softmax(logits / temperature).

    Entries with equal logits stay or go together, so that the result does not hang on how a sort
    breaks ties. Rows of (0, 1, 0) are the same, bit for bit, and the likeliest entry always stays.
    """
    num_entries = logits_RV.shape[1]
    scaled = logits_RV / torch.where(temperature_R > 0, temperature_R, 1.0)[:, None]
    top_k, top_p, min_p = filters_R3[:, :, None].unbind(1)
    ordered = scaled.sort(-1).values
    first = torch.where(top_k > 0, num_entries - top_k, 0.0).clamp(min=0).long()
    floor = torch.maximum(ordered.gather(-1, first), ordered[:, -1:] + min_p.log())
    left = ordered.masked_fill(ordered < floor, float("-inf")).softmax(-1)
    num_dropped = (left.cumsum(-1) <= 1 - top_p).sum(-1, keepdim=True).clamp(max=num_entries - 1)
    nucleus = torch.where(top_p < 1, ordered.gather(-1, num_dropped), float("-inf"))
    return logits_RV.masked_fill(scaled < torch.maximum(floor, nucleus), float("-inf"))


def _fmix32(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser on int32 that wraps: torch has no arithmetic on uint32, so its
    constants are less 2^32, and shifts are made logical by masks."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * (0x85EBCA6B - 2**32)
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * (0xC2B2AE35 - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


def gumbel_scores(logits_RV: Tensor, temperature_R: Tensor, keys_R2: Tensor) -> Tensor:
    """logits / temperature + Gumbel noise, float32 [R, V]; plain logits where the temperature is 0.

    The noise is -log(E) with E = -log(1 - u) and u = (h + 1/2) / 2^32, which keeps 32 bits near u =
    0, the end that wins: a 24-bit uniform would never draw the tail.
    """
    vocab = torch.arange(logits_RV.shape[1], device=logits_RV.device, dtype=torch.int32)
    h = _fmix32(vocab * (0x9E3779B1 - 2**32) + keys_R2[:, :1])
    h = _fmix32(h ^ keys_R2[:, 1:])
    u = (h.to(torch.float32) + torch.where(h < 0, 4294967296.0, 0.0) + 0.5) * 2.0**-32
    exponential = torch.where(u < 1e-4, u + u * u / 2, -torch.log1p(-u))
    hot = temperature_R[:, None] > 0
    scaled = logits_RV.float() / torch.where(hot, temperature_R[:, None], 1.0)
    return torch.where(hot, scaled - torch.log(exponential), scaled)


def _sample(site: Site, batch: Batch, logits: Tensor) -> tuple[Tensor, ...]:
    if batch.needs & Needs.HOT:
        logits = gumbel_scores(logits, batch.temperature, batch.sample_keys)
    return (logits.argmax(-1).to(torch.int32),)


SAMPLE = Node("sample", ("logits",), ("sampled",), _sample)
