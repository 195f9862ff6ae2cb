"""A virtual clock: workloads replayed through the real schedule and a real kv host half, no model.

A step takes what a cost model says, tokens are a function of the token before and the position, and
so a replay is exact, fast and the same everywhere. `VirtualEngine` does what the engine's loop
does, in the same order: plan, launch, land what is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from core.batch import Limits, Sequence
from core.config import RunConfig
from core.conform import bind
from core.metrics import StepCounters
from core.registry import Registry
from core.sampling import SamplingParams
from core.schedule import Schedule
from core.slots import Slots
from core.testing.rig import budget_for, tiny_facts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from core.schedule import StepPlan
    from core.seams import KVManager, Scheduler

VOCABULARY = 50_021  # a prime: neighbouring tokens and positions lead far apart


class StepCost(NamedTuple):
    """Seconds of a step: `fixed_s + prefill_s * prompt tokens + decode_s * decode rows`.

    The defaults are those of a dense model of 7 billion parameters in bf16 on an H200: its weights
    read once, 50 % of the peak in prefill, the keys and values of 1,200 tokens a row.
    """

    fixed_s: float = 6e-3
    prefill_s: float = 31e-6
    decode_s: float = 20e-6

    def seconds(self, num_prefill_tokens: int, num_decodes: int) -> float:
        return self.fixed_s + self.prefill_s * num_prefill_tokens + self.decode_s * num_decodes


class Arrival(NamedTuple):
    """A request that comes in `at` seconds. It writes `num_output` tokens and may write
    `max_tokens` (None: as many), which is all that the schedule knows beforehand."""

    at: float
    num_prompt: int
    num_output: int
    max_tokens: int | None = None
    priority: int = 0


class Row(NamedTuple):
    """Tokens lo..hi-1 of the request that arrived as number `order` (-1: of nobody)."""

    order: int
    lo: int
    hi: int


class Step(NamedTuple):
    """One step as it was planned. `planned_s` is when, in seconds; it ran until `end_s`.

    `waiting` and `prefilling` hold the orders of those that had no seat, or a seat and prompt work
    left, before it was planned.
    """

    planned_s: float
    end_s: float
    rows: tuple[Row, ...]
    num_decodes: int
    waiting: tuple[int, ...]
    prefilling: tuple[int, ...]


@dataclass
class Log:
    """What happened. `sequences` in the order of arrival; `steps` and `faults` only if recorded.

    `faults` are rows that a device would have computed wrongly, a sentence each. `stalled` says who
    was left waiting when nothing went on; None where everybody came to his end.
    """

    sequences: list[Sequence] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    stalled: str | None = None
    num_steps: int = 0
    end_s: float = 0.0
    counters: StepCounters = field(default_factory=StepCounters)

    def output(self, seq: Sequence) -> list[int]:
        """The tokens that `seq` has written."""
        return [int(token) for token in seq.token_ids[seq.num_prompt : seq.num_known]]

    def ttft_s(self) -> NDArray[np.float64]:
        """Arrival to first token of each sequence, in the order of arrival."""
        return np.array([s.token_times[s.num_prompt] - s.arrival for s in self.sequences])


def sequence_of(arrival: Arrival, order: int) -> Sequence:
    """The sequence of the `order`-th arrival. No two of them share a first token."""
    n = arrival.num_prompt
    ids = np.arange(order, order + n, dtype=np.int64) * 31_337 % VOCABULARY
    return Sequence(
        request_id=str(order),
        token_ids=ids.astype(np.int32),
        num_prompt=n,
        params=SamplingParams(),
        arrival=arrival.at,
        order=order,
        max_tokens_total=n + (arrival.max_tokens or arrival.num_output),
        num_known=n,
        num_tokens=n,
        token_times=np.zeros(n),
        metadata={"priority": arrival.priority},
    )


class _Launched(NamedTuple):
    plan: StepPlan
    slots: NDArray[np.int32]  # [n], rows that sample
    epochs: NDArray[np.int64]  # [n]
    token_ids: NDArray[np.int32]  # [n]
    seconds: float
    end_s: float


def next_token(previous: NDArray[Any], position: NDArray[Any]) -> NDArray[np.int32]:
    """The token at `position`, after the token `previous`; elementwise."""
    mixed = (previous.astype(np.int64) + 1) * 48_271 + position.astype(np.int64) * 40_692
    return (mixed % VOCABULARY).astype(np.int32)


def expected_output(seq: Sequence, num_output: int) -> list[int]:
    """What `seq` must write, whatever is batched, chunked, preempted or overlapped."""
    tokens = [seq.token_ids[seq.num_prompt - 1]]
    for position in range(seq.num_prompt, seq.num_prompt + num_output):
        tokens.append(next_token(np.array(tokens[-1]), np.array(position))[()])
    return [int(token) for token in tokens[1:]]


class VirtualEngine:
    """A schedule with a kv host half and slots, run against a virtual clock.

    `num_kv_tokens` is the room; `depth` 1 launches a step before the one before it has landed;
    `record` keeps every step and looks for faults, which is for small workloads. `on_admit(seq,
    others)` is called when `seq` gets its seat, with those that still wait. `schedule` makes the
    Schedule, for tests that break it.
    """

    def __init__(
        self,
        sched: Scheduler,
        *,
        limits: Limits,
        num_kv_tokens: int,
        kv: str = "paged",
        kv_config: Mapping[str, Any] | None = None,
        sharing: bool = False,
        cost: StepCost | None = None,
        chunk_size: int | None = None,
        chunked: bool = True,
        max_bypass: int = 0,
        depth: int = 0,
        record: bool = False,
        on_admit: Callable[[Sequence, list[Sequence]], None] | None = None,
        schedule: Callable[..., Schedule] = Schedule,
    ) -> None:
        self.now = 0.0
        self.kv, self.limits = bound_kv(kv, kv_config or {}, limits, num_kv_tokens, sharing)
        self.slots = Slots(self.limits)
        self.log = Log()
        self._sched, self._cost = sched, cost or StepCost()
        self._depth, self._record, self._on_admit = depth, record, on_admit
        self._device_free_s = 0.0
        self._in_flight: deque[_Launched] = deque()
        self._live: dict[Sequence, int] = {}  # sequence -> number of tokens at which it ends
        self._ends_at = np.zeros(limits.max_num_seqs + 1, np.int32)
        self._last_token = np.zeros(limits.max_num_seqs + 1, np.int32)
        self._written = np.zeros(limits.max_num_seqs + 1, np.int32)  # tokens, where recorded
        self._sharing = sharing
        self._observe = getattr(sched, "observe", None)
        config = RunConfig(
            chunk_size=chunk_size, enable_chunked_prefill=chunked, max_bypass=max_bypass
        )
        self.schedule = schedule(
            self.limits,
            self.kv,
            sched,
            self.slots,
            self.log.counters,
            config,
            clock=lambda: self.now,
            drain=self._drain,
            admit=self._take_slot,
        )

    def run(self, arrivals: Iterable[Arrival]) -> Log:
        """Serve `arrivals` to their end, or until two plans in a row are empty with somebody
        waiting."""
        coming = deque(sorted(arrivals, key=lambda arrival: arrival.at))
        num_idle = 0
        while coming or self._live:
            if not self._live:
                self.now = max(self.now, coming[0].at)
            while coming and coming[0].at <= self.now:
                self._enqueue(coming.popleft())
            if self._step():
                num_idle = 0
                continue
            num_idle += 1
            self.now += self._cost.fixed_s
            if num_idle == 2:
                names = ", ".join(seq.request_id for seq in self._live)
                self.log.stalled = f"nothing goes on at {self.now:.3f} s and {names} have not ended"
                break
        self.log.end_s = self.now
        self.kv.check_integrity()
        return self.log

    # ------------------------------------------------------------------------------- requests

    def _enqueue(self, arrival: Arrival) -> None:
        seq = sequence_of(arrival, len(self.log.sequences))
        self.log.sequences.append(seq)
        self._live[seq] = seq.num_prompt + arrival.num_output
        self.schedule.enqueue(seq)

    def _take_slot(self, seq: Sequence) -> int:
        slot = self.slots.take(seq, seq.order, ())
        self._ends_at[slot] = self._live[seq]
        self._written[slot] = seq.num_computed if self._sharing else 0
        if self._on_admit is not None:
            self._on_admit(seq, [s for s in self._live if s.slot is None])
        return slot

    def _finish(self, seq: Sequence) -> None:
        self.schedule.remove(seq)
        del self._live[seq]

    # ---------------------------------------------------------------------------------- steps

    def _step(self) -> bool:
        """Plan, launch, land what is due. False where there was nothing to do."""
        waiting, prefilling = self._queues() if self._record else ((), ())
        planned_s = self.now
        plan = self.schedule.plan()
        if plan is not None:
            launched = self._launch(plan)
            self._in_flight.append(launched)
            self.log.num_steps += 1
            if self._record:
                rows = tuple(self._rows(plan))
                step = Step(planned_s, launched.end_s, rows, plan.num_decodes, waiting, prefilling)
                self.log.steps.append(step)
        due = 0 if plan is None else self._depth
        landed = len(self._in_flight) > due
        while len(self._in_flight) > due:
            self._land(self._in_flight.popleft())
        return landed or plan is not None

    def _launch(self, plan: StepPlan) -> _Launched:
        num_prefill = int(plan.query_lens[plan.num_decodes :].sum())
        seconds = self._cost.seconds(num_prefill, plan.num_decodes)
        self._device_free_s = max(self.now, self._device_free_s) + seconds
        s, slots = self.slots, plan.slots[plan.samples]
        last = (plan.starts + plan.query_lens)[plan.samples] - 1
        known = last < s.num_known[slots]
        read = np.where(known, s.tokens[slots, last], self._last_token[slots])
        token_ids = next_token(read, last + 1)
        self._last_token[slots] = token_ids
        return _Launched(plan, slots, s.epoch[slots], token_ids, seconds, self._device_free_s)

    def _land(self, step: _Launched) -> None:
        self.now = max(self.now, step.end_s)
        if self._observe is not None:
            num_tokens = int(step.plan.query_lens.sum())
            self._observe(num_tokens, len(step.plan.slots), step.seconds)
        s = self.slots
        live = s.epoch[step.slots] == step.epochs
        slots = step.slots[live]
        known = s.num_known[slots]
        s.tokens[slots, known] = step.token_ids[live]
        s.token_times[slots, known] = self.now
        s.num_known[slots] = known + 1
        ended = known + 1 >= self._ends_at[slots]
        self.schedule.publish(slots[~ended])
        for slot in slots[ended].tolist():
            owner = s.owner[slot]
            if owner is not None:
                self._finish(owner)

    def _drain(self) -> bool:
        busy = bool(self._in_flight)
        while self._in_flight:
            self._land(self._in_flight.popleft())
        return busy

    # ------------------------------------------------------------------------------- recording

    def _queues(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        waiting = tuple(seq.order for seq in self._live if seq.slot is None)
        return waiting, tuple(seq.order for seq in self.schedule.prefilling)

    def _rows(self, plan: StepPlan) -> Iterable[Row]:
        """The rows of a plan; one that no device could compute is a fault."""
        s, seen, fault = self.slots, set[int](), self.log.faults.append
        rows = zip(plan.slots.tolist(), plan.starts.tolist(), plan.query_lens.tolist(), strict=True)
        for i, (slot, lo, n) in enumerate(rows):
            owner, hi = s.owner[slot], lo + n
            if slot in seen:
                fault(f"slot {slot} has two rows in one step")
            if owner is None:
                fault(f"slot {slot} has a row and no owner")
            elif hi > self.kv.reserved[slot]:
                held = int(self.kv.reserved[slot])
                fault(f"request {owner.order} writes {hi} tokens into room for {held}")
            if lo != self._written[slot]:
                fault(f"slot {slot} goes on at {lo} and {self._written[slot]} tokens are written")
            if i < plan.num_decodes and n != 1:
                fault(f"a decode row of {n} tokens")
            if hi > s.num_known[slot] + (i < plan.num_decodes and self._depth):
                fault(f"tokens {lo}..{hi - 1} of slot {slot} and {s.num_known[slot]} are known")
            seen.add(slot)
            self._written[slot] = hi
            yield Row(-1 if owner is None else owner.order, lo, hi)


def bound_kv(
    name: str, config: Mapping[str, Any], limits: Limits, num_tokens: int, sharing: bool
) -> tuple[KVManager, Limits]:
    """A manager with room for `num_tokens`, its tensors as small as can be; and the limits it
    keeps."""
    offer: Any = Registry().find("kv", name).load()
    kv = bind("kv", offer(offer.Config(**config)))
    if kv.prefix_sharing:
        kv.sharing = sharing
    small = replace(tiny_facts(), num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2)
    num_bytes = budget_for(kv, small, limits, num_tokens)
    capacity = kv.capacity(num_bytes, small, limits)
    kept = replace(limits, max_num_seqs=min(limits.max_num_seqs, capacity.num_seqs))
    kv.bind(small, kept, num_bytes, torch.device("cpu"))
    return cast("KVManager", kv), kept


def percentiles(values: Seq[float] | NDArray[Any], *points: float) -> list[float]:
    """Percentiles 0..100, each one of the values that occurred (the nearest rank, as for SLOs)."""
    return [float(x) for x in np.percentile(np.asarray(values), points, method="inverted_cdf")]
