"""The conformance suite of the sched seam. Subclass it, name the offer, and run pytest:

    class TestDeadline(SchedulerSuite):
        plugin = "deadline"                   # by registered name, or `offer = Deadline`
        config = {"slack_s": 0.5}
        short_passes_long = True              # what the offer promises beyond the contract

Every test states one clause of the contract in `core.seams.Scheduler`, or what the core keeps
whatever the policy says. The policy runs in the real schedule, against a virtual clock.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from core.batch import Limits
from core.schedule import Schedule
from core.testing.clock import (
    Arrival,
    Log,
    Step,
    StepCost,
    VirtualEngine,
    expected_output,
    sequence_of,
)
from core.testing.suite import Suite

if TYPE_CHECKING:
    from core.batch import Sequence
    from core.seams import Scheduler

MAX_LEN, MOST_OUTPUT = 160, 40  # tokens of the longest request here, and of the longest output
BLOCK_SIZE = 4
LIMITS = Limits(MAX_LEN, 6, 48)
PLENTY = LIMITS.max_num_seqs * MAX_LEN  # tokens of room for every seat
SCARCE = MAX_LEN + 8 * BLOCK_SIZE  # for the longest request, and not much more
COST = StepCost(fixed_s=2e-3, prefill_s=1e-4, decode_s=1e-4)
FULL_STEP_S = COST.seconds(LIMITS.max_num_batched_tokens, LIMITS.max_num_seqs)


class SchedulerSuite(Suite):
    """What every Scheduler keeps. Class attributes say which one, and what it promises.

    `short_passes_long`: whether a short prompt that comes in behind a long one, half done, is
    served before it; None: no promise. `schedule` makes the Schedule, for those who break it.
    """

    seam: ClassVar[str] = "sched"
    short_passes_long: ClassVar[bool | None] = None
    schedule: ClassVar[Callable[..., Schedule]] = Schedule
    # Of a random workload: what was asked for last, and how many there may be (None: as many).
    num_drawn, most_requests = 0, None

    def pass_bound_s(self, sched: Any, seq: Sequence) -> float:
        """Seconds after the arrival of `seq` from which on nothing that arrives passes it, of equal
        priority. What the offer says in its own `pass_bound_s(seq)`; inf if it promises nothing."""
        declared = getattr(sched, "pass_bound_s", None)
        return math.inf if declared is None else float(declared(seq))

    # ------------------------------------------------------------------------------- helpers

    def make(self) -> Scheduler:
        """A fresh scheduler."""
        return cast("Scheduler", self.made())

    def run(
        self, arrivals: Iterable[Arrival], sched: Any = None, **options: Any
    ) -> tuple[Log, VirtualEngine]:
        """Serve `arrivals`, with every step recorded."""
        engine = VirtualEngine(
            sched or self.make(),
            record=True,
            on_admit=getattr(sched, "on_admit", None),
            schedule=type(self).schedule,
            **{**_DEFAULTS, **options},
        )
        if isinstance(sched, Watched):
            sched.clock = lambda: engine.now
        return engine.run(arrivals), engine

    def _expect_preemptions(self, log: Log) -> None:
        """A run with scarce room was about them, unless the offer starts fewer than would fit."""
        if self.most_requests is None:
            assert log.counters.num_preemptions > 0 or hasattr(self.make(), "may_start")

    # -------------------------------------------------------------------------------- the offer

    def test_keys_are_a_total_order(self) -> None:
        """Of any two one comes first or they tie; one that comes first of two is before both."""
        sched, seqs = self.make(), _sequences(self.arrivals(20))
        keys = [sched.key(seq, 5.0) for seq in seqs]
        for a, b in combinations(keys, 2):
            assert (a < b) + (b < a) + (a == b) == 1, f"{a!r} and {b!r} stand in no order"
        ranked = sorted(keys)
        assert all(not later < earlier for earlier, later in combinations(ranked, 2))

    def test_keys_stand_still(self) -> None:
        """What lives in a heap must not depend on when it is asked, or on who asked before."""
        sched, seqs = self.make(), _sequences(self.arrivals(20))
        assert sched.rekey in ("never", "step")
        clocks = (5.0, 5.0, 60.0, 1e6) if sched.rekey == "never" else (5.0, 5.0)
        first = [sched.key(seq, 5.0) for seq in seqs]
        for clock in clocks:
            again = [sched.key(seq, clock) for seq in reversed(seqs)][::-1]
            assert again == first, f"keys at {clock} s differ from those at 5 s"

    def test_chunks_are_within_the_budget(self) -> None:
        for pool in (PLENTY, SCARCE):
            watched = Watched(self.make())
            self.run(self.arrivals(30), watched, num_kv_tokens=pool)
            assert watched.wrong_chunks == [], watched.wrong_chunks[0]
            assert watched.num_chunks > 0

    def test_a_victim_is_never_more_urgent(self) -> None:
        """By the scheduler's own key, and one of those it was shown."""
        for seed in range(3):
            watched = Watched(self.make())
            log, _ = self.run(self.arrivals(30, seed), watched, num_kv_tokens=SCARCE)
            assert watched.wrong_victims == [], watched.wrong_victims[0]
            self._expect_preemptions(log)

    def test_a_victim_is_chosen_at_the_time_of_the_plan(self) -> None:
        """`victim` gets no clock: it goes by that of the last `key`, whatever the time is."""
        for now in (5.0, 60.0, 1e6):
            sched = Watched(self.make())
            sched.clock = functools.partial(float, now)
            *running, for_seq = _sequences(self.arrivals(20))
            for _ in range(len(running)):
                for seq in (*running, for_seq):
                    sched.key(seq, now)
                chosen = sched.victim(running, for_seq)
                for_seq, *running = (seq for seq in (*running, for_seq) if seq is not chosen)
                assert sched.wrong_victims == [], f"at {now:g} s {sched.wrong_victims[0]}"

    # ------------------------------------------------------------------- what the core keeps

    def test_every_request_ends_as_it_should(self) -> None:
        """With a token for each it wanted, and everything given back."""
        arrivals = self.arrivals(40)
        for depth in (0, 1):
            log, engine = self.run(arrivals, depth=depth)
            wanted = [a.num_output for a in arrivals]
            written = [seq.num_output for seq in log.sequences]
            assert written == wanted, f"{written} tokens were written where {wanted} were asked for"
            assert engine.kv.usage().num_held == 0
            assert engine.slots.num_free == LIMITS.max_num_seqs

    def test_somebody_goes_on_in_every_pool(self) -> None:
        """From room for the longest request alone on, no two plans in a row are empty while
        somebody waits."""
        for num_spare_blocks in (0, 1, 9):
            pool = MAX_LEN + num_spare_blocks * BLOCK_SIZE
            for depth in (0, 1):
                log, _ = self.run(self.arrivals(16, longest=True), num_kv_tokens=pool, depth=depth)
                assert log.stalled is None, log.stalled

    def test_steps_keep_within_their_limits(self) -> None:
        """Tokens of a step, its rows, tokens of a chunk."""
        for limits, chunk in ((LIMITS, None), (LIMITS, 7), (Limits(MAX_LEN, 9, 9), None)):
            log, _ = self.run(self.arrivals(25), limits=limits, chunk_size=chunk)
            for step in log.steps:
                lengths = [row.hi - row.lo for row in step.rows]
                assert sum(lengths) <= limits.max_num_batched_tokens, f"{lengths} for {limits}"
                assert len(lengths) <= limits.max_num_seqs, f"{lengths} for {limits}"
                assert max(lengths) <= (chunk or MAX_LEN), f"{lengths}, chunk_size is {chunk}"

    def test_rows_are_what_a_device_can_compute(self) -> None:
        """Each slot once, with an owner, in its room, going on where it ended, over known tokens;
        also where somebody has just given way."""
        for depth in (0, 1):
            for pool in (PLENTY, SCARCE):
                log, _ = self.run(self.arrivals(25), num_kv_tokens=pool, depth=depth)
                assert not log.faults, log.faults[0]

    def test_a_prompt_is_one_chunk_where_chunking_is_off(self) -> None:
        limits = Limits(MAX_LEN, 6, MAX_LEN)
        log, _ = self.run(self.arrivals(25), limits=limits, chunked=False)
        for step in log.steps:
            for row in step.rows[step.num_decodes :]:
                num_prompt = log.sequences[row.order].num_prompt
                assert (row.lo, row.hi) == (0, num_prompt), f"{row} of a prompt of {num_prompt}"

    def test_preemption_keeps_the_output(self) -> None:
        """Who gives way goes on, in the end, as if it never had."""
        arrivals = self.arrivals(30)
        for depth in (0, 1):
            log, _ = self.run(arrivals, num_kv_tokens=SCARCE, depth=depth)
            self._expect_preemptions(log)
            for seq, arrival in zip(log.sequences, arrivals, strict=False):
                wanted = expected_output(seq, arrival.num_output)
                got = log.output(seq)
                assert got == wanted[: len(got)], f"request {seq.order} wrote something else"

    def test_the_same_arrivals_give_the_same_steps(self) -> None:
        for pool in (PLENTY, SCARCE):
            runs = [self.run(self.arrivals(30), num_kv_tokens=pool)[0] for _ in range(2)]
            pairs = enumerate(zip(runs[0].steps, runs[1].steps, strict=False))
            other = next(
                (f"step {i} is {a.rows} and {b.rows}" for i, (a, b) in pairs if a != b), ""
            )
            assert not other, other
            assert len(runs[0].steps) == len(runs[1].steps)

    def test_decodes_go_on_while_prompts_arrive(self) -> None:
        """Whoever writes gets a token from every step, however many prompts come in."""
        first = Arrival(0.0, 5, 40)
        flood = [Arrival(0.001 + i * 4e-3, 40, 2) for i in range(60)]
        log, _ = self.run([first, *flood])
        seq = log.sequences[0]
        assert seq.num_output == 40, f"{seq.num_output} of 40 tokens were written"
        times = seq.token_times[seq.num_prompt : seq.num_known]
        gap = float(np.diff(times).max())
        assert gap <= FULL_STEP_S + 1e-9, (
            f"no token for {gap:.4f} s, a step takes {FULL_STEP_S:.4f}"
        )
        for step in log.steps:
            if times[0] <= step.planned_s < times[-1]:
                orders = [row.order for row in step.rows[: step.num_decodes]]
                assert 0 in orders, f"the step at {step.planned_s:.3f} s has no token for it"

    def test_a_head_without_room_is_passed_a_bounded_number_of_times(self) -> None:
        """By those that stand behind it in the scheduler's own order, and would fit."""
        big = Arrival(0.011, MAX_LEN - 20, 2, priority=-1)
        small = [Arrival(i * 5e-3, 8, 12) for i in range(60)]
        for max_bypass in (0, 3):
            for arrivals in ([big, *small], self.arrivals(40)):
                watched = Watched(self.make())
                self.run(arrivals, watched, num_kv_tokens=MAX_LEN, max_bypass=max_bypass)
                most = max(watched.num_passed.values(), default=0)
                assert most <= max_bypass, f"passed {most} times, and {max_bypass} is the limit"

    # ------------------------------------------------------------------ what the offer promises

    def test_short_behind_long_is_as_declared(self) -> None:
        """A long prompt is under way; a short one comes in. Whose token is first?"""
        limits = Limits(2048, 4, 64)
        long, short = Arrival(0.0, 1600, 3), Arrival(3.5 * COST.seconds(64, 0), 3, 3)
        log, _ = self.run([long, short], limits=limits, num_kv_tokens=4 * 2048)
        first = [float(seq.token_times[seq.num_prompt]) for seq in log.sequences]
        if self.short_passes_long is not None:
            assert (first[1] < first[0]) == self.short_passes_long, (
                f"a short prompt behind a long one has its token at {first[1]:.3f} s, "
                f"the long one at {first[0]:.3f} s; short_passes_long: {self.short_passes_long}"
            )
        if self.short_passes_long:
            assert log.ttft_s()[1] <= 2 * FULL_STEP_S, "it waited for more than a step to end"

    def test_nobody_is_passed_by_those_who_come_later_than_declared(self) -> None:
        """More arrives than can be served, and long prompts are among it from the start."""
        rng = np.random.default_rng(3)
        longs = [Arrival(0.011 * i, 100 + 5 * i, 2) for i in range(6)]
        times = np.cumsum(rng.exponential(5e-3, 500))
        shorts = [Arrival(float(t), int(rng.integers(2, 60)), 2) for t in times]
        arrivals, sched = [*longs, *shorts], self.make()
        log, _ = self.run(arrivals, sched)
        bounds = [
            self.pass_bound_s(sched, sequence_of(arrival, order))
            for order, arrival in enumerate(sorted(arrivals, key=lambda arrival: arrival.at))
        ]
        assert log.counters.num_preemptions == 0
        for step in log.steps:
            for early, late in _passes(step):
                seq = log.sequences[early]
                gap = log.sequences[late].arrival - seq.arrival
                assert gap <= bounds[early] + 1e-9, (
                    f"request {early} of {seq.num_prompt} tokens is passed by one that arrives "
                    f"{gap:.3f} s later; declared: {bounds[early]:.3f} s"
                )

    def arrivals(self, num: int, seed: int = 0, *, longest: bool = False) -> list[Arrival]:
        """A random workload: bursts, prompts of all lengths, priorities, ends that come early.

        `longest` makes every fourth prompt as long as can be.
        """
        self.num_drawn, most = num, self.most_requests
        return random_arrivals(num if most is None else min(num, most), seed, longest=longest)


