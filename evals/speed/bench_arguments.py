"""The command line of evals.speed.bench."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence as Seq
from contextlib import suppress
from pathlib import Path
from typing import Any

from core.errors import UserError
from evals.arguments import Parser, count, positive, seed
from evals.speed import traces
from evals.speed.demand import lengths, rate
from evals.speed.workloads import WORKLOADS

NAMES = (*WORKLOADS, "grid", "serve")
_SIZES = ("prefill", "batch", "grid_input_lens", "grid_output_lens", "grid_concurrency")
_LEAST_READ = 16 << 20  # bytes; a read of less is over before its launch is
_BURSTIEST = 1e-3  # of a gamma gap; from about 1e-5 on all of them are 0 in floating point
# Of options that are refused where their workload is not run; what is not here stays None.
DEFAULTS: dict[str, Any] = {
    "num_requests": 256,
    "tokens": [100, 1024],
    "prefill": [128, 150, 1024, 1100, 3000, 4096, 4400, 16384],
    "repeats": 20,
    "lone_budget_s": 20.0,
    "batch": [1, 8, 64, 256],
    "context": 1024,
    "steps": 128,
    "num_arrivals": 200,
    "rate": 64.0,
    "prompt_median": 512,
    "output_mean": 128,
    "grid_input_lens": [128, 1024, 4096],
    "grid_output_lens": [128],
    "grid_concurrency": [1, 8, 64],
    "num_warmups": 64,
    "metric_percentiles": (90.0, 99.0),
    "save_detailed": False,
}


def bound(text: str) -> tuple[str, float]:
    """NAME:MS of --goodput."""
    name, _, ms = text.partition(":")
    if name not in ("ttft", "tpot", "e2el"):
        raise argparse.ArgumentTypeError(f"{text} bounds none of ttft, tpot, e2el")
    return name, positive(ms)


def percents(text: str) -> tuple[float, ...]:
    """Percentiles between commas."""
    with suppress(ValueError):
        found = tuple(float(part) for part in text.split(","))
        if all(0 < point < 100 for point in found):
            return found
    raise argparse.ArgumentTypeError(f"{text!r} are not percentiles between 0 and 100")


def parse(argv: list[str] | None, about: str | None = None) -> argparse.Namespace:
    """Raises UserError for options of workloads that are not run."""
    parser = Parser("evals.speed.bench", about)
    add = parser.add_argument
    add("--workload", nargs="+", choices=NAMES, default=list(WORKLOADS))
    add("--repetitions", type=count, default=3, help="of each workload, in one process")
    add("--peer", action="append", default=[], metavar="NAME|MODULE:CLASS[:KEY=VALUE,…]")
    add("--rebuild", action="store_true", help="free each engine before the next is built")
    add("--seed", type=seed, default=0)
    add("--json", type=Path)
    _add_engine(parser.add_argument_group("engine"))
    sizes = _add_sizes(parser.add_argument_group("sizes of w1 to w4"))
    grid = parser.add_argument_group("grid: lengths by concurrency")
    serve = parser.add_argument_group("serve: lengths and arrivals, as of vllm bench serve")
    of_workload = {**sizes, "grid": _add_grid(grid), "serve": _add_serve(serve)}
    roof = parser.add_argument_group("roofline")
    add = roof.add_argument
    add("--bandwidth", type=positive, help="TB/s; on CUDA 4.24, as measured on one H200")
    add("--flops", type=positive, help="TFLOP/s; on CUDA 765, as measured on one H200")
    add("--measure-bandwidth", action="store_true", help="of reading and copying, on the device")
    add("--bandwidth-bytes", type=count, help="of the tensor that is read for it, 16 MiB or more")
    args = parser.parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else argv
    _complete(args, of_workload)
    return args


def _complete(args: argparse.Namespace, of_workload: Mapping[str, Seq[str]]) -> None:
    """Refuse what would change nothing, and fill in what was left open."""
    for workload, names in of_workload.items():
        for name in names:
            if getattr(args, name) is None:
                setattr(args, name, DEFAULTS.get(name))
            elif workload not in args.workload:
                raise UserError(
                    f"--{name.replace('_', '-')} is of the workload {workload}, which is not run: "
                    f"add --workload {workload}"
                )
    if twice := {name for name in args.workload if args.workload.count(name) > 1}:
        raise UserError(f"--workload names {min(twice)} twice: --repetitions says how often each")
    for name, needed in (
        ("rebuild", "peer"),
        ("save_detailed", "json"),
        ("bandwidth_bytes", "measure_bandwidth"),
    ):
        if getattr(args, name) and not getattr(args, needed):
            option, other = (f"--{text.replace('_', '-')}" for text in (name, needed))
            raise UserError(f"{option} would change nothing: it is of {other}, which is not given")
    if (args.bandwidth_bytes or _LEAST_READ) < _LEAST_READ:
        raise UserError(
            f"--bandwidth-bytes is {args.bandwidth_bytes}, which takes less to read than to "
            f"launch: give {_LEAST_READ} or more"
        )
    if args.tokens[0] > args.tokens[1]:
        lo, hi = args.tokens
        raise UserError(f"--tokens goes from {lo} to {hi}: give the fewer first")
    if "w4" in args.workload:
        _fit_w4(args)
    if args.burstiness is not None and args.burstiness < _BURSTIEST:
        raise UserError(
            f"--burstiness is {args.burstiness:g}, which leaves no time between requests: give "
            f"{_BURSTIEST:g} or more, or no --request-rate, and all come at once"
        )
    for name in _SIZES:
        if len(set(values := getattr(args, name))) < len(values):
            raise UserError(f"--{name.replace('_', '-')} names a size twice: give each once")
    if args.goodput and not {"w4", "serve"} & set(args.workload):
        raise UserError("--goodput is of the workloads w4 and serve: add --workload w4 or serve")


def _fit_w4(args: argparse.Namespace) -> None:
    """Its longest prompt and its longest output in one request."""
    room = args.max_model_len - 1 - 8 * args.output_mean
    args.max_prompt = args.max_prompt or max(1, min(8192, room))
    if args.max_prompt > room:
        raise UserError(
            f"w4 has prompts of up to {args.max_prompt:,} tokens and outputs of up to "
            f"{8 * args.output_mean:,}, 8 times their mean, and max_model_len is "
            f"{args.max_model_len:,}: lower --max-prompt or --output-mean, or raise --max-model-len"
        )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", default="random:qwen3-0.6b")
    add("--kv", default="paged")
    add("--fusion", default="auto")
    add("--graphs", default="auto")
    add("--sched", default="fifo")
    add("--set", action="append", default=[], metavar="SEAM.FIELD=VALUE")
    add("-p", dest="plugins", action="append", default=[], metavar="PLUGIN")
    add("--device")
    add("--dtype")
    add("--max-model-len", type=count, default=16640)
    add("--max-num-seqs", type=count, default=256)
    add("--enable-prefix-caching", action="store_true", help="of every engine; else of none")
    add("--max-num-batched-tokens", type=count)
    add("--kv-cache-bytes", help="of each engine; needed where several live at once")
    add("--gpu-memory-utilization", type=positive)


class _Names(list[str]):
    """Of the options that are added to a group."""

    def __init__(self, group: argparse._ArgumentGroup) -> None:
        super().__init__()
        self._group = group

    def add(self, *flags: str, **about: Any) -> None:
        self.append(self._group.add_argument(*flags, **about).dest)


def _add_sizes(group: argparse._ArgumentGroup) -> dict[str, list[str]]:
    """Names by workload."""
    w1, w2, w3, w4 = (_Names(group) for _ in range(4))
    w1.add("--num-requests", type=count, help="w1; default: 256")
    about = "w1: of prompts, and of outputs; default: 100 1024"
    w1.add("--tokens", type=count, nargs=2, metavar=("LO", "HI"), help=about)
    w2.add("--prefill", type=count, nargs="+", help="w2: tokens of prompts; default: 128 to 16384")
    w2.add("--repeats", type=count, help="w2: prompts of each length; default: 20")
    about = "w2: then a length ends at 5 prompts; default: 20"
    w2.add("--lone-budget-s", type=positive, help=about)
    w3.add("--batch", type=count, nargs="+", help="w3: sequences; default: 1 8 64 256")
    w3.add("--context", type=count, help="w3: tokens of each prompt; default: 1024")
    w3.add("--steps", type=count, help="w3: steps timed; default: 128")
    w4.add("--num-arrivals", type=count, help="w4: requests; default: 200")
    w4.add("--rate", type=positive, help="w4: requests a second; default: 64")
    w4.add("--prompt-median", type=count, help="w4; default: 512")
    w4.add("--max-prompt", type=count, help="w4; default: 8192, or what fits --max-model-len")
    w4.add("--output-mean", type=count, help="w4; default: 128")
    group.add_argument("--goodput", type=bound, nargs="+", default=[],
                       metavar="ttft|tpot|e2el:MS",
                       help="w4, serve: requests a second within all of these")  # fmt: skip
    return {"w1": w1, "w2": w2, "w3": w3, "w4": w4}


def _add_grid(group: argparse._ArgumentGroup) -> list[str]:
    names = _Names(group)
    add = names.add
    add("--grid-input-lens", type=count, nargs="+", help="of prompts; default: 128 1024 4096")
    add("--grid-output-lens", type=count, nargs="+", help="default: 128")
    add("--grid-concurrency", type=count, nargs="+", help="at a time; default: 1 8 64")
    add("--grid-prompts", type=count, help="of a cell; default: twice its concurrency, 16 at least")
    return names


def _add_serve(group: argparse._ArgumentGroup) -> list[str]:
    names, form = _Names(group), "N|uniform:LO:HI|lognormal:MEDIAN:SIGMA"
    add = names.add
    add("--input-len", type=lengths, metavar=form, help="tokens of prompts; default: 1024")
    add("--output-len", type=lengths, metavar=form, help="tokens of outputs; default: 128")
    add("--num-prompts", type=count, help="default: 1000, or all of the trace; else its first")
    add("--request-rate", type=rate, metavar="R|inf", help="a second; default: inf, all at once")
    about = "of gamma gaps; default: 1, a Poisson process; inf: a steady beat"
    add("--burstiness", type=rate, metavar="B|inf", help=about)
    add("--max-concurrency", type=count, help="at once; a closed loop, where the rate is inf")
    about = "the rate, or the speed of the trace, as a share of the capacity of ours"
    add("--utilisation", type=positive, metavar="X", help=about)
    add("--num-warmups", type=seed, help="requests in front of each measurement; default: 64")
    add("--metric-percentiles", type=percents, metavar="P,…", help="default: 90,99")
    add("--save-detailed", action="store_true", default=None, help="every request in --json")
    add("--trace", type=Path, metavar="FILE", help="replay it: Azure's, Mooncake's, or --columns")
    add("--speed", type=positive, help="of its time; default: 1")
    traces.add_options(add)
    return names
