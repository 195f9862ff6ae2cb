"""What the workload `serve` is asked for: lengths and arrivals, drawn or from a trace.

Lengths are fixed, uniform or lognormal. Gaps between arrivals are gamma distributed: `burstiness` 1
is a Poisson process, less is burstier (their coefficient of variation is 1 / sqrt(burstiness)),
infinity is a steady beat. Times are scaled so that the last of n requests is due at n / rate
whatever the seed, as `vllm bench serve` has it; a rate, and the speed of a trace, are scales of
time alone.
"""

from __future__ import annotations

import argparse
import math
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from core.errors import UserError
from evals.arguments import count, positive
from evals.speed.driving import Request
from evals.speed.traces import HASH_BLOCK, Item, described, fitting, read_trace, source_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

Arrivals = Literal["open", "closed", "burst"]
NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN = 1000, 1024, 128  # those of `vllm bench serve`

_LONGEST = 1 << 31  # tokens; no engine takes as many


@dataclass(frozen=True)
class Lengths:
    """A distribution of numbers of tokens, 1 or more: always `a`; uniform from `a` to `b`, ends
    included; or lognormal of median `a` and sigma `b`."""

    kind: Literal["fixed", "uniform", "lognormal"]
    a: int
    b: float = 0.0

    def draw(self, num: int, rng: np.random.Generator) -> list[int]:
        if self.kind == "fixed":
            return [self.a] * num
        if self.kind == "uniform":
            return rng.integers(self.a, int(self.b) + 1, num).tolist()  # type: ignore[no-any-return]
        drawn = np.minimum(rng.lognormal(math.log(self.a), self.b, num), _LONGEST)
        return [max(1, round(x)) for x in drawn.tolist()]

    def __str__(self) -> str:
        return {
            "fixed": f"{self.a}",
            "uniform": f"uniform:{self.a}:{self.b:g}",
            "lognormal": f"lognormal:{self.a}:{self.b:g}",
        }[self.kind]


def lengths(text: str) -> Lengths:
    """N, uniform:LO:HI or lognormal:MEDIAN:SIGMA, as a type of argparse."""
    kind, *numbers = text.split(":")
    if not numbers:
        return Lengths("fixed", count(kind))
    if kind == "fixed" and len(numbers) == 1:
        return Lengths("fixed", count(numbers[0]))
    if kind == "uniform" and len(numbers) == 2:
        lo, hi = map(count, numbers)
        if lo <= hi <= _LONGEST:
            return Lengths("uniform", lo, hi)
    if kind == "lognormal" and len(numbers) == 2:
        return Lengths("lognormal", count(numbers[0]), positive(numbers[1]))
    raise argparse.ArgumentTypeError(
        f"{text} is none of N, uniform:LO:HI (LO up to HI, below 2^31), lognormal:MEDIAN:SIGMA"
    )


def rate(text: str) -> float:
    """Requests a second, or inf, as a type of argparse."""
    return math.inf if text == "inf" else positive(text)


