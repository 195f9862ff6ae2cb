"""What a lossy KV cache does to the text: one kv offer beside another, item by item.

    python -m evals.quality --kv paged_int8 --against paged --model DIR --data BOOKS_DIR more.jsonl
    python -m evals.quality --parts text,generation,recall --data BOOKS_DIR --out FOLDER

text (the default): both engines read the same tokens, teacher-forced, through their stored keys and
values. Of every position that a token follows: KL(against || kv) in nats, whether the likeliest
token is the same, and the loss of the token that follows; whole, by position and by document. All
engines live at once and read the same weights; of logits there are --rows an engine at a time.

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

import shlex
import sys
from collections.abc import Sequence as Seq

from core.config import parse_setting
from core.errors import RunError, UserError
from core.show import progress_bar
from evals import records
from evals.quality import report
from evals.quality.options import parse
from evals.quality.parts import evaluate
from evals.quality.show import show
from evals.quality.verdicts import EXIT_CODES


def main(argv: Seq[str] | None = None) -> int:
    try:
        args = parse(argv, __doc__)
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
