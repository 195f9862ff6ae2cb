"""Struct of arrays for running sequences: one row a slot, so that a step costs a few numpy calls,
not a loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from core.sampling import Needs, seed_state

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from core.batch import Limits, Sequence

# An id that no tokenizer has: "still on the device" in a batch, "no stop id" in stop_ids.
NO_TOKEN = -1


class Slots:
    """The numbers of every running sequence, indexed by slot; the last row is the trash slot.

    `epoch` counts the owners of a slot: a step in flight remembers it, so that a reused slot never
    receives the previous owner's token. `tokens` is NO_TOKEN from `num_known` to `max_total`.
    """

    def __init__(self, limits: Limits) -> None:
        rows = limits.max_num_seqs + 1
        self.tokens = np.full((rows, limits.max_model_len), NO_TOKEN, np.int32)
        self.token_times = np.zeros((rows, limits.max_model_len), np.float64)
        self._counts = counts = np.zeros((6, rows), np.int32)
        self.num_known, self.num_tokens, self.num_computed, self.max_total = counts[:4]
        self.num_logprobs, self.min_total = counts[4:]
        self.epoch = np.zeros(rows, np.int64)
        self.temperature = np.zeros(rows, np.float32)
        self.seed_state = np.zeros(rows, np.uint64)
        self.needs = np.zeros(rows, np.int32)  # bits of core.sampling
        self.filters = np.zeros((rows, 3), np.float32)
        self.penalties = np.zeros((rows, 4), np.float32)  # the last for stops that are held off
        self.has_stop_strings = np.zeros(rows, np.bool_)
        self.stop_ids = np.full((rows, 1), NO_TOKEN, np.int32)
        self.owner = np.full(rows, None)  # Sequence | None
        self._free = list(range(limits.max_num_seqs - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, seq: Sequence, seed: int, stop_ids: Seq[int]) -> int:
        """Give `seq` a free slot and copy its numbers in."""
        params, most = seq.params, seq.max_tokens_total
        slot, n = self._free.pop(), seq.num_known
        self.tokens[slot, :n], self.token_times[slot, :n] = seq.token_ids[:n], seq.token_times[:n]
        self.tokens[slot, n:most] = NO_TOKEN
        seq.token_ids, seq.token_times = self.tokens[slot], self.token_times[slot]
        num_logprobs = -1 if params.logprobs is None else params.logprobs
        least = min(seq.num_prompt + params.min_tokens, most)
        self._counts[:, slot] = n, seq.num_tokens, seq.num_computed, most, num_logprobs, least
        self.temperature[slot] = params.temperature if params.needs & Needs.HOT else 0
        self.seed_state[slot] = seed_state(seed)
        self.filters[slot] = params.top_k, params.top_p, params.min_p
        self.penalties[slot, 0] = params.repetition_penalty
        self.penalties[slot, 1:3] = params.presence_penalty, params.frequency_penalty
        self.has_stop_strings[slot] = bool(params.stop)
        if (missing := len(stop_ids) - self.stop_ids.shape[1]) > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(stop_ids)] = stop_ids
        self.needs[slot] = params.needs
        self.owner[slot], seq.slot = seq, slot
        return slot

    def give_back(self, seq: Sequence) -> None:
        """Take the slot from `seq`, leaving it with copies of its tokens and stamps."""
        slot = seq.slot
        assert slot is not None and self.owner[slot] is seq
        self.sync(seq)
        seq.token_ids = self.tokens[slot, : seq.num_known].copy()
        seq.token_times = self.token_times[slot, : seq.num_known].copy()
        self.owner[slot] = seq.slot = None
        self.epoch[slot] += 1
        self._free.append(slot)

    def sync(self, seq: Sequence) -> None:
        """Bring the numbers of `seq` up to date before a plugin looks at them."""
        if (slot := seq.slot) is not None:
            seq.num_known = int(self.num_known[slot])
            seq.num_tokens = int(self.num_tokens[slot])
            seq.num_computed = int(self.num_computed[slot])
