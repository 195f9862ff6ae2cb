"""From a target of TTFT back to the configuration: the largest rate at which one holds it.

    python -m evals.speed.tune --ttft-ms 500 --percentile 99 --out tuned.json
    python -m core.run --config tuned.json "Hello"

One variable at a time: the most sequences at once, the tokens of a chunk, those of a block. Each
value is tried beside the best so far, and takes its place if it holds the target at a rate that is
larger by more than --resolution. How a rate is judged stands in evals.speed.ladder.targets; the
requests are those of evals.speed.ablate, new ones in each run. A rate is a share of no capacity but
the candidate's own, which is measured first in a closed loop.

The frontier has every candidate with the largest rate that it was shown to hold, none where that
is not larger than the best's before it. --out gets the fields of the best for `--config`, --json
all that was measured.

Exit code 0: found; 3: no candidate holds the target; 2: the command cannot be carried out; 1: it
failed; 130: interrupted.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence as Seq
from contextlib import closing
from pathlib import Path
from typing import Any

from core.config import RunConfig
from core.errors import RunError, UserError
from core.show import print_rows
from evals import records
from evals.arguments import Parser, count, positive, seed
from evals.speed.ablate import SIZES, assignments, refuse_shared
from evals.speed.arms import on_cpu, where
from evals.speed.ladder.loads import Mix
from evals.speed.ladder.progress import Bar
from evals.speed.ladder.rungs import Arm, engine_fields, plan_of
from evals.speed.ladder.runner import Common, Engines
from evals.speed.ladder.targets import Bracket, Effort, Target, Tuner
from evals.speed.workloads import fewest_samples

NOT_FOUND = 3
NUM_LONE = 7  # requests one at a time
BASE = {"kv": "paged", "enable_prefix_caching": True}
FIELDS = {"seats": "max_num_seqs", "chunk": "chunk_size", "block": "kv.block_size"}
# What is tried where it is left open, on a CPU and on CUDA.
VALUES: dict[str, tuple[list[int], list[int]]] = {
    "seats": ([4, 8, 16], [32, 64, 128, 256]),
    "chunk": ([32, 64, 128], [512, 1024, 2048, 4096]),
    "block": ([16, 32], [16, 32, 64]),
}


def candidate(choices: dict[str, Any]) -> Arm:
    """An arm that is called what it is."""
    parts = [f"{name}={choices[field]}" for name, field in FIELDS.items() if field in choices]
    return Arm(" ".join(parts) or "as it is", choices)


class Search:
    """One variable at a time. `brackets` are those of every candidate that was tried, `refused`
    says why others were not."""

    def __init__(self, tuner: Tuner, common: dict[str, Any]) -> None:
        self._tuner, self._common = tuner, common
        self.brackets: dict[str, Bracket] = {}
        self.refused: dict[str, str] = {}
        self.best: Arm | None = None

    def run(self, base: dict[str, Any], values: dict[str, Seq[int]]) -> Iterator[str]:
        """The name of each candidate before it is measured."""
        start = {FIELDS[name]: given[0] for name, given in values.items() if given}
        choices = {**base, **start}
        yield from self._try(candidate(choices))
        for name, given in values.items():
            for value in given[1:]:
                held = choices if self.best is None else self.best.choices
                yield from self._try(candidate({**held, FIELDS[name]: value}))

    def _try(self, arm: Arm) -> Iterator[str]:
        if arm.name in self.brackets or arm.name in self.refused:
            return
        try:
            plan_of(arm.choices, self._common)
        except UserError as error:
            self.refused[arm.name] = str(error)
            return
        yield arm.name
        best = None if self.best is None else self.brackets[self.best.name].holds
        try:
            found = self._tuner.bracket(arm, None if best is None else best.rate)
        except (UserError, RunError) as error:
            self.refused[arm.name] = str(error)
            return
        self.brackets[arm.name] = found
        if found.holds is not None:
            self.best = arm

    def frontier(self) -> list[dict[str, Any]]:
        """A row a candidate, the best first."""
        held = {
            name: max((p for p in probes if p.says == "holds"), key=lambda p: p.rate, default=None)
            for name, probes in self._tuner.probes.items()
        }
        rows = []
        for name, bracket in self.brackets.items():
            probe, best = held.get(name), self.best is not None and name == self.best.name
            rows.append(
                {
                    "candidate": name,
                    "capacity req/s": bracket.capacity,
                    "lone TTFT ms": bracket.lone_ms,
                    "holds req/s": None if probe is None else probe.rate,
                    "fails req/s": None if bracket.fails is None else bracket.fails.rate,
                    "worst run's TTFT ms": None if probe is None else max(probe.ttft_ms),
                    "ITL p50 ms": None if probe is None else probe.itl_ms_p50,
                    "tok/s": None if probe is None else probe.output_throughput,
                    "": "best" if best else "",
                }
            )
        return sorted(rows, key=lambda row: -(row["holds req/s"] or 0.0))


def cells(row: dict[str, Any]) -> dict[str, str]:
    return {
        key: "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
        for key, value in row.items()
    }


# -------- the command line


def parse(argv: Seq[str] | None) -> argparse.Namespace:
    parser = Parser("evals.speed.tune", __doc__)
    add = parser.add_argument
    add("--ttft-ms", type=positive, required=True)
    add("--percentile", type=positive, default=99.0)
    add("--out", type=Path, default=Path("tuned.json"), help="fields for --config of core.run")
    add("--json", type=Path, help="all that was measured")
    add("--base", type=assignments, default={}, metavar="FIELD=VALUE[,…]", help="of all candidates")
    for name, field in FIELDS.items():
        add(f"--{name}", type=count, nargs="+", help=f"values of {field}, the first to begin with")
    add("--runs", type=count, default=3, help="of a rate; new requests each")
    add("--most-runs", type=count, default=6, help="of a rate that is not decided")
    add("--resolution", type=positive, default=0.1, help="0.1: rates within 10 %% are one")
    add("--seed", type=seed, default=0)
    engine = parser.add_argument_group("what all candidates share")
    add = engine.add_argument
    add("--model")
    add("-p", dest="plugins", action="append", default=[], metavar="PLUGIN")
    add("--device")
    add("--dtype")
    add("--max-model-len", type=count)
    add("--max-num-batched-tokens", type=count)
    add("--kv-cache-bytes", help="of each engine")
    sizes = parser.add_argument_group("requests")
    add = sizes.add_argument
    add("--num-requests", type=count, help="of a run; default: as many as the percentile needs")
    add("--prompt-median", type=count)
    add("--max-prompt", type=count)
    add("--output-mean", type=count)
    add("--prefix-tokens", type=count, help="that prompts begin with")
    add("--num-prefixes", type=count, default=4, help="that they share")
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    is_open = args.num_requests is None
    for name, pair in {**SIZES, **VALUES}.items():
        if name in vars(args) and getattr(args, name) is None:
            setattr(args, name, pair[not on_cpu(args.device)])
    if is_open and args.percentile < 100:
        args.num_requests = max(args.num_requests, fewest_samples(args.percentile))
    return args


def check(args: argparse.Namespace) -> None:
    """Refuse before anything is measured what would fail at the end."""
    if args.percentile >= 100:
        raise UserError(f"--percentile is {args.percentile:g}: give one below 100")
    if args.runs < 2 or args.most_runs < args.runs:
        raise UserError(
            f"--runs is {args.runs} and --most-runs {args.most_runs}: one run has no interval, so "
            "give 2 or more, and no fewer at most"
        )
    if args.max_prompt + 2 > args.max_model_len:
        raise UserError(
            f"prompts of up to {args.max_prompt} tokens do not fit max_model_len "
            f"{args.max_model_len}: lower --max-prompt or raise --max-model-len"
        )
    if clash := [f for f in FIELDS.values() if f in args.base]:
        name = next(name for name, field in FIELDS.items() if field == clash[0])
        raise UserError(f"--base sets {clash[0]}, which --{name} varies: give --{name} instead")
    refuse_shared(args.base)
    for path in (args.out, args.json):
        records.check_folder(path)
    records.check_apart(**{"--out": args.out, "--json": args.json})


def main(argv: Seq[str] | None = None) -> int:
    args = parse(argv)
    try:
        check(args)
        return tune(args)
    except (UserError, RunError) as error:
        print(f"outweigh: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        print("outweigh: interrupted, nothing was written", file=sys.stderr)
        return 130


def tune(args: argparse.Namespace) -> int:
    target = Target(args.ttft_ms, args.percentile)
    common = {
        "model": args.model,
        "device": args.device,
        "dtype": args.dtype,
        "plugins": tuple(args.plugins),
        "max_model_len": args.max_model_len,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "kv_cache_bytes": args.kv_cache_bytes,
        "seed": args.seed,
    }
    mix = Mix(
        args.num_requests, NUM_LONE, args.prompt_median, args.max_prompt, args.output_mean,
        args.prefix_tokens, args.num_prefixes,
    )  # fmt: skip
    values = {name: getattr(args, name) for name in FIELDS}
    at_once = max(values["seats"])
    with Bar(sys.stderr) as bar:
        with closing(Engines(Common(common, mix, at_once, None), bar.stage)) as engines:
            effort = Effort(args.runs, args.most_runs, args.resolution)
            tuner = Tuner(engines, target, effort, args.seed)
            tuner.check(args.num_requests)
            search = Search(tuner, common)
            for i, name in enumerate(search.run({**BASE, **args.base}, values)):
                bar.run("tune", name, i)
    return report(args, target, search, tuner, common)


def report(
    args: argparse.Namespace, target: Target, search: Search, tuner: Tuner, common: dict[str, Any]
) -> int:
    """Print the frontier, and write what is asked for."""
    frontier = search.frontier()
    print_rows([cells(row) for row in frontier], sys.stdout)
    for name, why in search.refused.items():
        print(f"not measured, {name}: {why}")
    best = search.best
    fields: dict[str, Any] = {}
    if best is not None:
        given = {**common, **engine_fields(best.choices)}
        given = {name: value for name, value in given.items() if value not in (None, ())}
        fields = RunConfig.of(**given).model_dump(mode="json", exclude_unset=True)
        records.write(args.out, fields)
        held = search.brackets[best.name].holds
        assert held is not None, "the best holds"
        print(f"{target}: up to {held.rate:.4g} requests/s by {best.name}; {args.out} runs it")
    else:
        if not search.brackets:
            raise UserError("no candidate could be run: change --base, or what it is varied by")
        print(f"{target}: no candidate was shown to hold it at any rate that was looked at")
    if args.json:
        document = {
            "command": f"python -m evals.speed.tune {shlex.join(args.argv)}",
            **where(args.device),
            "target": target._asdict(),
            "frontier": frontier,
            "probes": {n: [p.as_dict() for p in probes] for n, probes in tuner.probes.items()},
            "refused": search.refused,
            "config": fields,
        }
        records.write(args.json, document)
    return 0 if best is not None else NOT_FOUND


if __name__ == "__main__":
    sys.exit(main())
