"""Four workloads that any engine can be given, and what is read off them.

- w1, throughput: many requests at once, prompts and outputs of uniform length, to their end.
- w2, lone prompts: one request at a time, from its submission to its first token.
- w3, decode steps: a full batch at one context, the time between its steps.
- w4, arrivals: requests come as a Poisson process, whatever the engine is busy with.

`evals.speed.serve` and `evals.speed.grid` have two more: requests of any lengths and arrivals, and
a baseline over lengths and concurrency.

An engine is an `evals.speed.peers.Peer`, driven by `evals.speed.driving`. Every prompt is drawn
anew, so that no cache of prefixes can help. Lengths and arrivals are the same in every repetition
and for every engine. A warm-up goes before each measurement; `Peer.section` says where one ends and
the other begins.
"""

from __future__ import annotations

import math
import random
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence as Seq
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from core.errors import RunError, UserError
from evals.speed.driving import Clock, Driver, Request, Result, serve
from evals.speed.latency import Served, goodput, latencies_ms, smallest_sample
from evals.speed.saturation import is_behind

if TYPE_CHECKING:
    from evals.speed.peers import Peer

DEFINITIONS = {
    "duration": "s, from the first submission (w4: from the first moment a request may be due) to "
    "the last token on the host",
    "output_throughput": "output tokens of all requests over duration, tokens/s",
    "total_token_throughput": "prompt and output tokens over duration, tokens/s",
    "request_throughput": "requests over duration, 1/s",
    "request_goodput": "requests within every bound of --goodput over duration, 1/s",
    "ttft_ms": "first token on the host, less the submission (w2) or the scheduled arrival (w4)",
    "step_ms": "between two steps that brought tokens of a full batch (w3)",
    "tpot_ms": "a request's last token less its first, over its other tokens (w4); time over steps "
    "of the full batch (w3)",
    "itl_ms": "gaps between a request's tokens, all requests together; 0 between tokens that one "
    "step brought",
    "e2el_ms": "last token on the host, less the scheduled arrival",
    "p50, p90, p99": "interpolated percentiles of the samples of a repetition, None where not one "
    "sample is expected beyond; p50 and min of the summary are over repetitions",
}
WARM_UP_PROMPTS, WARM_UP_STEPS, WARM_UP_BURST = 4, 8, 64
FEWEST = 5  # prompts of a length, however long they take
_HIGHEST_ID = 10_000

Workload = Callable[[Driver, Namespace, int], Result]


# -------- statistics


def fewest_samples(point: float) -> int:
    """How many samples a percentile needs: one is expected beyond it. Of a run; what a comparison
    of runs needs is `evals.speed.paired`'s to say."""
    return smallest_sample(point, beyond=1)


def percentile(values: Seq[float], point: float) -> float | None:
    """The interpolated percentile, None where too few samples carry it."""
    if len(values) < fewest_samples(point):
        return None
    return float(np.percentile(values, point))


def spread(values: Seq[float]) -> dict[str, float | None]:
    """Number, percentiles, extremes and mean of the samples."""
    points = {f"p{point}": percentile(values, point) for point in (50, 90, 99)}
    ends = [float(f(values)) if len(values) else None for f in (min, max, np.mean)]
    return {"n": len(values), **points, **dict(zip(("min", "max", "mean"), ends, strict=True))}


# -------- what the engines are given


def at_once(args: Namespace, vocab_size: int, repetition: int) -> list[Request]:
    """Requests of w1: lengths uniform in `args.tokens`, ends included.

    Drawn in the order of nano-vllm's published benchmark, so that seed 0 has its lengths: 142,827
    prompt and 133,966 output tokens. Later repetitions have other tokens.
    """
    draw, (lo, hi) = random.Random(args.seed), args.tokens
    prompts, highest = [], min(_HIGHEST_ID, vocab_size - 1)
    for _ in range(args.num_requests):
        num_tokens = draw.randint(lo, hi)
        prompts.append([draw.randint(0, highest) for _ in range(num_tokens)])
    outputs = [draw.randint(lo, hi) for _ in prompts]
    if repetition:
        rng = _rng(args, repetition)
        prompts = [rng.integers(0, vocab_size, len(ids)).tolist() for ids in prompts]
    return [Request(ids, n) for ids, n in zip(prompts, outputs, strict=True)]


def arrivals(args: Namespace, vocab_size: int, repetition: int, longest: int) -> list[Request]:
    """Requests of w4, in order: prompts lognormal (sigma 1), outputs exponential, gaps exponential.

    No request is longer than `longest` tokens less one. Lengths and gaps are drawn alike at every
    rate, so that a rate is a scale of time.
    """
    n, rng = args.num_arrivals, np.random.default_rng(args.seed + 7)
    mean = args.output_mean
    num_prompt = rng.lognormal(math.log(args.prompt_median), 1.0, n).astype(int)
    num_prompt = np.clip(num_prompt, min(16, args.max_prompt), args.max_prompt)
    num_output = np.clip(rng.exponential(mean, n).astype(int), min(4, mean), 8 * mean)
    due = np.cumsum(rng.exponential(1.0, n)) / args.rate
    num_output = np.minimum(num_output, longest - 2)
    num_prompt = np.minimum(num_prompt, longest - 1 - num_output)
    ids = _rng(args, repetition)
    return [
        Request(ids.integers(0, vocab_size, int(p)).tolist(), int(o), float(at))
        for p, o, at in zip(num_prompt, num_output, due, strict=True)
    ]


