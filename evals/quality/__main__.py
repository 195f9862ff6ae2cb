"""What a lossy KV cache does to the text: one kv offer beside another, position by position.

    python -m evals.quality --kv paged_int8 --against paged --model DIR --data BOOKS_DIR more.jsonl

Both engines read the same tokens, teacher-forced, through their stored keys and values. Of every
position that a token follows: KL(against || kv) in nats, whether the likeliest token is the same,
and the loss of the token that follows; whole, by position and by document. Intervals are 95 %.

Data: files (.txt: one document; .jsonl, .json, .parquet: one a row), folders of .txt, or data sets
of the hub (NAME or NAME:CONFIG, streamed). All engines live at once, each with its own weights.
Verdicts are those of evals/quality/limits.toml, or of the attribute `quality` of a lossy offer.

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
from evals.quality.data import Choice
from evals.quality.lockstep import ROWS
from evals.quality.measure import measure
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
    add("--data", action="extend", nargs="+", required=True, metavar="SOURCE", help="see above")
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
    add("--device", help="default: cuda if there is one")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: that of the device")
    add("--kv-cache-bytes", metavar="X", help="of each engine; default: what fits, on CUDA 4GiB")
    add("--rows", type=count, default=ROWS, metavar="N", help="logits held at a time")
    add("--seed", type=seed, default=0, help="of the bootstrap and of random weights")
    return parser.parse_args(argv)


def main(argv: Seq[str] | None = None) -> int:
    try:
        args = parse(argv)
        records.check_folder(args.json)
        settings = dict(map(parse_setting, args.set)), dict(map(parse_setting, args.set_against))
        with progress_bar(sys.stderr) as progress:
            record = measure(args, *settings, progress)
        show(record, sys.stdout)
        if args.json:
            given = sys.argv[1:] if argv is None else argv
            command = f"python -m evals.quality {shlex.join(given)}"
            records.write(args.json, {"command": command, **record})
    except (UserError, RunError, OSError) as error:
        # The engine speaks of its own option, which is not on offer here under that name.
        message = " ".join(str(error).split()).replace("--max-model-len", "--tokens")
        print(f"outweigh: error: {message}", file=sys.stderr)
        return 2
    return EXIT_CODES[record["verdict"]]


if __name__ == "__main__":
    sys.exit(main())
