"""The options of the command, and the parts that each is of: no other part takes it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

from core.errors import UserError
from evals.arguments import Parser, count, heat, seed, share
from evals.quality.data import Choice, has_rows, is_of_the_hub
from evals.quality.lockstep import ROWS
from evals.quality.parts import FROM_DOCUMENTS, PARTS
from evals.quality.recall import STYLES, trained_style


class _Owned(NamedTuple):
    """An option, as it is written, and the parts that take it."""

    option: str
    parts: tuple[str, ...]


class Options:
    """A parser, and for the options that not all parts take whose they are, by destination."""

    def __init__(self, about: str | None) -> None:
        self.parser = Parser("evals.quality", about)
        self.owned: dict[str, _Owned] = {}

    def of(self, *parts: str) -> Callable[..., None]:
        """What adds an option of these parts, called by the first of its names."""
        group = self.parser.add_argument_group(", ".join(parts))

        def add(*names: str, **fields: Any) -> None:
            action = group.add_argument(*names, **fields)
            self.owned[action.dest] = _Owned(names[0], parts)

        return add


def all_options(about: str | None = None) -> Options:
    options = Options(about)
    _of_all(options.parser.add_argument)
    _of_reading(options)
    _of_writing(options)
    return options


def parse(argv: Seq[str] | None, about: str | None) -> argparse.Namespace:
    """The arguments. Raises UserError for what is wrong, and for what would change nothing."""
    options = all_options(about)
    args = options.parser.parse_args(argv)
    # Where an attribute is there already argparse leaves it, unless the option is given.
    unset = argparse.Namespace(**dict.fromkeys(vars(args)))
    found = vars(options.parser.parse_args(argv, unset))
    given = {name for name, value in found.items() if value is not None}
    _refuse_idle(args, given, options.owned)
    return args


def _of_all(add: Callable[..., Any]) -> None:
    about = "the offer in question; of the part text several, beside one pass of the reference"
    add("--kv", nargs="+", default=["paged_int8"], metavar="KV[:FIELD=VALUE,…]", help=about)
    add("--against", default="paged", metavar="KV", help="the reference")
    add("--model", default="tiny", help="folder, hub id, or tiny (embedded)")
    add("--parts", type=_parts, default=("text",), metavar="PART,…", help=", ".join(PARTS))
    add("--set", action="append", default=[], metavar="SEAM.FIELD=VALUE",
        help="an option of an offer; of kv: of the one in question, where it is one")  # fmt: skip
    add("--set-against", action="append", default=[], metavar="kv.FIELD=VALUE",
        help="an option of the reference")  # fmt: skip
    add("-p", dest="plugins", action="append", default=[], metavar="PLUGIN", help="module or file")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    about = "write result.json, result.md and report.html there (matplotlib draws)"
    add("--out", type=Path, metavar="FOLDER", help=about)
    add("--device", help="default: cuda if there is one")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: that of the device")
    add("--kv-cache-bytes", metavar="X", help="of each engine; default: what fits, on CUDA 4GiB")
    add("--seed", type=seed, default=0, help="of sampling, items, bootstrap and random weights")


def _of_reading(options: Options) -> None:
    add = options.of("text", "generation", "recall")
    about = "see above; in recall the filler of the style trained"
    add("--data", "--dataset", action="extend", nargs="+", default=[], metavar="SOURCE", help=about)
    add("--field", default=Choice().field, help="of a row, that holds the text")
    add("--limit", type=count, default=Choice().limit, metavar="N", help="documents of a source")
    add = options.of(*PARTS)
    add("--split", default=Choice().split, help="of a data set of the hub")
    add = options.of("text")
    add("--tokens", type=count, default=2048, metavar="N", help="of a document, its first")
    add("--rows", type=count, default=ROWS, metavar="N", help="logits held at a time")
    about = "the reference in float32 beside itself with keys and values in bfloat16 too"
    add("--noise-floor", action="store_true", help=about)


def _of_writing(options: Options) -> None:
    add = options.of(*PARTS[1:])
    add("--batch", type=count, default=16, metavar="N", help="sequences of one step")
    add("--preemption", choices=("recompute", "swap"), default="recompute",
        help="what becomes of the keys of whom a full cache has no room for")  # fmt: skip
    add = options.of("generation")
    add("--num-prompts", type=count, default=32, metavar="N", help="texts of each temperature")
    add("--prompt-tokens", type=count, default=64, metavar="N", help="of each prompt, at most")
    add("--new-tokens", type=count, default=2048, metavar="N", help="that follow it")
    add("--temperatures", type=heat, nargs="+", default=[0.0, 0.8], metavar="T",
        help="0 is greedy; the highest is judged")  # fmt: skip
    add("--ignore-eos", action="store_true", help="texts go on to the full length")
    add("--chat", action="store_true", help="a document is a message, and a text answers it")
    add = options.of("recall")
    add("--no-sharing", action="store_true", help="no blocks of equal prefixes are shared")
    add("--style", choices=STYLES, help="default: trained for tiny, chat, or text")
    add("--kinds", nargs="+", metavar="KIND", help="default: all that the style has")
    add("--num-recall", type=count, default=100, metavar="N", help="items of each kind")
    add("--lengths", type=count, nargs="+", default=[1024, 2048, 4096], metavar="TOKENS")
    add("--depths", type=share, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0], metavar="SHARE")
    add = options.of("tasks")
    add("--task", action="append", default=[], metavar="NAME=SOURCE",
        help="gsm8k, contains, or a plugin's own")  # fmt: skip
    add("--question-field", metavar="FIELD", help="of a row; default: the task's own")
    add("--answer-field", metavar="FIELD", help="the same of its answer")
    add("--task-limit", type=count, default=200, metavar="N", help="rows of a task")
    add("--task-tokens", type=count, default=2048, metavar="N", help="of a prompt and its answer")
    add("--answer-tokens", type=count, default=384, metavar="N", help="most of an answer")


def _refuse_idle(args: argparse.Namespace, given: set[str], owned: Mapping[str, _Owned]) -> None:
    """Raises UserError for an option that was given and changes nothing of this run."""
    for name, (option, parts) in owned.items():
        if name in given and not set(parts) & set(args.parts):
            what = f"{option} is of {' or '.join(parts)}, and --parts is {','.join(args.parts)}"
            raise UserError(f"{what}: drop {option}, or ask for that part")
    if len(args.kv) > 1 and args.parts != ("text",):
        what = f"--kv names {len(args.kv)} offers, which the part text alone takes at once"
        raise UserError(f"{what}: run --parts {','.join(args.parts)} for one after the other")
    if args.data and not set(args.parts) & set(FROM_DOCUMENTS) and not trained_style(args):
        what = "--data is the filler of recall in the style trained, and this run is in another"
        raise UserError(f"{what}: drop --data, or choose --style trained")
    _refuse_idle_choices(args, given)


def _refuse_idle_choices(args: argparse.Namespace, given: set[str]) -> None:
    """The same of the options that choose from sources."""
    for name in ("field", "limit"):
        if name in given and not args.data:
            raise UserError(f"--{name} is of documents and there are none: name some with --data")
    if "field" in given and not any(map(has_rows, args.data)):
        what = f"--field chooses of a row, and {', '.join(args.data)} holds whole texts"
        raise UserError(f"{what}: drop --field")
    sources = [*args.data, *(task.partition("=")[2] for task in args.task)]
    if "split" in given and not any(map(is_of_the_hub, sources)):
        what = f"--split is of a data set of the hub, and {', '.join(sources) or 'there'} is none"
        raise UserError(f"{what}: drop --split")


def _parts(text: str) -> tuple[str, ...]:
    wanted = tuple(text.split(","))
    if len(set(wanted)) < len(wanted):
        raise argparse.ArgumentTypeError(f"{text} names a part twice: name each once")
    if unknown := sorted(set(wanted) - set(PARTS)):
        known = ",".join(PARTS)
        raise argparse.ArgumentTypeError(f"there is no part {unknown[0]!r}: choose from {known}")
    return tuple(part for part in PARTS if part in wanted)
