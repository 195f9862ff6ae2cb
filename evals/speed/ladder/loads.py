"""What the arms of a ladder are given to do, and one run of it.

Four loads over the same requests (lengths lognormal and exponential, as in workload w4):

- closed: so many at a time, the next when one has ended; what that comes to is the capacity;
- poisson: due at the times of a Poisson process, scaled so that the last is due at requests / rate;
- burst: all due at once;
- lone: one at a time.

Lengths and times are those of a seed. Token ids differ from run to run, so that no run finds the
prompts of an earlier one in a cache; within a run a part of every prompt is one of a few prefixes.
"""

from __future__ import annotations

import zlib
from argparse import Namespace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from evals.speed import driving
from evals.speed.driving import Clock, Request
from evals.speed.workloads import arrivals

if TYPE_CHECKING:
    from core.metrics import RequestMetrics
    from evals.speed.peers import Ours

Kind = Literal["closed", "poisson", "burst", "lone"]


class Load(NamedTuple):
    """`rate`: requests a second, of poisson. `room_tokens`: what the KV pool is to hold, None: what
    it was given."""

    kind: Kind
    rate: float | None = None
    room_tokens: int | None = None

    def __str__(self) -> str:
        rate = "" if self.rate is None else f" at {self.rate:.3g} requests/s"
        room = "" if self.room_tokens is None else f", {self.room_tokens:,} tokens of KV pool"
        return f"{self.kind}{rate}{room}"


class Mix(NamedTuple):
    """What the requests are drawn from; `--help` says what each number means."""

    num_requests: int
    num_lone: int
    prompt_median: int
    max_prompt: int
    output_mean: int
    prefix_tokens: int
    num_prefixes: int


def requests(
    mix: Mix, load: Load, *, seed: int, label: str, vocab_size: int, longest: int
) -> list[Request]:
    """In the order in which they are due; `label` is what sets the token ids of a run apart."""
    num = mix.num_lone if load.kind == "lone" else mix.num_requests
    args = Namespace(
        num_arrivals=num,
        seed=seed,
        prompt_median=mix.prompt_median,
        max_prompt=mix.max_prompt,
        output_mean=mix.output_mean,
        rate=1.0,
    )
    drawn = arrivals(args, vocab_size, zlib.crc32(label.encode()), longest)
    scale = 0.0 if load.rate is None else num / load.rate / drawn[-1].at
    groups = np.random.default_rng([seed, 3])
    ids = np.random.default_rng([seed, zlib.crc32(label.encode())])
    size = mix.num_prefixes, mix.prefix_tokens
    prefixes = ids.integers(0, vocab_size, size).tolist()
    found = []
    for request in drawn:
        prefix = prefixes[int(groups.integers(mix.num_prefixes))]
        prompt = request.prompt
        if len(prompt) > len(prefix):
            prompt = [*prefix, *prompt[len(prefix) :]]
        found.append(Request(prompt, request.num_output, request.at * scale))
    return found


class Served(NamedTuple):
    """A run: its requests in the order in which they were due, and from when to when it took, in
    seconds of the clock."""

    metrics: list[RequestMetrics]
    begin_s: float
    end_s: float


def serve(
    engine: Ours, wanted: list[Request], most_at_once: int | None, clock: Clock | None = None
) -> Served:
    """Submit each request when it is due, or (`most_at_once`) as soon as so few are running.

    Raises RunError where tokens are missing.
    """
    num_before, is_closed = len(engine.ended), most_at_once is not None
    line = driving.serve(engine, wanted, clock, max_concurrency=most_at_once, is_closed=is_closed)
    ended = {int(output.request_id): output.metrics for output in engine.ended[num_before:]}
    metrics = [ended[key] for key in line.keys]
    return Served(metrics, line.begin_s, line.begin_s + line.duration_s)
