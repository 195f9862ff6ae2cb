"""What each part of the runtime did: one change at a time, from the bottom of a ladder to its top.

    python -m evals.speed.ablate --out ladder
    python -m evals.speed.ablate --out mine --base kv=paged --arm wide=kv.block_size=64
    python -m evals.speed.ablate --rungs paged 'fusion=*' 'span=*' --dry-run

The baseline is a contiguous cache, plain nodes, eager steps without overlap, first come first
served, prompts in one piece. Each rung changes one variable, and is measured beside the rung below
it on the same requests: a closed loop, which gives the capacity; then rates that are shares of the
*baseline's* capacity. Rungs that matter where requests compete are measured there too. An arm that
cannot keep up is refused, and what this device lacks is said. Rounds run forwards and backwards in
turn (ABBA) with the first arm twice, as a control; a run is a unit, and verdicts are corrected over
the steps (evals.speed.paired, evals.speed.verdicts).

--out gets result.json, result.md and report.html, which needs nothing but itself, after each phase
and after Ctrl-C; a run that was killed goes on with --resume, and has lost the run in flight.

Exit code 0: measured; 2: the command cannot be carried out; 1: it failed; 130: interrupted.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence as Seq
from contextlib import closing
from pathlib import Path
from typing import Any

from core.errors import RunError, UserError, explained
from evals import records
from evals.arguments import Parser, count, positive, seed
from evals.quality.data import Choice, read_documents
from evals.speed.arms import on_cpu, where
from evals.speed.ladder import lossy, markdown, report, rungs
from evals.speed.ladder.ceilings import ceilings
from evals.speed.ladder.findings import question_sentence
from evals.speed.ladder.loads import Mix
from evals.speed.ladder.measured import DEFINITIONS
from evals.speed.ladder.phases import Climb, Plan, checked
from evals.speed.ladder.progress import Bar
from evals.speed.ladder.runner import Common, Engines
from evals.speed.ladder.split import split
from evals.speed.ladder.study import Store, Timetable, read, study_in
from evals.speed.replication import DEFAULT_PAIRS

# What is left open, on a CPU and on CUDA. A CPU's are for the embedded model.
SIZES: dict[str, tuple[Any, Any]] = {
    "model": ("tiny", "random:qwen3-0.6b"),
    "minutes": (9.0, None),
    "rounds": (6, DEFAULT_PAIRS),
    "leave_one_out": (3, 5),
    "max_model_len": (288, 4608),
    "max_num_seqs": (8, 64),
    "max_num_batched_tokens": (512, 8192),
    "chunk": (64, 1024),
    "kv_cache_bytes": (None, "6GiB"),
    "num_requests": (16, 64),
    "num_lone": (6, 16),
    "lone_prompts": ([32, 128], [128, 512, 1024, 4096]),
    "prompt_median": (48, 512),
    "max_prompt": (224, 4096),
    "output_mean": (8, 32),
    "prefix_tokens": (24, 256),
}
FEWEST_REQUESTS = 8
SHARED = (
    "model", "device", "dtype", "plugins", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "kv_cache_bytes", "seed",
)  # fmt: skip
KV_SHARE = 0.5  # of full seats at full length, where --kv-cache-bytes is left open


class Ablation:
    """One command: from its arguments to its documents."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = "cpu" if on_cpu(args.device) else "cuda"
        self.base = rungs.base_of(args.base)
        self.common = {
            "model": args.model,
            "device": args.device,
            "dtype": args.dtype,
            "plugins": tuple(args.plugins),
            "max_model_len": args.max_model_len,
            "max_num_seqs": args.max_num_seqs,
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "kv_cache_bytes": args.kv_cache_bytes,
            "seed": args.seed,
        }
        self.ladder = self._ladder()
        self.plan = Plan(
            self.ladder, args.load, args.leave_one_out, self.common, self.device,
            is_pressed=not args.no_pressure, ends_only=args.ends,
        )  # fmt: skip

    def _ladder(self) -> rungs.Ladder:
        args = self.args
        known = rungs.all_rungs(args.chunk)
        wanted = [] if args.arm and args.rungs is None else rungs.chosen(known, args.rungs)
        wanted += [rungs.own_rung(text) for text in args.arm]
        ladder = rungs.build(self.base, wanted, self.common, device=self.device)
        for text in args.arm:
            if reason := ladder.left_out.get(rungs.own_rung(text).name):
                raise UserError(f"--arm {text}: {reason}")
        if args.quality_data and not any(lossy.is_lossy(arm, self.common) for arm in ladder.arms):
            raise UserError("no arm is lossy, so nothing reads --quality-data: leave it out")
        if len(ladder.arms) < 2:
            why = "; ".join(f"{name}: {reason}" for name, reason in ladder.left_out.items())
            raise UserError(f"there is nothing to measure beside the baseline: {why}")
        return ladder

    def about(self) -> dict[str, Any]:
        """What identifies the study: whoever resumes must ask for the same."""
        args = self.args
        unimportant = ("argv", "out", "resume", "dry_run", "fits")
        return {
            "arguments": {k: v for k, v in vars(args).items() if k not in unimportant},
            **where(args.device),
        }

    def engines(self, bar: Bar) -> Engines:
        """A runner, and the size of the cache where that was left open."""
        args = self.args
        mix = Mix(
            args.num_requests,
            args.num_lone,
            args.prompt_median,
            args.max_prompt,
            args.output_mean,
            args.prefix_tokens,
            args.num_prefixes,
        )
        rates, self.known_ceilings = ceilings(args)
        if self.common["kv_cache_bytes"] is None and self.device == "cpu":
            common = Common(self.common, mix, args.max_num_seqs, None)
            with closing(Engines(common, bar.stage)) as probe:
                size = probe.bytes_of_share(self.ladder.arms[0], KV_SHARE)
            self.common["kv_cache_bytes"] = size
        common = Common(self.common, mix, args.max_num_seqs, rates)
        return Engines(common, bar.stage, rebuild=args.rebuild)

    # -------- measuring

    def run(self, bar: Bar) -> Iterator[dict[str, Any]]:
        """The document, each time that a phase is through; after an interruption what there is."""
        args = self.args
        self.fit(bar)
        store = Store(args.out, self.about(), resume=args.resume)
        expected = self.plan.expected()
        bar.begin(sum(num for *_, num in expected) * args.rounds)
        begun = time.monotonic() - (seconds_in(args.out) if args.resume else 0.0)
        with closing(self.engines(bar)) as engines:
            timetable = Timetable(args.rounds, args.seed, args.question, bar.run)
            climb = Climb(self.plan, engines, store, timetable)

            def known() -> dict[str, Any]:
                reports = store.reports(engines.reports)
                seconds = time.monotonic() - begun
                return {
                    **self._head(), **climb.document, "engines": reports, "seconds": seconds
                }  # fmt: skip

            document = known()
            try:
                for _ in climb.run():
                    document = known()
                    yield document
                document["quality"] = checked(
                    self.ladder,
                    lambda arm: lossy.is_lossy(arm, self.common),
                    lambda below, arm: lossy.check(
                        engines, below, arm, args.quality_data, args.seed
                    ),
                )
                kept = self.plan.ends if args.ends else self.ladder.kept
                document["split"] = split(
                    engines, kept, self.common, args.prompt_median, args.lone_prompts
                )
                document |= {"complete": True, "seconds": time.monotonic() - begun}
            except KeyboardInterrupt:
                yield {**document, **known()}
                raise
            yield document

    def _head(self) -> dict[str, Any]:
        args = self.args
        return {
            "command": f"python -m evals.speed.ablate {shlex.join(args.argv)}",
            "complete": False,
            **self.about(),
            "definitions": DEFINITIONS,
            "question": question_sentence(args.question, args.rounds, args.seed),
            "baseline": self.base,
            "common": dict(self.common),
            "ceilings": self.known_ceilings,
            "ladder": [
                {
                    "name": arm.name,
                    "before": arm.before,
                    "change": {} if arm.rung is None else dict(arm.rung.change),
                    "about": "" if arm.rung is None else arm.rung.about,
                    "stays": arm.rung is None or arm.rung.stays,
                    "choices": dict(arm.choices),
                }
                for arm in self.ladder.arms
            ],
            "left_out": dict(self.ladder.left_out),
        }

    def write(self, document: dict[str, Any]) -> None:
        out = self.args.out
        records.write(out / "result.json", document)
        records.write_text(out / "result.md", markdown.text(document))
        records.write_text(out / "report.html", report.html(document))

    # -------- how long it takes

    def fit(self, bar: Bar) -> None:
        """Fewer requests a run, if their number was left open and --minutes are too few for what is
        usual; as many as before if the runs of --out go on."""
        args = self.args
        if not (args.fits and args.minutes):
            return
        before = study_in(args.out)
        if before is not None:
            args.num_requests = before["arguments"]["num_requests"]
            return
        runs_s, build_s = self._seconds(bar)
        least_s = build_s + runs_s * FEWEST_REQUESTS / args.num_requests
        if args.minutes * 60 < least_s:
            what = f"{args.minutes:g} minutes are too few (--minutes)"
            least = f"runs of {FEWEST_REQUESTS} requests take about {least_s / 60:.1f}"
            print(f"outweigh: note: {what}: {least}", file=sys.stderr)
        share = max(0.0, args.minutes * 60 - build_s) / runs_s
        args.num_requests = max(FEWEST_REQUESTS, int(args.num_requests * min(1.0, share)))

    def estimate(self, bar: Bar) -> str:
        """Rungs, blocks with their runs, and about how long they take."""
        self.fit(bar)
        seconds = sum(self._seconds(bar))
        return markdown.plan(self._head(), self.plan.expected(), self.args.rounds, seconds)

    def _seconds(self, bar: Bar) -> tuple[float, float]:
        """What runs and building take, if no arm is faster than the baseline, which is built for
        it and serves the requests."""
        args = self.args
        with closing(self.engines(bar)) as engines:
            seconds = _seconds_of_kinds(engines, self.ladder.arms[0], args.load, args.seed)
            build_s = engines.build_s[0]
        blocks = self.plan.expected()
        warm_up = {kind: seconds["lone" if kind == "lone" else "closed"] for kind in seconds}
        num_warm = args.rounds if args.rebuild else 1
        runs_s = sum(n * (seconds[k] * args.rounds + warm_up[k] * num_warm) for _, k, n in blocks)
        scarce = len(self.plan.pressed)  # engines of their own, for the small pool
        num_engines = len(self.ladder.arms) + 1 + 3 * scarce + 2 * args.leave_one_out
        if args.rebuild:
            num_engines = args.rounds * sum(num for *_, num in blocks)
        return runs_s, build_s * num_engines


