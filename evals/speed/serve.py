"""Workload `serve`: requests of any lengths and arrivals, with the figures of `vllm bench serve`.

Names and definitions are those of that command, but for what `evals.speed.latency` says of the
clock, and for percentiles: of fewer samples than `evals.speed.latency.smallest_sample` there is
none. In an open loop the capacity comes first: how long an engine takes for the same requests, with
other tokens, if all come at once. Utilisation is that over the time in which they come.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Sequence as Seq
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from evals.speed.demand import Demand, demand_of
from evals.speed.driving import Driver, Request, Result, Timeline, serve
from evals.speed.latency import Served, goodput, latencies_ms, smallest_sample
from evals.speed.saturation import saturated
from evals.speed.workloads import gaps_for_a_record, warm_up

if TYPE_CHECKING:
    from evals.speed.peers import Peer

DEFINITIONS = {
    "mean_, median_, p99_ (serve, grid)": "of the samples of a repetition, interpolated; None "
    "where fewer than seven samples are expected beyond a percentile",
    "ttft, tpot, itl, e2el (serve, grid)": "as ttft_ms and its like of w4; tpot of requests with "
    "two tokens or more",
    "request_rate": "requests a second that are offered; inf: all at once, or in a closed loop",
    "capacity_request_throughput": "requests over the time that they take if all come at once, 1/s",
    "utilisation": "the time that they take if all come at once, over that in which they come",
    "busy": "share of duration inside steps",
    "client_queue_ms": "from when a request was due until it was submitted",
    "max_output_tokens_per_s": "tokens of the best whole second",
    "prefix_hit_share": "prompt tokens that were found in the cache, over all",
}
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "queue_times", "errors")


class Serving:
    """The workload for all engines of a run: what is asked for is the same for each of them, and a
    speed that follows from a capacity is that of the first."""

    def __init__(self, args: Namespace) -> None:
        self.demand = demand_of(args)
        self._capacity_s: WeakKeyDictionary[Peer, float] = WeakKeyDictionary()

    def __call__(self, driver: Driver, args: Namespace, repetition: int) -> Result:
        engine, vocab_size = driver.engine, driver.engine.setup.vocab_size
        capacity_s = self._capacity(driver, args)
        demand = self.demand
        wanted = demand.requests(vocab_size, [args.seed, 2, repetition])
        warm_up(driver, wanted, args.num_warmups)
        num_cached = engine.num_cached_tokens()
        engine.section("serve")
        line = serve(
            engine, wanted, driver.clock, max_concurrency=args.max_concurrency,
            is_closed=demand.arrivals == "closed", takes_refusals=True,
        )  # fmt: skip
        engine.section(None)
        result = measured(wanted, line, dict(args.goodput), args.metric_percentiles)
        result.raw.update(self._asked(args, capacity_s))
        if num_cached is not None:
            found = (engine.num_cached_tokens() or 0) - num_cached
            result.raw["prefix_hit_share"] = found / max(1, result.raw["total_input_tokens"])
        if not args.save_detailed:
            for name in DETAILS:
                del result.raw[name]
        why = self._saturated(line, result.raw["utilisation"])
        result.raw["is_saturated"] = why is not None
        result.notes.extend(_sentences(demand, result.raw))
        result.notes.extend([why] if why else [])
        return result._replace(is_saturated=why is not None)

    def _capacity(self, driver: Driver, args: Namespace) -> float | None:
        """Of an open loop, measured once for each engine."""
        engine, demand = driver.engine, self.demand
        if demand.arrivals != "open":
            return None
        if engine not in self._capacity_s:
            wanted = demand.requests(engine.setup.vocab_size, [args.seed, 3])
            warm_up(driver, wanted, args.num_warmups)  # what is compiled first is no capacity
            at_once = [request._replace(at=0.0) for request in wanted]
            line = serve(
                engine, at_once, driver.clock, max_concurrency=args.max_concurrency,
                takes_refusals=True,
            )  # fmt: skip
            self._capacity_s[engine] = line.duration_s
        capacity_s = self._capacity_s[engine]
        if demand.speed is None:
            self.demand = demand.at_utilisation(args.utilisation, capacity_s)
        return capacity_s

    def _asked(self, args: Namespace, capacity_s: float | None) -> dict[str, Any]:
        demand, num_dropped = self.demand, sum(self.demand.dropped.values())
        num, speed = len(demand.items), demand.speed
        offered = demand.offered_rate * speed if speed else math.inf
        utilisation = None
        if capacity_s and speed:
            utilisation = capacity_s * speed / demand.span_s
        return {
            "arrivals": demand.arrivals,
            "dataset_name": demand.name,
            "num_prompts": num + num_dropped,
            "request_rate": offered if math.isfinite(offered) else "inf",
            "burstiness": None if args.trace else args.burstiness or 1.0,
            "max_concurrency": args.max_concurrency,
            "speed": speed if args.trace else None,
            "num_dropped": num_dropped,
            "dropped_share": num_dropped / (num + num_dropped),
            "dropped": demand.dropped,
            "capacity_request_throughput": num / capacity_s if capacity_s else None,
            "utilisation": utilisation,
            "trace": demand.about or None,
        }

    def _saturated(self, line: Timeline, utilisation: float | None) -> str | None:
        """Of an open loop. A closed one cannot be, and a burst is by its nature."""
        if self.demand.arrivals != "open":
            return None
        came = [(due, t[0]) for due, t in zip(line.due_s, line.token_times_s, strict=True) if t]
        waits = [(first - due) * 1e3 for due, first in came]
        return saturated([due for due, _ in came], waits, utilisation)


# -------- figures


def measured(
    wanted: Seq[Request], line: Timeline, limits_ms: dict[str, float], points: Seq[float]
) -> Result:
    """What a run came to. Those that were refused have failed: they are in no latency, and within
    no limit."""
    served = [Served(*one) for one in zip(line.due_s, line.token_times_s, strict=True)]
    taken = [i for i in range(len(wanted)) if i not in line.refused]
    num_input = sum(len(wanted[i].prompt) for i in taken)
    num_output, seconds = sum(map(len, line.token_times_s)), line.duration_s
    result = Result.empty()
    figures = result.figures
    figures["request_throughput"] = len(taken) / seconds
    if limits_ms:
        figures["request_goodput"] = goodput(served, limits_ms, seconds)
    figures["output_throughput"] = num_output / seconds
    figures["total_token_throughput"] = (num_input + num_output) / seconds
    found = latencies_ms(served)
    for name, values in found.items():
        _add_latency(result, name, values, points)
    waits = (np.array(line.sent_s) - np.array(line.due_s)) * 1e3
    result.raw.update(
        {
            "duration": seconds,
            "completed": len(taken),
            "failed": len(line.refused),
            "total_input_tokens": num_input,
            "total_output_tokens": num_output,
            "max_output_tokens_per_s": _best_second(line),
            "max_concurrent_requests": line.most_running,
            "busy": line.busy_s / seconds,
            "mean_client_queue_ms": float(waits.mean()),
            "max_client_queue_ms": float(waits.max()),
            **gaps_for_a_record(found["itl"]),
            **_details(wanted, line),
        }
    )
    if line.refused:
        why = next(iter(line.refused.values()))
        result.notes.append(f"{len(line.refused)} of {len(wanted)} requests failed: {why}")
    return result


def _add_latency(result: Result, name: str, values: Seq[float], points: Seq[float]) -> None:
    """Mean, median and percentiles in ms, None where the samples do not carry them."""
    result.raw[f"std_{name}_ms"] = float(np.std(values)) if values else None
    found: dict[str, float | None] = {f"mean_{name}_ms": float(np.mean(values)) if values else None}
    for key, point in {"median": 50.0, **{f"p{p:g}": p for p in points}}.items():
        figure, needed = f"{key}_{name}_ms", smallest_sample(point)
        found[figure] = float(np.percentile(values, point)) if len(values) >= needed else None
        if found[figure] is None:
            short = name in ("tpot", "itl") and not values
            advice = "longer outputs, of one token none has any" if short else "more requests"
            result.refused[figure] = (
                f"{len(values)} samples do not carry it, {needed} do: measure {advice}"
            )
    result.figures.update(found)
    result.num_samples.update(dict.fromkeys(found, len(values)))


def _best_second(line: Timeline) -> int:
    seconds = [int(t) for times in line.token_times_s for t in times]
    return int(np.bincount(seconds).max()) if seconds else 0


def _details(wanted: Seq[Request], line: Timeline) -> dict[str, Any]:
    """Request by request, in seconds."""
    times = line.token_times_s
    return {
        "input_lens": [len(request.prompt) for request in wanted],
        "output_lens": list(map(len, times)),
        "ttfts": [t[0] - due if t else None for due, t in zip(line.due_s, times, strict=True)],
        "itls": [np.diff(t).tolist() for t in times],
        "start_times": line.due_s,
        "queue_times": (np.array(line.sent_s) - np.array(line.due_s)).tolist(),
        "errors": [line.refused.get(i, "") for i in range(len(wanted))],
    }


def _sentences(demand: Demand, raw: dict[str, Any]) -> Iterator[str]:
    """What the load was, for whoever reads the figures."""
    cap = raw["max_concurrency"]
    if demand.arrivals == "closed":
        yield (
            f"closed loop of {cap}, busy {raw['busy']:.2f}: a request is due when its place is "
            "free, so the wait for one is not seen"
        )
    elif demand.arrivals == "burst":
        yield f"a burst, busy {raw['busy']:.2f}: all were due at once, and TTFT is of the backlog"
    else:
        yield _open_loop(raw)
        if cap is not None:
            yield (
                f"{cap} at once at most: a request waited {raw['mean_client_queue_ms']:.3g} ms on "
                "average before it was submitted, which counts"
            )
    if raw["num_dropped"]:
        why = "; ".join(f"{num:,} {what}" for what, num in demand.dropped.items())
        yield (
            f"{raw['num_dropped']:,} of {raw['num_prompts']:,} requests "
            f"({raw['dropped_share']:.1%}) were dropped: {why}"
        )
    if width := demand.about.get("jitter_s"):
        yield f"requests of one stamp were spread over {width:.3g} s, in their order"
    if (share := demand.about.get("shared_blocks")) is not None:
        yield (
            f"{share:.1%} of the blocks of prompts were in an earlier prompt, and "
            f"{raw.get('prefix_hit_share', 0.0):.1%} of the tokens were found in the cache"
        )


def _open_loop(raw: dict[str, Any]) -> str:
    if raw["speed"] is not None:
        gaps = f"{raw['dataset_name']} at {raw['speed']:.3g} times its speed"
    else:
        gaps = "Poisson" if raw["burstiness"] == 1 else f"burstiness {raw['burstiness']:g}"
    return (
        f"open loop, {gaps}, {raw['request_rate']:.3g} requests/s: utilisation "
        f"{raw['utilisation']:.2f} of a capacity of {raw['capacity_request_throughput']:.3g} "
        f"requests/s, busy {raw['busy']:.2f}"
    )
