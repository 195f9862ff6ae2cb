"""What a span costs alone, beside the plain nodes that it replaces, over the tokens of a step.

    python -m evals.speed.span_times --fusion triton inductor --json span-times.json

All places of a span in the model run one after the other, each over its own weights, and so do the
plain nodes of those places: weights are cold where all layers' exceed the device's cache, and what
nodes pass on is warm, as in a step. A span with one place runs it as often as there are layers. On
CUDA each list is a graph, its values static; on a CPU it is timed as it is launched. Lists are
timed in turn, the plain one twice as an A/A control (see evals.speed.arms). Figures are
microseconds a place; the floor is what must be moved over `--bandwidth`. First a span is compared
with its nodes, in values and in the cache: one that deviates is not timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from core.conform import bind
from core.errors import RunError, UserError
from core.loading import load_model
from core.plan import DEFAULTS
from core.registry import Registry
from core.seams import offered
from core.show import print_rows, progress_bar
from core.testing import parity
from evals import records
from evals.arguments import Parser, count, positive, seed
from evals.speed.arms import compared, in_turn, where
from evals.speed.places import Bench

if TYPE_CHECKING:
    from core.facts import ModelFacts
    from core.seams import Span
    from core.weights import ModelWeights
    from evals.speed.places import Case

PLAIN, AGAIN, SPAN = "plain", "plain again", "span"
# torch.compile frees the number of tokens from its second size on, as it does in an engine, whose
# graphs are captured size after size: no size that is timed is its first.
_FIRST_SIZES = (2, 3)
Run = Callable[[], None]


def timed(runs: Mapping[str, Run], args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of one run of each, `args.samples` of them, each the mean of `args.replays`."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(args.samples + 1):
        for name in in_turn(runs, i):
            seconds = _seconds(runs[name], args.replays, args.device) / args.replays
            if i:  # the first round warms up
                found[name].append(seconds)
    return found


def _seconds(run: Run, num_replays: int, device: str) -> float:
    """Seconds that the device takes for `num_replays` runs, one after the other.

    One more goes before them, so that none finds what the run of another list has left.
    """
    run()
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(num_replays):
            run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(num_replays):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def runner(places: Callable[[], Iterator[Any]], device: str) -> Run:
    """A function that runs all places: on CUDA the replay of a graph of them."""

    def run() -> None:
        deque(places(), maxlen=0)  # keeps nothing: memory is used again, as in a step

    if device == "cpu":
        return run
    # One eager pass first, on the stream of the capture, as in core.capture: it compiles kernels.
    graph = torch.cuda.CUDAGraph()
    capture = torch.cuda.graph(graph)
    stream: Any = capture.capture_stream
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    with capture:
        run()
    return graph.replay


def time_case(case: Case, num_layers: int, args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds a place of the span and of its nodes, and what they are to each other."""
    if problems := case.deviations(args.tolerance):
        return {"status": f"not timed: {problems[0]}"}
    floor_bytes, case = case.least_bytes(), case.repeated(num_layers)
    plain, again, fused = (case.copy() for _ in range(3))
    lists = {PLAIN: plain.plain, AGAIN: again.plain, SPAN: fused.fused}
    seconds = timed({name: runner(places, args.device) for name, places in lists.items()}, args)
    num_places = len(case.places)
    us = {name: [s / num_places * 1e6 for s in found] for name, found in seconds.items()}
    row = {r["arm"]: r for r in compared({"us": us}, PLAIN, AGAIN)}[SPAN]
    return {
        "status": "timed",
        "num_places": num_places,
        "p50_us": {name: statistics.median(times) for name, times in us.items()},
        "min_us": {name: min(times) for name, times in us.items()},
        "floor_us": None if floor_bytes is None else floor_bytes / args.bandwidth * 1e-6,
        "ratio": row["ratio"],
        "control": row["control"],
        "verdict": row["verdict"],
        "samples_us": us,
    }


def make_spans(
    fusion: str, facts: ModelFacts, weights: ModelWeights, device: torch.device
) -> list[Span]:
    """What the set offers for this model, ready to run. Raises UserError where it does not run."""
    offer: Any = Registry().find("fusion", fusion).load()
    made = bind("fusion", offer(offer.Config()))
    spans = list(made.spans(facts, device))
    if (look_at := offered(made, "weights")) is not None:
        look_at(weights)
    return spans