class Watched:
    """A scheduler whose answers are compared with its own order while it is used."""

    def __init__(self, sched: Any) -> None:
        self._sched = sched
        self.clock: Callable[[], float] = lambda: 0.0
        self.num_chunks = 0
        self.wrong_chunks: list[str] = []
        self.wrong_victims: list[str] = []
        self.num_passed: dict[int, int] = {}  # order -> admissions of others that stood behind it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sched, name)

    def chunk(self, seq: Sequence, budget: int) -> int:
        length = int(self._sched.chunk(seq, budget))
        self.num_chunks += 1
        if not 0 <= length <= budget:
            self.wrong_chunks.append(f"{length} of {budget} tokens for {seq.request_id}")
        return length

    def victim(self, running: list[Sequence], for_seq: Sequence) -> Sequence | None:
        chosen: Sequence | None = self._sched.victim(running, for_seq)
        if chosen is None:
            return None
        if chosen not in running:
            self.wrong_victims.append(f"{chosen.request_id} does not run")
        elif self._place(chosen) <= self._place(for_seq):
            self.wrong_victims.append(
                f"{self._place(chosen)} gives way to {self._place(for_seq)}, which is less urgent"
            )
        return chosen

    def on_admit(self, seq: Sequence, others: list[Sequence]) -> None:
        for other in others:
            if self._place(other) < self._place(seq):
                self.num_passed[other.order] = self.num_passed.get(other.order, 0) + 1

    def _place(self, seq: Sequence) -> tuple[Any, int]:
        return self._sched.key(seq, self.clock()), seq.order