def _rng(args: Namespace, *more: int) -> np.random.Generator:
    return np.random.default_rng([args.seed, 1, *more])


# -------- what is measured


def throughput(driver: Driver, args: Namespace, repetition: int) -> Result:
    """w1. Raises RunError where tokens are missing: that is no speed."""
    engine = driver.engine
    wanted = at_once(args, engine.setup.vocab_size, repetition)
    engine.generate([Request(driver.prompt(len(r.prompt)), min(8, r.num_output)) for r in wanted])
    engine.section("w1")
    begin = driver.now()
    num_output = engine.generate(wanted)
    seconds = driver.now() - begin
    engine.section(None)
    num_asked = sum(r.num_output for r in wanted)
    if num_output != num_asked:
        raise RunError(f"{engine.name} wrote {num_output} tokens of the {num_asked} asked for")
    return Result.empty()._replace(**_rates(wanted, num_output, seconds))


def _rates(wanted: Seq[Request], num_output: int, seconds: float) -> dict[str, Any]:
    """Figures, and the counts that they were read off."""
    num_prompt = sum(len(r.prompt) for r in wanted)
    figures = {
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_prompt + num_output) / seconds,
        "request_throughput": len(wanted) / seconds,
    }
    counts = {"total_input_tokens": num_prompt, "total_output_tokens": num_output}
    return {
        "figures": figures,
        "raw": {"duration": seconds, "completed": len(wanted), **counts},
    }


def lone_prompts(driver: Driver, args: Namespace, repetition: int) -> Result:
    """w2. A length that one request may not have is refused."""
    result, longest = Result.empty(), driver.engine.setup.max_model_len
    for n in args.prefill:
        if n >= longest:
            what = f"a prompt of {n} tokens needs a longer --max-model-len than {longest}"
            result.refused[f"prefill {n}"] = what
            continue
        try:
            times = _ttfts(driver, n, args)
        except UserError as error:  # it does not take such a prompt
            result.refused[f"prefill {n}"] = str(error)
            continue
        driver.engine.section(None)
        found = {f"ttft_ms {n} p50": percentile(times, 50), f"ttft_ms {n} min": min(times)}
        result.figures.update(found)
        result.num_samples.update(dict.fromkeys(found, len(times)))
        result.raw[f"ttft_ms {n}"] = times
    return result


def _ttfts(driver: Driver, num_tokens: int, args: Namespace) -> list[float]:
    """ms, `args.repeats` of them, or what `args.lone_budget_s` allows, but never under FEWEST."""
    times: list[float] = []
    began = driver.now()
    for i in range(WARM_UP_PROMPTS + args.repeats):
        if i == WARM_UP_PROMPTS:
            driver.engine.section(f"prefill {num_tokens}")
        prompt = driver.prompt(num_tokens)
        begin = driver.now()
        driver.add(prompt, 1)
        driver.news()
        end = driver.now()
        driver.drain()
        if i >= WARM_UP_PROMPTS:
            times.append((end - begin) * 1e3)
        if len(times) >= FEWEST and end - began > args.lone_budget_s:
            break
    return times


def decode_steps(driver: Driver, args: Namespace, repetition: int) -> Result:
    """w3. Prompts have `args.context` tokens; steps are timed once all have their first token."""
    result = Result.empty()
    for batch in args.batch:
        section, num_ahead = f"decode {batch}", _num_ahead(driver.engine, batch, args.context)
        try:
            check_size(driver.engine, batch, args.context + num_ahead + args.steps)
            _gaps(driver, batch, args.context, num_ahead, WARM_UP_STEPS, None)
            gaps, num_tokens = _gaps(driver, batch, args.context, num_ahead, args.steps, section)
        except UserError as error:
            result.refused[section] = str(error)
            continue
        result.figures.update(
            {
                f"step_ms {batch} p50": percentile(gaps, 50),
                f"step_ms {batch} min": min(gaps),
                f"tpot_ms {batch} mean": sum(gaps) / (num_tokens / batch),
            }
        )
        named = (f"step_ms {batch} p50", f"step_ms {batch} min")
        result.num_samples.update(dict.fromkeys(named, len(gaps)))
        result.raw[f"step_ms {batch}"] = gaps
    return result


def _num_ahead(engine: Peer, batch: int, context: int) -> int:
    """Tokens that the first of a batch may write while the prompts of the rest are computed, its
    own first and those in flight included: none may end while steps are timed."""
    room = max(1, engine.setup.max_num_batched_tokens - batch)
    return math.ceil(batch * context / room) + 8


