"""The page oracle: random traces through a KVManager, no weights, yet every wrong page shows.

`PageOracle` drives a plugin through admissions, chunks mixed with decodes, preemption, prefix hits,
failed steps and endings, with both probes of `core.testing.probes` on every token of every step and
the books checked after every call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from core.testing.probes import check_gather, run_step

if TYPE_CHECKING:
    from core.batch import Sequence
    from core.testing.rig import Rig


@dataclass
class TraceCounts:
    """What a trace went through; a test asserts that it went through what it is about."""

    num_steps: int = 0
    num_mixed_steps: int = 0
    num_preemptions: int = 0
    num_failures: int = 0
    num_cached_tokens: int = 0
    num_finished: int = 0


class PageOracle:
    """A random trace over one rig. `max_total` bounds a request, prompt and output, in tokens."""

    def __init__(self, rig: Rig, *, seed: int, num_requests: int, max_total: int) -> None:
        self.rig, self.counts = rig, TraceCounts()
        self._rng = np.random.default_rng(seed)
        self._max_total = max_total
        self._stems = [self._rng.integers(0, 50, max_total) for _ in range(2)]
        self._waiting = [self._request() for _ in range(num_requests)]
        self._running: list[Sequence] = []  # in order of admission: the last one gives way first

    def run(self) -> TraceCounts:
        """Drive all requests to their end. Raises AssertionError where anything goes wrong."""
        num_requests = len(self._waiting)
        while self._waiting or self._running:
            self._admit()
            assert self._running, f"nothing runs and {len(self._waiting)} wait: they never will"
            self._disturb()
            if self._running:
                self._step()
            assert self.counts.num_steps < 400 * num_requests, "the trace does not end"
        usage = self.rig.kv.usage()
        assert usage.num_held == 0, f"{usage.num_held} tokens are held and nobody runs"
        return self.counts

    def _request(self) -> Sequence:
        """A prompt that often shares its first tokens: a piece of a stem, and a tail of its own.

        Some pieces begin inside the stem, so that equal blocks stand after different tokens.
        """
        rng = self._rng
        total = int(rng.integers(2, self._max_total + 1))
        num_prompt = int(rng.integers(1, total))
        num_shared = int(rng.integers(0, num_prompt + 1, 2).max())
        stem = self._stems[rng.integers(0, len(self._stems))]
        piece = np.roll(stem, -16 * int(rng.integers(0, 2)))[:num_shared]
        prompt = [*piece.tolist(), *rng.integers(0, 50, num_prompt - num_shared).tolist()]
        seq = self.rig.sequence(prompt, share_prefix=bool(rng.random() < 0.9))
        seq.max_tokens_total = total
        return seq

    def _admit(self) -> None:
        while self._waiting and self._rng.random() < 0.8 or self._waiting and not self._running:
            seq = self._waiting[0]
            upto = seq.num_tokens
            if self._rng.random() < 0.3:
                upto = int(self._rng.integers(1, upto + 1))
            cached = self.rig.admit(seq, upto)
            if cached is None:
                return
            self.counts.num_cached_tokens += cached
            self._running.append(self._waiting.pop(0))

    def _disturb(self) -> None:
        """Now and then one is preempted for no reason, or a step of his has failed."""
        draw = self._rng.random()
        if draw < 0.06:
            seq = self._running[self._rng.integers(0, len(self._running))]
            if draw < 0.02:
                self.rig.kv.rollback(seq, 0)
                self.rig.kv.check_integrity()
                self.counts.num_failures += 1
            self._preempt(seq)

    def _preempt(self, seq: Sequence) -> None:
        self.rig.release(seq)
        self._running.remove(seq)
        self._waiting.insert(0, seq)
        self.counts.num_preemptions += 1

    def _step(self) -> None:
        """Rows within the budget, somebody giving way where room is short."""
        budget = self.rig.limits.max_num_batched_tokens
        lengths: dict[Sequence, int] = {}
        for seq in list(self._running):
            length = min(seq.remaining, budget)
            if length > 1:
                length = int(self._rng.integers(1, length + 1))
            if length and self._make_room(seq, seq.num_computed + length, lengths):
                lengths[seq] = length
                budget -= length
        decodes = [seq for seq in lengths if seq.remaining == 1]
        prefills = [(seq, n) for seq, n in lengths.items() if seq.remaining > 1]
        self.counts.num_steps += 1
        self.counts.num_mixed_steps += bool(decodes and prefills)
        padding = self._draw_padding(budget, len(lengths), max(lengths.values()) == 1)
        run_step(self.rig, decodes, prefills, **padding)
        for seq in lengths:
            self._after(seq)

    def _draw_padding(self, budget: int, num_rows: int, single: bool) -> dict[str, int]:
        """Within the limits; for a step of single tokens no more tokens than rows may be."""
        tokens, rows = min(budget, 5), self.rig.limits.max_num_seqs - num_rows
        if single:
            tokens = rows = min(tokens, rows)
        return {
            "num_padding_tokens": int(self._rng.integers(0, tokens + 1)),
            "num_padding_rows": int(self._rng.integers(0, rows + 1)),
        }

    def _make_room(self, seq: Sequence, upto: int, lengths: dict[Sequence, int]) -> bool:
        """Room for `seq`; the last admitted gives way, at last `seq`, and leaves the step."""
        while seq in self._running and not self.rig.has_room(seq, upto):
            victim = self._running[-1]
            assert len(self._running) > 1, f"{seq.request_id} alone has no room for {upto} tokens"
            lengths.pop(victim, None)
            self._preempt(victim)
        return seq in self._running

    def _after(self, seq: Sequence) -> None:
        self.rig.publish_due(seq)
        if self._rng.random() < 0.1:
            check_gather(self.rig, seq)
        if seq.remaining:
            return
        if seq.num_known == seq.max_tokens_total:
            self.rig.release(seq)
            self._running.remove(seq)
            self.counts.num_finished += 1
        else:
            self.rig.append(seq, int(self._rng.integers(0, 50)))
