"""What the host does in a decode step, and how long the next step waits for it.

    python -m evals.speed.host_path --sequences 1 8 64 256 --json host_path.json

Columns are µs a step, medians over `--steps` steps with so many sequences decoding (p90 where it
says so): `harvest` takes the tokens in, `plan` and `stage` prepare the next step, `launch` hands it
to the device, `events` is the rest of `Engine.step`. `host` is all of them, `wait` what is spent
waiting for the device. `path` runs from the moment at which the tokens of a step are on the host to
the moment at which the next step that is launched has been staged; the first of its work is handed
over then.

On CUDA these are real steps, and nothing is added that would synchronise. On a CPU, where a step
would run inside its launch, the device's half is left out: overlap is on, every token is the same,
and `launch` is what remains without kernels.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from core.errors import RunError, UserError
from core.show import print_rows
from evals import records
from evals.arguments import Parser, count, heat, seed

if TYPE_CHECKING:
    from core.engine import Engine
    from core.executor import InFlight

PHASES = ("harvest", "plan", "stage", "launch", "events")
WARM_UP = 40  # steps: two blocks of tokens of the default size, and some


class Stopwatch:
    """Exclusive times of the phases of each step, in µs; what is in none of them is `events`."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._us, self._inner = engine, defaultdict[str, float](float), 0.0
        self._landed: float | None = None
        self._path: float | None = None
        loop: Any = engine  # the parts of a step are private, and stand here under their names
        executor = loop._executor
        loop._harvest = self._timed("harvest", loop._harvest)
        loop._schedule.plan = self._timed("plan", loop._schedule.plan)
        executor._stage = self._timed("stage", executor._stage, self._staged)
        executor.launch = self._timed("launch", self._watched(executor.launch))

    def step(self) -> tuple[dict[str, float], int]:
        """One step: its phases, its `path` where it has one, and how many tokens it brought."""
        self._us.clear()
        self._path = None
        events = self._timed("events", self._engine.step)()
        us = {name: self._us[name] for name in (*PHASES, "wait")}
        us["host"] = sum(us[name] for name in PHASES)
        if self._path is not None:
            us["path"] = self._path
        return us, sum(len(event.token_ids) for event in events)

    def _timed(
        self, name: str, function: Callable[..., Any], then: Callable[[float], None] | None = None
    ) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                now = time.perf_counter()
                took = (now - begun) * 1e6
                self._us[name] += took - self._inner
                self._inner = outer + took
                if then is not None:
                    then(now)

        return run

    def _watched(self, launch: Callable[..., InFlight]) -> Callable[..., InFlight]:
        def run(plan: Any) -> InFlight:
            step = launch(plan)
            return step._replace(wait=self._timed("wait", step.wait, self._has_landed))

        return run

    def _has_landed(self, now: float) -> None:
        self._landed = now

    def _staged(self, now: float) -> None:
        if self._landed is not None:
            self._path = (now - self._landed) * 1e6
            self._landed = None


def without_device(engine: Engine) -> None:
    """Leave out what the device does in a step: all tokens are the same, and there at once."""
    executor: Any = engine
    executor = executor._executor
    tokens = torch.full((engine.limits.max_num_seqs,), 5, dtype=torch.int32)
    executor._run_step = lambda batch: None
    executor._sample = lambda batch: tokens[: len(batch.sample_slots)]


