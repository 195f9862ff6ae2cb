"""What a lossy KV cache does to the text: one kv offer beside another, item by item.

    python -m evals.quality --kv paged_int8 --against paged --model DIR --data BOOKS_DIR more.jsonl
    python -m evals.quality --parts text,generation,recall --data BOOKS_DIR --out FOLDER

text (the default): both engines read the same tokens, teacher-forced, through their stored keys and
values. Of every position that a token follows: KL(against || kv) in nats, whether the likeliest
token is the same, and the loss of the token that follows; whole, by position and by document. All
engines live at once, each with its own weights.

generation: both write on after the same prompts, out of the data, with the same seeds: where greedy
texts part, and how texts repeat themselves. recall: numbers, names and lines hidden in contexts of
all lengths and depths. tasks: questions with an answer, --task gsm8k=FILE or contains=FILE. In
these parts the engines run one after the other.

Intervals are 95 %. Data: files (.txt: one document; .jsonl, .json, .parquet: one a row), folders of
.txt, or data sets of the hub (NAME or NAME:CONFIG, streamed). Verdicts are those of
evals/quality/limits.toml, or of the attribute `quality` of a lossy offer.

Exit code 0: it is shown that the offer costs no more than it may; 1: it is shown that it costs
more; 3: neither is shown; 2: the command cannot be carried out.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NoReturn

from core.config import parse_setting
from core.errors import RunError, UserError
from core.show import progress_bar
from evals import records
from evals.arguments import count, seed
from evals.quality import report
from evals.quality.data import Choice
from evals.quality.lockstep import ROWS
from evals.quality.parts import PARTS, evaluate
from evals.quality.recall import STYLES
from evals.quality.show import show
from evals.quality.verdicts import EXIT_CODES


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help shows every option")


def parse(argv: Seq[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m evals.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--kv", default="paged_int8", help="the offer in question")
    add("--against", default="paged", metavar="KV", help="the reference")
    add("--model", default="tiny", help="folder, hub id, or tiny (embedded)")
    add("--parts", type=_parts, default=("text",), metavar="PART,…", help=", ".join(PARTS))
    add("--data", action="extend", nargs="+", default=[], metavar="SOURCE", help="see above")
    add("--field", default=Choice().field, help="of a row, that holds the text")
    add("--split", default=Choice().split, help="of a data set of the hub")
    add("--limit", type=count, default=Choice().limit, metavar="N", help="documents of a source")
    add("--tokens", type=count, default=2048, metavar="N", help="of a document, its first")
    add("--set", action="append", default=[], metavar="SEAM.FIELD=VALUE",
        help="an option of an offer; of kv: of the one in question")  # fmt: skip
    add("--set-against", action="append", default=[], metavar="kv.FIELD=VALUE",
        help="an option of the reference")  # fmt: skip
    add("-p", dest="plugins", action="append", default=[], metavar="PLUGIN", help="module or file")
    about = "the reference in bfloat16 beside itself in float32 too: what rounding does"
    add("--noise-floor", action="store_true", help=about)
    add("--json", type=Path, metavar="FILE", help="write everything there")
    about = "write result.json, result.md and report.html there (matplotlib draws)"
    add("--out", type=Path, metavar="FOLDER", help=about)
    add("--device", help="default: cuda if there is one")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: that of the device")
    add("--kv-cache-bytes", metavar="X", help="of each engine; default: what fits, on CUDA 4GiB")
    add("--rows", type=count, default=ROWS, metavar="N", help="logits held at a time")
    add("--seed", type=seed, default=0, help="of sampling, items, bootstrap and random weights")
    _of_written(parser)
    return parser.parse_args(argv)


def _of_written(parser: argparse.ArgumentParser) -> None:
    """Options of the parts in which the arms write."""
    add = parser.add_argument_group("generation, recall, tasks").add_argument
    add("--batch", type=count, default=16, metavar="N", help="sequences of one step")
    add("--preemption", choices=("recompute", "swap"), default="recompute",
        help="what becomes of the keys of whom a full cache has no room for")  # fmt: skip
    add("--no-sharing", action="store_true", help="recall shares no blocks of equal prefixes")
    add("--num-prompts", type=count, default=32, metavar="N", help="of generation")
    add("--prompt-tokens", type=count, default=64, metavar="N", help="of each, at most")
    add("--new-tokens", type=count, default=2048, metavar="N", help="that follow it")
    add("--temperatures", type=_heat, nargs="+", default=[0.0, 0.8], metavar="T",
        help="of generation, 0 is greedy; the highest is judged")  # fmt: skip
    add("--ignore-eos", action="store_true", help="generation writes on to the full length")
    add("--chat", action="store_true", help="a document is a message, and generation answers it")
    add("--style", choices=STYLES, help="of recall; default: trained for tiny, chat, or text")
    add("--kinds", nargs="+", metavar="KIND", help="of recall; default: all that the style has")
    add("--num-recall", type=count, default=100, metavar="N", help="items of each kind")
    add("--lengths", type=count, nargs="+", default=[1024, 2048, 4096], metavar="TOKENS")
    add("--depths", type=_depth, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0], metavar="SHARE")
    add(
        "--task",
        action="append",
        default=[],
        metavar="NAME=SOURCE",
        help="gsm8k, contains, or a plugin's own",
    )
    add("--question-field", metavar="FIELD", help="of a row of a task; default: the task's own")
    add("--answer-field", metavar="FIELD", help="the same of its answer")
    add("--task-limit", type=count, default=200, metavar="N", help="rows of a task")
    add("--task-tokens", type=count, default=2048, metavar="N", help="of a prompt and its answer")
    add("--answer-tokens", type=count, default=384, metavar="N", help="most of an answer")


def _parts(text: str) -> tuple[str, ...]:
    wanted = tuple(text.split(","))
    if len(set(wanted)) < len(wanted):
        raise argparse.ArgumentTypeError(f"{text} names a part twice: name each once")
    if unknown := sorted(set(wanted) - set(PARTS)):
        known = ",".join(PARTS)
        raise argparse.ArgumentTypeError(f"there is no part {unknown[0]!r}: choose from {known}")
    return tuple(part for part in PARTS if part in wanted)


def _heat(text: str) -> float:
    return _from_0(text, float("inf"))


def _depth(text: str) -> float:
    return _from_0(text, 1.0)


def _from_0(text: str, most: float) -> float:
    value = float(text)
    if not 0 <= value <= most or value == float("inf"):
        limit = "" if most == float("inf") else f" to {most:g}"
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0{limit}")
    return value


def main(argv: Seq[str] | None = None) -> int:
    try:
        args = parse(argv)
        records.check_folder(args.json)
        if args.out:
            report.check(args.out)
        settings = dict(map(parse_setting, args.set)), dict(map(parse_setting, args.set_against))
        given = sys.argv[1:] if argv is None else argv
        command = f"python -m evals.quality {shlex.join(given)}"
        with progress_bar(sys.stderr) as progress:
            record = {"command": command, **evaluate(args, *settings, progress)}
        show(record, sys.stdout)
        if args.json:
            records.write(args.json, record)
        if args.out:
            report.write(args.out, record)
    except (UserError, RunError, OSError) as error:
        # The engine speaks of its own option, which is not on offer here under that name.
        message = " ".join(str(error).split()).replace("--max-model-len", "--tokens")
        print(f"outweigh: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("outweigh: interrupted, nothing was written", file=sys.stderr)
        return 130
    return EXIT_CODES[record["verdict"]]


if __name__ == "__main__":
    sys.exit(main())