def due_times(num: int, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Of `num` requests at a rate of 1; the last is due at `num`."""
    if math.isinf(burstiness):
        return [i + 1.0 for i in range(num)]
    at = np.cumsum(rng.gamma(burstiness, 1 / burstiness, num))
    return (at * (num / at[-1])).tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Demand:
    """Requests in order. Their `at` is at a rate of 1 request a second, or that of the trace;
    `speed` is what it is divided by, None where that follows from the capacity."""

    name: str
    arrivals: Arrivals
    items: Seq[Item]
    dropped: dict[str, int]
    speed: float | None
    hash_block: int
    about: dict[str, Any]

    @property
    def span_s(self) -> float:
        """From the start to the last one that is due, at a speed of 1."""
        return self.items[-1].at

    @property
    def offered_rate(self) -> float:
        """Requests a second at a speed of 1, as far as any are offered in time."""
        return len(self.items) / self.span_s if self.span_s else math.inf

    def at_utilisation(self, utilisation: float, capacity_s: float) -> Demand:
        """At a speed at which an engine that takes `capacity_s` for all of them at once is busy for
        that share of the time in which they come."""
        return replace(self, speed=utilisation * self.span_s / capacity_s)

    def requests(self, vocab_size: int, seed: Seq[int]) -> list[Request]:
        """With random tokens, others for every `seed`. Blocks of one number are of equal tokens.
        Due at once where they are due whenever there is a place, and where no speed is known."""
        in_time = self.arrivals == "open" and self.speed is not None
        scale = 1 / self.speed if in_time and self.speed else 0.0
        rng = np.random.default_rng([*seed, 0])
        return [
            Request(self._prompt(item, vocab_size, seed, rng), item.num_output, item.at * scale)
            for item in self.items
        ]

    def _prompt(
        self, item: Item, vocab_size: int, seed: Seq[int], rng: np.random.Generator
    ) -> array[int]:
        """Four bytes a token: a trace has a hundred million of them."""
        if not item.blocks:
            return _compact(rng.integers(0, vocab_size, item.num_prompt))
        found = array("i")
        for block in item.blocks:
            own = np.random.default_rng([*seed, 1, block])
            found += _compact(own.integers(0, vocab_size, self.hash_block))
        return found[: item.num_prompt]


def _compact(ids: NDArray[np.int64]) -> array[int]:
    return array("i", ids.astype(np.int32).tobytes())


def demand_of(args: argparse.Namespace) -> Demand:
    """What the command line asks for. Raises UserError where its parts do not go together."""
    _check(args)
    return _drawn(args) if args.trace is None else _recorded(args)


def _recorded(args: argparse.Namespace) -> Demand:
    trace = read_trace(
        args.trace,
        max_model_len=args.max_model_len,
        num_requests=args.num_prompts,
        source=source_of(args),
    )
    if not trace.span_s:
        raise UserError(f"all requests of {args.trace} come at once: there is no time to scale")
    about = {**described(trace), "jitter_s": trace.jitter_s}
    speed = None if args.utilisation else args.speed or 1.0
    return Demand(trace.name, "open", trace.arrivals, trace.dropped, speed, trace.hash_block, about)


def _drawn(args: argparse.Namespace) -> Demand:
    num, rng = args.num_prompts or NUM_PROMPTS, np.random.default_rng([args.seed, 13])
    num_prompt = (args.input_len or Lengths("fixed", INPUT_LEN)).draw(num, rng)
    num_output = (args.output_len or Lengths("fixed", OUTPUT_LEN)).draw(num, rng)
    at = due_times(num, args.burstiness or 1.0, rng)
    items = map(Item, at, num_prompt, num_output)
    kept, dropped = fitting(items, args.max_model_len)
    if not kept:
        raise UserError(
            f"none of {num} requests is within {args.max_model_len} tokens: raise --max-model-len "
            "or lower --input-len or --output-len"
        )
    offered = args.request_rate or math.inf
    arrivals: Arrivals = "open"
    if math.isinf(offered) and args.utilisation is None:
        arrivals = "closed" if args.max_concurrency else "burst"
    speed = None if math.isinf(offered) else offered
    return Demand("random", arrivals, kept, dropped, speed, HASH_BLOCK, {})


def _check(args: argparse.Namespace) -> None:
    """Options that would say nothing, or the contrary of one another."""
    if args.trace is not None:
        wrong = ["input_len", "output_len", "request_rate", "burstiness"]
        why = "the trace says so itself; --speed and --utilisation scale its time"
    else:
        wrong = ["speed", "columns", "time_unit", "hash_block_size", "jitter"]
        why = "it is of a --trace, and there is none"
    _refuse(args, wrong, why)
    if args.utilisation is not None:
        _refuse(args, ("speed", "request_rate"), "--utilisation sets it")
    elif args.trace is None and math.isinf(args.request_rate or math.inf):
        _refuse(args, ("burstiness",), "it is of a finite --request-rate, or of --utilisation")


def _refuse(args: argparse.Namespace, names: Seq[str], why: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} would change nothing: {why}")