def decode_steps(
    engine: Engine, stopwatch: Stopwatch, sequences: int, args: argparse.Namespace
) -> list[dict[str, float]]:
    """The phases of `args.steps` steps in which `sequences` sequences decode.

    Their prompts are of `args.context` tokens and up to 15 more, so that they do not all begin a
    block in the same step. Raises RunError where the cache does not hold them all.
    """
    from core.sampling import SamplingParams

    rng = np.random.default_rng(args.seed)
    lens = [args.context + i % 16 for i in range(sequences)]
    ahead = sum(lens) // engine.limits.max_num_batched_tokens + 2
    max_tokens = args.steps + WARM_UP + ahead + 4
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=args.temperature)
    names = [
        engine.add_request(rng.integers(0, engine.facts.vocab_size, n).tolist(), params)
        for n in lens
    ]
    for _ in range(ahead + WARM_UP):
        stopwatch.step()
    found = [stopwatch.step() for _ in range(args.steps)]
    for name in names:
        engine.abort(name)
    while engine.has_unfinished():
        engine.step()
    if short := sum(num_tokens != sequences for _, num_tokens in found):
        raise RunError(
            f"in {short} of {args.steps} steps not all of {sequences} sequences decoded: raise "
            "--kv-cache-bytes, or lower --sequences or --context"
        )
    return [us for us, _ in found]


def row(sequences: int, steps: list[dict[str, float]]) -> dict[str, float]:
    """Medians of every phase, and the 90th percentiles of `host` and `path`."""
    paths = [us["path"] for us in steps if "path" in us]
    medians = {
        name: statistics.median(us[name] for us in steps) for name in (*PHASES, "wait", "host")
    }
    ends = {"host p90": [us["host"] for us in steps], "path p90": paths}
    p90 = {name: float(np.quantile(values, 0.9)) for name, values in ends.items()}
    return {
        "sequences": sequences,
        "n": len(steps),
        **medians,
        "path": statistics.median(paths),
    } | p90


def main(argv: list[str] | None = None) -> int:
    parser = Parser("evals.speed.host_path", __doc__)
    parser.add_argument("--model", help="random:qwen3-0.6b on CUDA, else random:tiny")
    parser.add_argument("--kv", default="paged")
    parser.add_argument("--fusion", default="auto")
    parser.add_argument("--graphs", default="auto")
    parser.add_argument("--sched", default="fifo")
    parser.add_argument("--set", action="append", default=[], metavar="SEAM.FIELD=VALUE")
    parser.add_argument("--device")
    parser.add_argument("--sequences", type=count, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--seats", type=count, help="max_num_seqs; None: the most sequences")
    parser.add_argument("--context", type=count, default=256, help="tokens of the prompts")
    parser.add_argument("--steps", type=count, default=200, help="decode steps timed")
    parser.add_argument("--temperature", type=heat, default=0.0)
    parser.add_argument("--kv-cache-bytes", type=count)
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.seats and args.seats < max(args.sequences):
        parser.error(f"--seats {args.seats} cannot hold {max(args.sequences)} sequences: raise it")

    from core.config import parse_setting
    from core.engine import Engine

    on_cuda = torch.cuda.is_available() and args.device != "cpu"
    try:
        records.check_folder(args.json)
        with Engine(
            model=args.model or ("random:qwen3-0.6b" if on_cuda else "random:tiny"),
            kv=args.kv,
            fusion=args.fusion,
            graphs=args.graphs,
            sched=args.sched,
            settings=dict(parse_setting(text) for text in args.set),
            device=args.device,
            max_model_len=args.context + args.steps + 1024,
            max_num_seqs=args.seats or max(args.sequences),
            kv_cache_bytes=args.kv_cache_bytes,
            overlap=True,
        ) as engine:
            if not on_cuda:
                without_device(engine)
            stopwatch = Stopwatch(engine)
            rows = [row(n, decode_steps(engine, stopwatch, n, args)) for n in args.sequences]
            result = {
                "command": " ".join(["python -m evals.speed.host_path", *(argv or sys.argv[1:])]),
                "machine": records.machine(),
                "load": os.getloadavg(),
                "device_left_out": not on_cuda,
                "engine": engine.report(),
                "us": rows,
            }
    except UserError as error:
        print(f"outweigh: error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"outweigh: error: {error}", file=sys.stderr)
        return 1
    print_rows(rows, sys.stdout)
    if args.json:
        records.write(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
