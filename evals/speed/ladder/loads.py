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

from core.errors import RunError
from evals.speed.peers import TEMPERATURE, Ours
from evals.speed.workloads import Clock, Request, arrivals

if TYPE_CHECKING:
    from core.metrics import RequestMetrics

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


class Timed(Ours):
    """An Engine that is told when each request was due, so that all of its waiting counts."""

    due: float | None = None

    def add(self, key: int, prompt: list[int], max_tokens: int) -> None:
        from core.sampling import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=TEMPERATURE, ignore_eos=True)
        self.engine.add_request(prompt, params, str(key), arrival=self.due)
        self.prompt_lens[key] = len(prompt)


class Served(NamedTuple):
    """A run: its requests in the order in which they were due, and from when to when it took, in
    seconds of the clock."""

    metrics: list[RequestMetrics]
    begin_s: float
    end_s: float


def serve(
    engine: Timed, wanted: list[Request], most_at_once: int | None, clock: Clock | None = None
) -> Served:
    """Submit each request when it is due, or (`most_at_once`) as soon as so few are running.

    Raises RunError where tokens are missing.
    """
    clock = clock or Clock()
    begin, num_sent, keys = clock.now(), 0, []
    num_before = len(engine.ended)
    while num_sent < len(wanted) or engine.pending():
        now = clock.now()
        while num_sent < len(wanted):
            request = wanted[num_sent]
            if most_at_once is None:
                if begin + request.at > now:
                    break
                engine.due = begin + request.at
            else:
                if num_sent - (len(engine.ended) - num_before) >= most_at_once:
                    break
                engine.due = now
            keys.append(engine.submit(request.prompt, request.num_output))
            num_sent += 1
        if engine.pending():
            engine.step()
        else:
            clock.sleep(max(0.0, begin + wanted[num_sent].at - clock.now()))
    end = clock.now()
    ended = {int(output.request_id): output.metrics for output in engine.ended[num_before:]}
    metrics = [ended[key] for key in keys]
    missing = sum(r.num_output for r in wanted) - sum(m.num_output_tokens for m in metrics)
    if missing:
        raise RunError(f"{missing} tokens of those asked for are missing")
    return Served(metrics, begin, end)
