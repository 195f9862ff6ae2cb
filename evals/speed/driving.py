"""Driving an engine under a clock: what a workload gives it, when its tokens came, what is kept.

A token has arrived when `step` has returned it, so it is on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple

from core.errors import RunError, UserError

if TYPE_CHECKING:
    import numpy as np

    from evals.speed.peers import News, Peer


class Clock(NamedTuple):
    """Seconds of a monotonic clock, and how to wait on it."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


class Request(NamedTuple):
    """`at` is when it is due, in seconds from the start of the workload."""

    prompt: Seq[int]
    num_output: int
    at: float = 0.0


class Result(NamedTuple):
    """One repetition of a workload. `figures` are compared between engines, None where too few
    samples carry one; `raw` is what they were read off; `refused` are sentences, by what was left
    out; `num_samples` says of how many samples a figure is, where it is of samples; `notes` are
    sentences that whoever reads the figures must know; `is_saturated` voids its latencies."""

    figures: dict[str, float | None]
    raw: dict[str, Any]
    refused: dict[str, str]
    num_samples: dict[str, int]
    notes: list[str]
    is_saturated: bool = False

    @classmethod
    def empty(cls) -> Result:
        return cls({}, {}, {}, {}, [])


class Driver:
    """An engine under a clock, and random prompts for it."""

    def __init__(self, engine: Peer, clock: Clock, rng: np.random.Generator) -> None:
        self.engine, self.clock, self.now = engine, clock, clock.now
        self._rng = rng

    def prompt(self, num_tokens: int) -> list[int]:
        return self._rng.integers(0, self.engine.setup.vocab_size, num_tokens).tolist()  # type: ignore[no-any-return]

    def add(self, prompt: list[int], num_output: int) -> int:
        return self.engine.submit(prompt, num_output)

    def news(self) -> list[News]:
        """Step until tokens arrive."""
        while self.engine.pending():
            if found := [news for news in self.engine.step() if news.num_tokens]:
                return found
        raise RunError(f"{self.engine.name} has nothing left to do and owes tokens")

    def drain(self) -> None:
        while self.engine.pending():
            self.engine.step()


class Timeline(NamedTuple):
    """A run of requests, in their order: when each was due, was sent, and got its tokens, in
    seconds from `begin_s` of the clock. `refused` has, by number, why an engine did not take one;
    `busy_s` is the time inside steps."""

    begin_s: float
    duration_s: float
    busy_s: float
    due_s: list[float]
    sent_s: list[float]
    token_times_s: list[list[float]]
    keys: list[int]
    refused: dict[int, str]
    most_running: int


def serve(
    engine: Peer,
    wanted: Seq[Request],
    clock: Clock | None = None,
    *,
    max_concurrency: int | None = None,
    is_closed: bool = False,
    takes_refusals: bool = False,
) -> Timeline:
    """Submit requests at the first step that begins after they were due, `max_concurrency` of them
    at once at most, and step to the end of the last.

    Whoever waits for one of these places was due all the same, and all of his waiting counts; in a
    closed loop (`is_closed`) a request is due when its place is free, whatever its `at`. Raises
    RunError where tokens are missing, and what the engine raises where it refuses a request, which
    with `takes_refusals` is put down instead.
    """
    clock = clock or Clock()
    begin, num_sent, num_running, most, busy = clock.now(), 0, 0, 0, 0.0
    due, sent, keys = list[float](), list[float](), list[int]()
    times: list[list[float]] = [[] for _ in wanted]
    refused: dict[int, str] = {}
    place: dict[int, int] = {}
    while num_sent < len(wanted) or engine.pending():
        now = clock.now()
        while num_sent < len(wanted) and (max_concurrency is None or num_running < max_concurrency):
            request = wanted[num_sent]
            due_s = now if is_closed else begin + request.at
            if due_s > now:
                break
            due.append(due_s - begin)
            sent.append(now - begin)
            key = -1
            try:
                key = engine.submit(list(request.prompt), request.num_output, due_s)
                place[key] = num_sent
                num_running += 1
            except UserError as error:
                if not takes_refusals:
                    raise
                refused[num_sent] = str(error)
            keys.append(key)
            num_sent += 1
        most = max(most, num_running)
        if not engine.pending():
            if num_sent < len(wanted) and not is_closed:
                clock.sleep(max(0.0, begin + wanted[num_sent].at - clock.now()))
            continue
        began = clock.now()
        found = engine.step()
        stamp = clock.now()
        busy += stamp - began
        for news in found:
            times[place[news.key]] += [stamp - begin] * news.num_tokens
            num_running -= news.finished
    taken = [r for i, r in enumerate(wanted) if i not in refused]
    if missing := sum(r.num_output for r in taken) - sum(map(len, times)):
        raise RunError(f"{engine.name} owes {missing} tokens of those asked for")
    end = clock.now()
    return Timeline(begin, end - begin, busy, due, sent, times, keys, refused, most)