@torch.inference_mode()
def measure(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """For each number of tokens a row for each span."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("torch sees no CUDA device: choose --device cpu")
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype)
    model = load_model(
        args.model, dtype=dtype, device=device, seed=args.seed, progress=lambda *_: None
    )
    facts, weights = model.facts, model.weights
    named = [(f, s) for f in args.fusion for s in make_spans(f, facts, weights, device)]
    sizes = dict.fromkeys((*_FIRST_SIZES, *args.tokens))
    bench = Bench(
        facts,
        weights,
        device,
        list(sizes),
        context=args.context,
        max_rows=args.max_rows,
        kv=args.kv,
        num_layers=args.layers,
    )
    num_layers = args.layers or facts.num_layers
    with progress_bar(sys.stderr) as progress:
        for i, num_tokens in enumerate(sizes):
            progress("measure", i, len(sizes))
            rows = []
            with bench.step(num_tokens) as batch:
                for fusion, span in named:
                    found = _look(bench, span, batch, num_layers, args, num_tokens in args.tokens)
                    rows.append(
                        {"fusion": fusion, "span": span.name, "tokens": num_tokens, **found}
                    )
            if device.type == "cuda":
                torch.cuda.empty_cache()  # the pools of graphs that are gone
            if num_tokens in args.tokens:
                yield rows


def _look(
    bench: Bench,
    span: Span,
    batch: Any,
    num_layers: int,
    args: argparse.Namespace,
    is_wanted: bool,
) -> dict[str, Any]:
    """What one span comes to in one step; where that is not wanted, it just runs."""
    what = {"nodes": " · ".join(span.nodes), "rows": len(batch.slots)}
    if not span.when(batch.shape.num_tokens, bench.facts, bench.sink):
        return what | {"status": "not offered"}
    case = bench.case(span, batch)
    if case is None:
        return what | {"status": "no place in the decoder"}
    if not is_wanted:
        return what | {"status": "; ".join(case.deviations(args.tolerance))}
    return what | time_case(case, num_layers, args)


def cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row for people."""
    is_timed = row["status"] == "timed"
    p50, least = row.get("p50_us", {}), row.get("min_us", {})
    return {
        "span": f"{row['fusion']}: {row['span']}",
        "nodes": row["nodes"],
        "tokens": row["tokens"],
        "plain µs": p50.get(PLAIN),
        "span µs": p50.get(SPAN),
        "min µs": least.get(SPAN),
        "floor µs": row.get("floor_us"),
        "x plain": f"{row['ratio']:.3f}" if is_timed else None,
        "A/A within": f"{row['control']:.3f}" if is_timed else None,
        "verdict": row["verdict"] if is_timed else row["status"],
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("evals.speed.span_times", __doc__)
    add = parser.add_argument
    add("--model", default="random:qwen3-0.6b")
    add("--fusion", nargs="+", default=["triton"], help="sets whose spans are timed")
    add("--tokens", type=count, nargs="+", default=[1, 8, 16, 64, 256, 1024, 4096, 16384])
    add("--device", choices=("cpu", "cuda"))
    add("--dtype", choices=("float32", "bfloat16", "float16"))
    add("--kv", default="paged", help="a kv offer whose sinks spans write to")
    add("--layers", type=count, help="the first N; all: more weights than a cache holds")
    add("--max-rows", type=count, default=256, help="most tokens that are decodes, one a sequence")
    add("--context", type=count, default=320, help="tokens of each sequence that decodes")
    add("--samples", type=count, default=20)
    add("--replays", type=count, default=5, help="runs of a list, in a sample")
    add("--tolerance", type=positive, help="of values, times (1 + the plain one)")
    add("--bandwidth", type=positive, default=4.24, help="TB/s, measured on the device")
    add("--seed", type=seed, default=0, help="of random weights")
    add("--json", type=Path)
    args = parser.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = args.dtype or DEFAULTS["dtype"][args.device == "cuda"]
    args.tolerance = args.tolerance or parity.SPAN[getattr(torch, args.dtype)]
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    command = " ".join(["python -m evals.speed.span_times", *(argv or sys.argv[1:])])
    rows: list[dict[str, Any]] = []
    try:
        records.check_folder(args.json)
        for found in measure(args):
            rows += found
            if args.json:  # after each size: whoever is short of time keeps what there is
                records.write(args.json, {"command": command, **where(args.device), "rows": rows})
        if not any(row["status"] == "timed" for row in rows):
            reasons = dict.fromkeys(row["status"] for row in rows)
            raise UserError(f"no span was timed: {'; '.join(reasons) or 'the set has none'}")
    except (UserError, RunError) as error:
        print(f"outweigh: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    rows.sort(key=lambda row: (row["fusion"], row["span"], row["nodes"], row["tokens"]))
    print_rows([cells(row) for row in rows], sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
