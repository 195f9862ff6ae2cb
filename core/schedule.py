"""Budget, admission, preemption: who is in the next step. Policy comes from the sched plugin, room
from kv.

One number per sequence: `num_computed` chases `num_tokens`. A prompt, a chunk of one, what a prefix
hit leaves, a resumed sequence and a decode are the same case with different distances.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from core.errors import RunError, explained
from core.seams import offered

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from core.batch import Int32, Limits, Sequence
    from core.config import RunConfig
    from core.metrics import StepCounters
    from core.seams import KVManager, Scheduler
    from core.slots import Slots

    Entry = tuple[Any, int, Sequence]  # of the queue: key, order of arrival, who

_MAX_ASIDE = 8  # heads without room that one plan looks past


class StepPlan(NamedTuple):
    """The rows of a step, decode rows first. All arrays [R]."""

    slots: Int32
    starts: Int32  # tokens of the row computed before this step
    query_lens: Int32
    samples: NDArray[np.bool_]  # the row reaches its last token and yields a new one
    num_decodes: int


class Schedule:
    """Waiting, prefilling and decoding sequences, and the plan of the next step.

    `drain` lands every step in flight; it is called before a sequence is preempted, because a
    victim's last token may still be on the device (and may have ended it).
    """

    def __init__(
        self,
        limits: Limits,
        kv: KVManager,
        sched: Scheduler,
        slots: Slots,
        counters: StepCounters,
        config: RunConfig,
        *,
        clock: Callable[[], float],
        drain: Callable[[], bool],
        admit: Callable[[Sequence], int],
    ) -> None:
        self._limits, self._kv, self._sched, self._slots = limits, kv, sched, slots
        self._counters, self._clock, self._drain, self._take_slot = counters, clock, drain, admit
        self._chunk_size = min(config.chunk_size or 1 << 30, limits.max_num_batched_tokens)
        self._chunked, self._max_bypass = config.enable_chunked_prefill, config.max_bypass
        self._may_start = offered(sched, "may_start")
        self._save = offered(kv, "save") if config.preemption == "swap" else None
        self._restore = offered(kv, "restore")
        self._heap: list[Entry] = []
        self._waiting: dict[Sequence, Any] = {}  # to its entry; all others in the heap are stale
        self.prefilling: list[Sequence] = []
        self.decoding: dict[int, Sequence] = {}
        self._decoding_slots: Int32 | None = None
        self._foreseen: StepPlan | None = None

    # -------- the queue

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def enqueue(self, seq: Sequence) -> None:
        """`seq` waits for its first or next admission."""
        (entry,) = self._entries([seq])
        if self._heap:  # before anything has changed
            with explained("keys of sched do not compare", "mend its key()", RunError, TypeError):
                min(entry, self._heap[0])
        heapq.heappush(self._heap, entry)
        self._waiting[seq] = entry

    def _entries(self, seqs: Iterable[Sequence]) -> list[Entry]:
        clock = self._clock()
        return [(self._sched.key(seq, clock), seq.order, seq) for seq in seqs]

    def remove(self, seq: Sequence) -> None:
        """Forget `seq`, wherever it is, and give back its room and slot."""
        self._waiting.pop(seq, None)
        if seq in self.prefilling:
            self.prefilling.remove(seq)
        if seq.slot is not None:
            if self.decoding.pop(seq.slot, None):
                self._decoding_slots = None
            self._kv.on_slot(seq, None)
            self._kv.release(seq)
            self._slots.give_back(seq)

    def head(self) -> Entry | None:
        """Key, order and who it is that is next to be admitted."""
        while self._heap and self._waiting.get(self._heap[0][2]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    # -------- the plan

    def plan(self) -> StepPlan | None:
        """The next step, its room reserved and its numbers advanced; None where nothing can run
        now."""
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None:
            if foreseen.slots is self._decoding_slots:  # nobody has come or gone
                self._counters.num_decode_tokens += foreseen.num_decodes
                return foreseen
            self._slots.num_computed[foreseen.slots] -= 1
            self._slots.num_tokens[foreseen.slots] -= 1
        if self._sched.rekey == "step":  # first: `victim` goes by the clock of the last key
            self._heap = self._entries(self._waiting)
            self._waiting = {entry[2]: entry for entry in self._heap}
            heapq.heapify(self._heap)
        preempted = self._make_room_for_decodes()
        num_decodes = len(slots := self._slots_of_decodes())
        budget = self._limits.max_num_batched_tokens - num_decodes
        rows, lens = self._prefill_rows(budget, admit=not preempted)
        if not num_decodes and not rows:
            if not self.prefilling:
                return None
            first = self.prefilling[0]  # a policy may hold back some, never all
            assert first.slot is not None
            rows, lens = [first.slot], [min(self._chunk_size, first.remaining)]
        if rows:
            slots = np.concatenate((slots, np.array(rows, np.int32)))
        query_lens = np.ones(len(slots), np.int32)
        query_lens[num_decodes:] = lens
        self._counters.num_decode_tokens += num_decodes
        self._counters.num_prefill_tokens += sum(lens)
        return self._commit(slots, query_lens, num_decodes)

    def foresee(self) -> StepPlan | None:
        """The next step where all seats are taken by decodes, for as long as none of them ends.

        `plan` returns it, or takes it back: until then nobody is admitted or preempted. Whoever
        holds a seat and waits for his last token decodes no more, and is about to leave it.
        """
        slots, s = self._slots_of_decodes(), self._slots
        full = len(slots) == self._limits.max_num_seqs and self.reserve() is None
        if full and (s.num_tokens[slots] + 1 < s.max_total[slots]).all():
            self._foreseen = self._commit(slots, np.ones(len(slots), np.int32), len(slots))
        return self._foreseen

    def _slots_of_decodes(self) -> Int32:
        if self._decoding_slots is None:
            self._decoding_slots = np.fromiter(self.decoding, np.int32, len(self.decoding))
        return self._decoding_slots

    def _make_room_for_decodes(self) -> bool:
        """Room for one more token of every decoding sequence; True if someone had to give way for
        it."""
        preempted = False
        while self.decoding and (seq := self.reserve()) is not None:
            if self._drain():
                continue  # what landed may have ended sequences, and freed their room
            others = [*self.prefilling, *(s for s in self.decoding.values() if s is not seq)]
            for other in others:
                self._slots.sync(other)
            self.preempt(self._sched.victim(others, seq) or seq)
            preempted = True
        return preempted

    def reserve(self) -> Sequence | None:
        """Room for one more token of every decoding sequence; the first that there is none for."""
        slots = self._slots_of_decodes()
        needed = self._slots.num_tokens[slots]
        for slot in slots[needed > self._kv.reserved[slots]].tolist():
            seq = self.decoding[slot]
            self._slots.sync(seq)
            if self._kv.acquire(seq, seq.num_tokens) is None:
                return seq
        return None

    def preempt(self, seq: Sequence) -> None:
        """Give back the room of `seq`; it waits again, with its keys on the host or to be computed
        anew."""
        self._slots.sync(seq)
        if self._save is not None:
            seq.saved = self._save(seq, seq.num_computed)
            self._counters.num_swapped_bytes += seq.saved.num_bytes
        else:
            self._counters.num_recomputed_tokens += seq.num_computed
        self.remove(seq)
        seq.num_computed = 0
        seq.num_preemptions += 1
        self._counters.num_preemptions += 1
        self.enqueue(seq)

    def _prefill_rows(self, budget: int, admit: bool) -> tuple[list[int], list[int]]:
        """Slots and chunk lengths of the sequences with prompt work, by policy, within `budget`
        tokens."""
        for seq in self.prefilling:
            self._slots.sync(seq)
        partials = sorted(self._entries(self.prefilling), reverse=True)
        # Heads without room, which others may pass, are put aside.
        rows, lens, aside = list[int](), list[int](), list[Any]()
        while budget > 0:
            head = self.head() if admit else None
            if head is not None and (not partials or head[:2] < partials[-1][:2]):
                seq = head[2]
                if not self._chunked and min(seq.remaining, self._chunk_size) > budget:
                    admit = False  # it waits for a step that holds it whole
                    continue
                if not self._admit(seq):
                    admit = self._set_aside(head, aside)
                    continue
                for _, _, passed in aside:
                    passed.num_bypassed += 1
                    admit = admit and passed.num_bypassed < self._max_bypass
            elif partials:
                seq = partials.pop()[2]
            else:
                break
            if (length := self._chunk(seq, budget)) > 0:
                assert seq.slot is not None
                if seq.first_scheduled is None:
                    seq.first_scheduled = self._clock()
                rows.append(seq.slot)
                lens.append(length)
                budget -= length
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return rows, lens

    def _chunk(self, seq: Sequence, budget: int) -> int:
        self._slots.sync(seq)
        limit = min(budget, self._chunk_size, seq.remaining)
        return min(limit, self._sched.chunk(seq, limit)) if self._chunked else limit

    def _set_aside(self, head: Entry, aside: list[Entry]) -> bool:
        """Whether others may start before `head`, which has no room: each head is passed a bounded
        number of times."""
        if not self._slots.num_free or head[2].num_bypassed >= self._max_bypass:
            return False
        aside.append(heapq.heappop(self._heap))
        return len(aside) < _MAX_ASIDE

    def _admit(self, seq: Sequence) -> bool:
        """Slot and room for the whole of `seq`'s known tokens, or nothing.

        The whole, not the first chunk: a sequence admitted on less would be preempted in its own
        prefill.
        """
        if not self._slots.num_free:
            return False
        asked = self._may_start if self.num_running else None
        if asked is not None and not asked(seq, self._kv.usage()):
            return False
        if (cached := self._kv.acquire(seq, seq.num_tokens)) is None:
            return False
        if seq.admitted is None:
            seq.admitted, seq.num_cached = self._clock(), cached
        saved, seq.saved = seq.saved, None
        seq.num_computed = cached if saved is None else max(cached, saved.num_tokens)
        del self._waiting[seq]
        self._kv.on_slot(seq, self._take_slot(seq))
        if saved is not None and self._restore is not None:
            self._restore(seq, saved, cached)
            self._counters.num_swapped_bytes += saved.num_bytes
        self.prefilling.append(seq)
        return True

    def _commit(self, slots: Int32, query_lens: Int32, num_decodes: int) -> StepPlan:
        """Advance the numbers of every row as if the step had run; publish prompt blocks it will
        write."""
        s = self._slots
        starts, num_tokens = s.num_computed[slots], s.num_tokens[slots]
        ends = starts + query_lens
        samples = ends == num_tokens
        num_tokens += samples
        s.num_computed[slots], s.num_tokens[slots] = ends, num_tokens
        if num_decodes < len(slots):
            self.publish(slots[num_decodes:])
            for slot in slots[num_decodes:][samples[num_decodes:]].tolist():
                seq = s.owner[slot]  # it is through with its prompt, and decodes from now on
                self.prefilling.remove(seq)
                self.decoding[slot], self._decoding_slots = seq, None
        for slot in slots[samples & (num_tokens >= s.max_total[slots])].tolist():
            del self.decoding[slot]  # it samples its last token, and asks for no more
            self._decoding_slots = None
        return StepPlan(slots, starts, query_lens, samples, num_decodes)

    def publish(self, slots: Int32) -> None:
        """Share what is both known and written: prompt blocks at launch, generated ones at
        harvest."""
        s = self._slots
        ready = np.minimum(s.num_computed[slots], s.num_known[slots])
        for slot in slots[ready >= self._kv.next_publish[slots]].tolist():
            seq = s.owner[slot]
            s.sync(seq)
            self._kv.publish(seq, min(seq.num_computed, seq.num_known))