def random_arrivals(num: int, seed: int, *, longest: bool = False) -> list[Arrival]:
    """See `SchedulerSuite.arrivals`."""
    rng = np.random.default_rng(seed)
    found, at = [], 0.0
    for i in range(num):
        at += float(rng.exponential(0.01)) * (rng.random() < 0.6)
        max_tokens = int(rng.integers(1, MOST_OUTPUT + 1))
        num_prompt = MAX_LEN - MOST_OUTPUT - int(rng.integers(0, MAX_LEN - MOST_OUTPUT))
        if longest and i % 4 == 0:
            num_prompt, max_tokens = MAX_LEN - 3, 3
        num_output = max_tokens if rng.random() < 0.6 else int(rng.integers(1, max_tokens + 1))
        priority = int(rng.integers(-2, 3))
        found.append(Arrival(at, num_prompt, num_output, max_tokens, priority))
    return found


def _sequences(arrivals: Iterable[Arrival]) -> list[Sequence]:
    return [sequence_of(arrival, order) for order, arrival in enumerate(arrivals)]


def _passes(step: Step) -> Iterable[tuple[int, int]]:
    """Pairs (early, late): the later arrival computes prompt tokens in this step, and the earlier
    one, which has some left, does not."""
    served = {row.order for row in step.rows[step.num_decodes :]}
    left_out = [order for order in (*step.waiting, *step.prefilling) if order not in served]
    return ((early, late) for early in left_out for late in served if early < late)


_DEFAULTS: Mapping[str, Any] = {
    "limits": LIMITS,
    "num_kv_tokens": PLENTY,
    "kv_config": {"block_size": BLOCK_SIZE},
    "cost": COST,
}
