"""What a scheduler does to the time to first token of a recorded workload, without any model.

    python -m evals.speed.replay --trace AzureLLMInferenceTrace_conv.csv --sched fifo shortest

A trace (`evals.speed.traces`: Azure's, Mooncake's, or any other by --columns) is replayed through
the real schedule and a real kv host half; a step takes
`step + prefill * prompt tokens + decode * decode rows`. Lengths and order are those of the trace;
only its time is scaled: capacity is how long the same requests take under fifo if all come at once,
and utilisation is that over the time in which they come. Everything is a function of the arguments.

TTFT runs from arrival to first token. `passed` is the longest time between the arrivals of two
requests of which the later got its seat first; `beyond` counts those pairs outside the bound that
the scheduler declares (`pass_bound_s`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from core.batch import Limits
from core.config import parse_setting, validated
from core.conform import bind
from core.errors import UserError
from core.registry import Registry
from core.testing.clock import Arrival, StepCost, VirtualEngine, percentiles
from evals import records
from evals.arguments import Parser, count, positive, seed, share
from evals.speed.traces import Trace, add_options, read_trace, source_of

if TYPE_CHECKING:
    from core.batch import Sequence
    from core.seams import Scheduler
    from core.testing.clock import Log

POINTS = (50, 90, 99, 100)


def make_sched(text: str, registry: Registry) -> Scheduler:
    """A scheduler from NAME or NAME:FIELD=VALUE,FIELD=VALUE."""
    name, _, options = text.partition(":")
    offer: Any = registry.find("sched", name).load()
    pairs = [parse_setting(f"sched.{option}") for option in options.split(",") if option]
    settings = {key.partition(".")[2]: value for key, value in pairs}
    config = validated(offer.Config, settings, f"sched '{name}'", "sched.")
    return bind("sched", offer(config))  # type: ignore[no-any-return]


class Passes:
    """Which requests got their seat before an earlier one, and by how much they came later."""

    def __init__(self, sched: Scheduler) -> None:
        self._bound_s = getattr(sched, "pass_bound_s", None)
        self.longest_s, self.num_beyond = 0.0, 0

    @property
    def is_bounded(self) -> bool:
        return self._bound_s is not None

    def on_admit(self, seq: Sequence, others: list[Sequence]) -> None:
        if seq.num_preemptions:
            return  # its place is that of the work it lost
        for other in others:
            if other.order < seq.order and not other.num_preemptions:
                gap = seq.arrival - other.arrival
                self.longest_s = max(self.longest_s, gap)
                more_urgent = seq.metadata["priority"] < other.metadata["priority"]
                if self._bound_s is not None and not more_urgent:
                    self.num_beyond += gap > self._bound_s(other) + 1e-9


def engine(sched: Scheduler, args: argparse.Namespace, passes: Passes | None) -> VirtualEngine:
    cost = StepCost(args.step_ms * 1e-3, args.prefill_us * 1e-6, args.decode_us * 1e-6)
    return VirtualEngine(
        sched,
        limits=Limits(args.max_model_len, args.max_num_seqs, args.max_num_batched_tokens),
        num_kv_tokens=args.kv_tokens,
        kv=args.kv,
        cost=cost,
        chunk_size=args.chunk_size,
        depth=args.depth,
        on_admit=None if passes is None else passes.on_admit,
    )


def capacity_s(trace: Trace, registry: Registry, args: argparse.Namespace) -> float:
    """Seconds in which all requests are served, if all come at once."""
    at_once = [Arrival(0.0, item.num_prompt, item.num_output) for item in trace.arrivals]
    return engine(make_sched("fifo", registry), args, None).run(at_once).end_s


def scaled(trace: Trace, speed: float, urgent: float, seed: int) -> list[Arrival]:
    """The arrivals `speed` times as fast, a share `urgent` of them with priority -1."""
    draws = np.random.default_rng(seed).random(len(trace.arrivals))
    return [
        Arrival(one.at / speed, one.num_prompt, one.num_output, priority=-int(draw < urgent))
        for one, draw in zip(trace.arrivals, draws, strict=True)
    ]


def figures(log: Log, passes: Passes) -> dict[str, Any]:
    """What one replay came to, times in ms."""
    ttft_ms = log.ttft_s() * 1e3
    is_urgent = np.array([seq.metadata["priority"] < 0 for seq in log.sequences])
    gaps = [np.diff(seq.token_times[seq.num_prompt : seq.num_known]) for seq in log.sequences]
    tpots = [float(gap.mean()) * 1e3 for gap in gaps if len(gap)]
    result = {
        "num_requests": len(log.sequences),
        "ttft_ms": _named(ttft_ms),
        "tpot_ms": _named(tpots) if tpots else None,
        "max_itl_ms": max((float(gap.max()) * 1e3 for gap in gaps if len(gap)), default=None),
        "duration_s": log.end_s,
        "num_steps": log.num_steps,
        "num_preemptions": log.counters.num_preemptions,
        "num_recomputed_tokens": log.counters.num_recomputed_tokens,
        "longest_pass_s": passes.longest_s,
        "num_beyond_bound": passes.num_beyond if passes.is_bounded else None,
    }
    if is_urgent.any():
        result["urgent_ttft_ms"] = _named(ttft_ms[is_urgent])
    return result


def _named(values: Any) -> dict[str, float]:
    names = [f"p{point}" if point < 100 else "max" for point in POINTS]
    return dict(zip(names, percentiles(values, *POINTS), strict=True))


def replay(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """One result for each trace, utilisation and scheduler, in that order."""
    registry = Registry(args.plugins)
    for sched in args.sched:
        make_sched(sched, registry)  # a wrong name is said before anything has run
    limits: dict[str, Any] = {"max_model_len": args.max_model_len, "num_requests": args.requests}
    limits["source"] = source_of(args)
    for trace in [read_trace(path, **limits) for path in args.trace]:
        capacity = capacity_s(trace, registry, args)
        for utilisation in args.utilisation:
            speed = utilisation * trace.span_s / capacity
            arrivals = scaled(trace, speed, args.urgent, args.seed)
            for name in args.sched:
                sched = make_sched(name, registry)
                passes = Passes(sched)
                log = engine(sched, args, passes).run(arrivals)
                if log.stalled is not None:
                    raise UserError(f"{name} stalls: {log.stalled}; raise --kv-tokens")
                yield {
                    "trace": trace.name,
                    "num_dropped": trace.num_dropped,
                    "jitter_s": trace.jitter_s,
                    "capacity_s": capacity,
                    "speed": speed,
                    "utilisation": utilisation,
                    "sched": name,
                    **figures(log, passes),
                }


def print_results(results: Seq[dict[str, Any]]) -> None:
    """A table for each trace and utilisation."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    groups = dict.fromkeys((result["trace"], result["utilisation"]) for result in results)
    for trace, utilisation in groups:
        rows = [r for r in results if (r["trace"], r["utilisation"]) == (trace, utilisation)]
        first = rows[0]
        console = Console(width=200)  # a row is a line, whatever the terminal
        width = first["jitter_s"]
        spread = "" if width is None else f", those of one stamp spread over {width:.3g} s"
        console.print(
            f"{trace}: {first['num_requests']} requests ({first['num_dropped']} dropped){spread}, "
            f"utilisation {utilisation:g}, {first['speed']:.3g} times as fast; TTFT in seconds"
        )
        heads = ("p50", "p90", "p99", "max", "TPOT p50 ms", "preempted", "passed s", "beyond")
        table = Table(box=box.MARKDOWN)
        table.add_column("sched", no_wrap=True)
        for head in (*heads, "urgent p50", "urgent p99") if "urgent_ttft_ms" in first else heads:
            table.add_column(head, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(row["sched"], *_cells(row))
        console.print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    beyond, tpot = row["num_beyond_bound"], row["tpot_ms"]
    cells = [f"{value / 1e3:.3f}" for value in row["ttft_ms"].values()]
    cells += ["-" if tpot is None else f"{tpot['p50']:.1f}", str(row["num_preemptions"])]
    cells += [f"{row['longest_pass_s']:.2f}", "-" if beyond is None else str(beyond)]
    if urgent := row.get("urgent_ttft_ms"):
        cells += [f"{urgent[point] / 1e3:.3f}" for point in ("p50", "p99")]
    return cells


def parse(argv: Seq[str] | None) -> argparse.Namespace:
    parser = Parser("evals.speed.replay", __doc__)
    add, cost = parser.add_argument, StepCost()
    add("--trace", type=Path, nargs="+", required=True, metavar="FILE")
    add(
        "--sched",
        nargs="+",
        default=["fifo", "shortest", "aging", "priority"],
        metavar="NAME[:FIELD=VALUE,…]",
    )
    add("--utilisation", type=positive, nargs="+", default=[0.6, 0.85], metavar="X")
    add("--requests", type=count, metavar="N", help="the first N of the trace; default: all")
    add("--urgent", type=share, default=0.0, help="share of requests with priority -1, drawn")
    add("--seed", type=seed, default=0, help="of that draw, and of --jitter")
    add_options(add)
    add("--kv", default="paged")
    add("--kv-tokens", type=count, default=500_000, help="room of the cache, in tokens")
    add("--max-model-len", type=count, default=16_384)
    add("--max-num-seqs", type=count, default=256)
    add("--max-num-batched-tokens", type=count, default=2048)
    add("--chunk-size", type=count)
    add("--depth", type=int, default=0, choices=(0, 1), help="1: plan before the last step landed")
    add("--step-ms", type=positive, default=cost.fixed_s * 1e3, help="of every step")
    add("--prefill-us", type=positive, default=cost.prefill_s * 1e6, help="of a prompt token")
    add("--decode-us", type=positive, default=cost.decode_s * 1e6, help="of a decode row")
    add("-p", dest="plugins", action="append", default=[], metavar="PLUGIN")
    add("--json", type=Path, metavar="FILE", help="write arguments and results there too")
    return parser.parse_args(argv)


def main(argv: Seq[str] | None = None) -> int:
    args = parse(argv)
    results = []
    try:
        records.check_folder(args.json)
        for result in replay(args):
            results.append(result)
            done = f"{result['trace']} {result['utilisation']:g} {result['sched']}"
            print(f"{done}: {result['num_steps']} steps", file=sys.stderr)
    except UserError as error:
        print(f"outweigh: error: {error}", file=sys.stderr)
        return 2
    print_results(results)
    if args.json:
        records.write(args.json, {"arguments": vars(args), "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