def check_size(engine: Peer, batch: int, num_tokens: int) -> None:
    """Raise UserError where so many sequences of so many tokens do not run at once."""
    setup = engine.setup
    for wanted, limit, option in (
        (batch, setup.max_num_seqs, "--max-num-seqs"),
        (num_tokens, setup.max_model_len, "--max-model-len"),
    ):
        if wanted > limit:
            what = f"{batch} x {num_tokens} tokens"
            raise UserError(f"{what} need a larger {option} than {limit}")


def _gaps(
    driver: Driver, batch: int, context: int, num_ahead: int, steps: int, section: str | None
) -> tuple[list[float], int]:
    """ms between `steps` steps of a full batch, and the tokens that they brought."""
    engine, decoding, num_output = driver.engine, set[int](), num_ahead + steps
    num_preemptions = engine.num_preemptions() or 0
    for _ in range(batch):
        driver.add(driver.prompt(context), num_output)
    while len(decoding) < batch:
        decoding.update(news.key for news in driver.news())
    engine.section(section)
    stamps, num_tokens, num_ended = [driver.now()], 0, 0
    for _ in range(steps):
        found = driver.news()
        stamps.append(driver.now())
        num_tokens += sum(news.num_tokens for news in found)
        num_ended += sum(news.finished for news in found)
        if num_ended:
            break
    engine.section(None)
    driver.drain()
    num_preemptions = (engine.num_preemptions() or 0) - num_preemptions
    if num_ended or num_preemptions:
        raise UserError(
            f"{engine.name} does not hold {batch} sequences of {context + num_output} tokens at "
            f"once, {num_ended} ended before all steps were timed and {num_preemptions} were "
            "preempted: raise --kv-cache-bytes, or lower --batch or --context"
        )
    return [(after - before) * 1e3 for before, after in pairwise(stamps)], num_tokens


def warm_up(driver: Driver, wanted: Seq[Request], num: int) -> None:
    """The first of them, one a step, with other tokens and short outputs."""
    for request in wanted[:num]:
        with suppress(UserError):  # what is refused is so again where it is measured, and said
            driver.add(driver.prompt(len(request.prompt)), min(32, request.num_output))
        if driver.engine.pending():
            driver.engine.step()
    driver.drain()


def poisson(driver: Driver, args: Namespace, repetition: int) -> Result:
    """w4. A request is submitted at the first step that begins after it was due; all of its
    waiting counts."""
    engine, setup = driver.engine, driver.engine.setup
    wanted = arrivals(args, setup.vocab_size, repetition, setup.max_model_len)
    warm_up(driver, wanted, WARM_UP_BURST)
    engine.section("w4")
    line = serve(engine, wanted, driver.clock)
    engine.section(None)
    rates = _rates(wanted, sum(map(len, line.token_times_s)), line.duration_s)
    figures, raw, num_samples = rates["figures"], rates["raw"], dict[str, int]()
    served = [Served(r.at, times) for r, times in zip(wanted, line.token_times_s, strict=True)]
    found = latencies_ms(served)
    behind = is_behind([r.at for r in wanted], found["ttft"])
    for name, values in found.items():
        named = {f"{name}_ms p{point}": percentile(values, point) for point in (50, 99)}
        if name == "itl":
            named["itl_ms max"] = max(values, default=None)
        figures |= named
        num_samples |= dict.fromkeys(named, len(values))
    raw |= {f"{name}_ms": values for name, values in found.items() if name != "itl"}
    raw |= {"busy": line.busy_s / line.duration_s, **gaps_for_a_record(found["itl"])}
    if args.goodput:
        figures["request_goodput"] = goodput(served, dict(args.goodput), line.duration_s)
    said = ["saturated, not a latency result: the queue grew to the end; lower --rate"]
    return Result(figures, raw, {}, num_samples, said if behind else [], behind)


def gaps_for_a_record(gaps: Seq[float]) -> dict[str, Any]:
    """Tens of thousands: their number, and their quantiles at whole per cents, stand for them."""
    quantiles = np.percentile(gaps, np.arange(101)).tolist() if gaps else []
    return {"num_itl": len(gaps), "itl_ms quantiles": quantiles}


WORKLOADS: Mapping[str, Workload] = {
    "w1": throughput,
    "w2": lone_prompts,
    "w3": decode_steps,
    "w4": poisson,
}


def run(
    name: str,
    engine: Peer,
    args: Namespace,
    repetition: int,
    clock: Clock,
    works: Mapping[str, Workload] = WORKLOADS,
) -> Result:
    """One repetition of a workload, and what the engine was asked to give way of meanwhile."""
    before = engine.num_preemptions()
    driver = Driver(engine, clock, _rng(args, repetition, 1 + list(works).index(name)))
    result = works[name](driver, args, repetition)
    if before is not None:
        result.raw["num_preemptions"] = (engine.num_preemptions() or 0) - before
    return result
