"""What each span of a fusion set is worth, through the Engine: one span at a time, against none.

    python -m evals.speed.spans --fusion triton inductor --json spans.json

An arm is an engine with `fusion.only` set to one span, to none of them, or to all. All arms live at
once and are measured in turn, so that what the machine does meanwhile meets all of them; the arm
without spans runs twice a round, as an A/A control. A figure is a median over rounds; a ratio is to
the arm without spans.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from core.batch import BatchShape
from core.errors import RunError, UserError
from core.registry import Registry
from core.show import print_rows, progress_bar
from evals import records
from evals.speed.steps import decode_ms, prefill_ms
from plugins.graphs.full import FullGraphs

if TYPE_CHECKING:
    from core.batch import Limits
    from core.engine import Engine

PLAIN, AGAIN = "plain nodes", "plain nodes again"


class TheseGraphs(FullGraphs):
    """The shapes of `full` that the measured steps are padded to, and no others."""

    def __init__(self, prompts: list[int], batches: list[int]) -> None:
        super().__init__()
        self._prompts, self._batches = prompts, batches

    def shapes(self, limits: Limits) -> list[BatchShape]:
        super().shapes(limits)
        self._rows, self._fresh = tuple(sorted(self._batches)), tuple(sorted(self._prompts))
        self._mixed = ()
        return [*map(self._decode, self._rows), *map(self._prompt, self._fresh)]


def arms(fusions: list[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name of the arm -> fusion set and its settings."""
    found: dict[str, tuple[str, dict[str, Any]]] = {PLAIN: ("none", {}), AGAIN: ("none", {})}
    for fusion in fusions:
        names = getattr(Registry().find("fusion", fusion).load().Config, "names", ())  # type: ignore[attr-defined]
        for name in names:
            found[f"{fusion}: {name}"] = fusion, {"fusion.only": [name]}
        found[f"{fusion}: all"] = fusion, {}
    return found


def build(args: argparse.Namespace, fusion: str, settings: dict[str, Any]) -> Engine:
    from core.engine import Engine

    on_cpu = args.device == "cpu"
    return Engine(
        model=args.model,
        fusion=fusion,
        settings=settings,
        graphs="none" if on_cpu else TheseGraphs(args.prefill, args.batch),
        device=args.device,
        max_model_len=max(*args.prefill, args.context) + 128,
        max_num_seqs=max(args.batch),
        max_num_batched_tokens=max(args.prefill),
        kv_cache_bytes=args.kv_cache_bytes,
        enable_prefix_caching=False,
    )


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Step -> arm -> a median, in ms, of every round."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack, progress_bar(sys.stderr) as progress:
        engines = {}
        wanted = arms(args.fusion)
        for i, (name, arm) in enumerate(wanted.items()):
            progress("build", i, len(wanted))
            engines[name] = stack.enter_context(build(args, *arm))
        for i in range(args.rounds):
            for name, engine in engines.items() if i % 2 else reversed(engines.items()):
                rng = np.random.default_rng(i)
                for n in args.prefill:
                    times = prefill_ms(engine, n, args.repeats, rng)
                    found[f"prefill {n}"][name].append(statistics.median(times))
                for n in args.batch:
                    times = decode_ms(engine, n, args.context, args.steps, rng)
                    found[f"decode {n}"][name].append(statistics.median(times))
            progress("measure", i + 1, args.rounds)
    return found


def table(found: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """A row an arm: ms, and the ratio to the plain nodes, of every step."""
    rows: dict[str, dict[str, Any]] = {}
    for step, by_arm in found.items():
        base = statistics.median(by_arm[PLAIN])
        for name, times in by_arm.items():
            ms = statistics.median(times)
            rows.setdefault(name, {"spans": name})[step] = f"{ms:.2f} ({ms / base:.2f}x)"
    order = [PLAIN, AGAIN, *sorted(rows.keys() - {PLAIN, AGAIN})]
    return [rows[name] for name in order]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m evals.speed.spans",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="random:qwen3-0.6b")
    add("--fusion", nargs="+", default=["triton"], help="sets whose spans are measured")
    add("--device")
    add("--prefill", type=int, nargs="+", default=[128, 1024, 4096], help="tokens of lone prompts")
    add("--batch", type=int, nargs="+", default=[1, 64, 256], help="sequences of decode steps")
    add("--context", type=int, default=320, help="tokens, at the middle of the timed steps")
    add("--steps", type=int, default=32, help="decode steps timed, each round")
    add("--repeats", type=int, default=8, help="prefills timed, each round")
    add("--rounds", type=int, default=3)
    add("--kv-cache-bytes", default="6GiB", help="of each engine")
    add("--json", type=Path)
    args = parser.parse_args(argv)
    try:
        records.check_folder(args.json)
        found = measure(args)
    except (UserError, RunError) as error:
        print(f"outweigh: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    print_rows(table(found), sys.stdout)
    if args.json:
        command = " ".join(["python -m evals.speed.spans", *(argv or sys.argv[1:])])
        result = {"command": command, "machine": records.machine(), "median_ms": found}
        records.write(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
