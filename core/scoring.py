"""Teacher-forced logits through the stored KV path, beside whatever else the engine runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from core.batch import Sequence
from core.errors import UserError
from core.sampler import Logprobs, token_logprobs
from core.sampling import SamplingParams
from core.schedule import StepPlan

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from core.batch import TokenLogprob
    from core.compose import Parts

_T = TypeVar("_T")


def score(
    parts: Parts, ids: NDArray[np.int32], reducer: Callable[[int, Tensor, Tensor], _T], rows: int
) -> list[_T]:
    """See `Engine.score`. The sequence takes a slot and room of its own, and gives both back."""
    n = len(ids)
    if rows < 1:
        raise UserError(f"rows is {rows}: give the logits of at least 1 position at a time")
    if refusal := parts.kv.ever_fits(n):
        raise UserError(refusal)
    seq = Sequence("score", ids, n, SamplingParams(max_tokens=1), 0.0, 0, n)
    seq.num_known = seq.num_tokens = n
    seq.token_times, seq.share_prefix = np.zeros(n), False
    if not parts.slots.num_free or parts.kv.acquire(seq, n) is None:
        raise UserError(f"no room to score {n} tokens beside what runs: let requests end first")
    slot = parts.slots.take(seq, 0, ())
    parts.kv.on_slot(seq, slot)
    try:
        targets = torch.from_numpy(ids.astype(np.int64)).to(parts.executor.device)
        size = min(parts.plan.config.chunk_size or n, parts.limits.max_num_batched_tokens)
        results: list[_T] = []
        for start in range(0, n, size):
            slots, starts, lens = np.array([[slot], [start], [min(size, n - start)]], np.int32)
            plan = StepPlan(slots, starts, lens, samples=np.zeros(1, np.bool_), num_decodes=0)
            hidden = parts.executor.hidden_states(plan)
            for lo in range(0, len(hidden), rows):
                first, part = start + lo, hidden[lo : lo + rows]
                with torch.inference_mode():
                    logits = F.linear(part, parts.model.weights.lm_head)
                    nexts = targets[first + 1 : first + len(part) + 1]
                    results.append(reducer(first, logits, nexts))
        return results
    finally:
        parts.kv.on_slot(seq, None)
        parts.kv.release(seq)
        parts.slots.give_back(seq)


def score_prompt(parts: Parts, seq: Sequence) -> list[TokenLogprob]:
    """Log-probabilities of the prompt of `seq` from its second token on, in a pass of their own.

    For one that has ended just now and shared no prefix: what it gave back is room enough.
    """
    num_top = seq.params.prompt_logprobs or 0

    def reduce(first: int, logits: Tensor, targets: Tensor) -> list[TokenLogprob]:
        found = token_logprobs(logits[: len(targets)], targets, num_top)
        found = Logprobs(*(tensor.cpu() for tensor in found))
        return [found.pairs(row, num_top) for row in range(len(targets))]

    slices = score(parts, seq.token_ids[: seq.num_prompt], reduce, rows=256)
    return [pair for pairs in slices for pair in pairs]