def _seconds_of_kinds(
    engines: Engines, base: rungs.Arm, shares: Seq[float], seed: int
) -> dict[str, float]:
    from evals.speed.ladder.loads import Load

    def duration(load: Load) -> float:
        return float(engines.measure(base, load, seed=seed, label="estimate")["duration_s"])

    closed = duration(Load("closed"))
    mean = sum(1 / share for share in shares) / len(shares)
    return {
        "closed": closed, "burst": closed, "poisson": closed * mean, "lone": duration(Load("lone"))
    }  # fmt: skip


# -------- the command line


def share(text: str) -> float:
    """A number above 0 and below 0.98: from there on nothing is stationary."""
    value = positive(text)
    if value >= 0.98:
        raise argparse.ArgumentTypeError(f"{text} of the capacity leaves no steady state")
    return value


def assignments(text: str) -> dict[str, Any]:
    try:
        return rungs.assignments(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse(argv: Seq[str] | None) -> argparse.Namespace:
    parser = Parser("evals.speed.ablate", __doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("ablation"), metavar="DIR", help="default: ablation")
    add("--rungs", nargs="+", metavar="NAME", help="names or patterns of a shell; all: every rung")
    add("--arm", action="append", default=[], metavar="NAME=FIELD=VALUE",
        help="a rung of your own, on top; without --rungs in place of the ladder")  # fmt: skip
    add("--base", type=assignments, default={}, metavar="FIELD=VALUE[,…]", help="of the baseline")
    add("--load", type=share, nargs="+", default=[0.6, 0.85], metavar="SHARE",
        help="of the baseline's capacity")  # fmt: skip
    add(
        "--rounds", type=count, help="runs of each arm under each load; even, so that drift cancels"
    )
    add("--minutes", type=positive, help="then runs have fewer requests, if --num-requests is left "
        f"open, but no fewer than {FEWEST_REQUESTS}; default on a CPU: 9")  # fmt: skip
    add("--question", choices=("repeatability", "generality"), default="repeatability",
        help="one trace again and again, or a new one each round")  # fmt: skip
    add("--leave-one-out", type=seed, metavar="N", help="rungs, those of the largest effect")
    add("--ends", action="store_true", help="measure the baseline and the top alone")
    add("--no-pressure", action="store_true", help="leave out bursts and small pools")
    add("--quality-data", nargs="+", default=[], metavar="SOURCE", help="as of evals.quality")
    add("--seed", type=seed, default=0)
    add("--rebuild", action="store_true", help="one engine at a time, built anew for each run")
    add("--resume", action="store_true", help="go on with the runs in --out")
    add("--dry-run", action="store_true", help="print rungs, runs and the time they take")
    _add_engine(parser.add_argument_group("what all arms share"))
    _add_sizes(parser.add_argument_group("requests"))
    roof = parser.add_argument_group("roofline (measured on a CPU where left open)")
    roof.add_argument("--bandwidth", type=positive, help="TB/s; on CUDA 4.24, as of one H200")
    roof.add_argument("--flops", type=positive, help="TFLOP/s; on CUDA 765, as of one H200")
    args = parser.parse_args(argv)
    args.fits = args.num_requests is None
    if args.ends and args.leave_one_out is None:
        args.leave_one_out = 0
    args.argv = list(sys.argv[1:] if argv is None else argv)
    for name, values in SIZES.items():
        if getattr(args, name) is None:
            setattr(args, name, values[not on_cpu(args.device)])
    return args


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model")
    add("-p", dest="plugins", action="append", default=[], metavar="PLUGIN")
    add("--device")
    add("--dtype")
    add("--max-model-len", type=count)
    add("--max-num-seqs", type=count, help="also what a closed loop holds at once")
    add("--max-num-batched-tokens", type=count)
    add("--kv-cache-bytes", help="of each engine; on a CPU half of full seats at full length")
    add("--chunk", type=count, help="tokens of the rung chunk=N")


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num-requests", type=count, help="of a run")
    add("--num-lone", type=count, help="of a run with one at a time")
    add("--lone-prompts", type=count, nargs="*", help="tokens of prompts on an idle engine")
    add("--prompt-median", type=count)
    add("--max-prompt", type=count)
    add("--output-mean", type=count)
    add("--prefix-tokens", type=count, help="that prompts begin with")
    add("--num-prefixes", type=count, default=4, help="that they share")


def check(args: argparse.Namespace) -> None:
    """Refuse before anything is measured what would fail at the end."""
    longest = max(args.max_prompt, args.prompt_median, *args.lone_prompts)
    if longest + 2 > args.max_model_len:
        raise UserError(
            f"prompts of up to {longest} tokens do not fit max_model_len {args.max_model_len}: "
            "lower --max-prompt, --prompt-median or --lone-prompts, or raise --max-model-len"
        )
    if args.max_model_len > args.max_num_batched_tokens:
        raise UserError(
            f"the baseline takes a prompt in one step, of {args.max_num_batched_tokens} tokens, "
            f"and max_model_len is {args.max_model_len}: raise --max-num-batched-tokens"
        )
    refuse_shared(args.base)
    if args.ends and args.leave_one_out:
        raise UserError("--ends measures no rung, so none can be left out: drop --leave-one-out")
    if args.rounds % 2:
        raise UserError(f"--rounds is {args.rounds}: give an even number, so that drift cancels")
    if args.quality_data:
        read_documents(args.quality_data, Choice())
    check_out(args.out, is_needed=not args.dry_run)
    if not args.dry_run:
        report.check()


def refuse_shared(base: Mapping[str, Any]) -> None:
    """Raises UserError where --base sets a field that all arms share."""
    if clash := [name for name in base if name in SHARED]:
        option = "-p" if clash[0] == "plugins" else f"--{clash[0].replace('_', '-')}"
        raise UserError(f"--base sets {clash[0]}, which all arms share: give {option} instead")


def seconds_in(out: Path) -> float:
    """How long a study in that folder, which another command goes on with, had taken when it was
    last written down."""
    path = out / "result.json"
    return float(read(path).get("seconds") or 0.0) if path.is_file() else 0.0


def check_out(out: Path, *, is_needed: bool) -> None:
    """Raises UserError for what is no folder of results; makes it where it `is_needed`."""
    for path in (out, out / "runs"):
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is there and no folder: name another --out")
    if is_needed:
        with explained(f"{out} cannot be made", "name another --out"):
            out.mkdir(parents=True, exist_ok=True)
        records.check_folder(out / "result.json")


def main(argv: Seq[str] | None = None) -> int:
    args = parse(argv)
    try:
        check(args)
        ablation = Ablation(args)
        with Bar(sys.stderr) as bar:
            if args.dry_run:
                print(ablation.estimate(bar))
                return 0
            document: dict[str, Any] = {}
            for document in ablation.run(bar):
                ablation.write(document)
        print(markdown.text(document, brief=True))
        print(f"{args.out / 'report.html'} has it all")
    except (UserError, RunError) as error:
        print(f"outweigh: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        print(f"outweigh: interrupted; {args.out} has what there is, --resume goes on",
              file=sys.stderr)  # fmt: skip
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
