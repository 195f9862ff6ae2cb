"""The command line: `outweigh run|list|env …`, or `python -m core.run [PROMPT …]`.

Text goes to stdout, everything about the run to stderr. Exit codes: 0; 1 for a run that failed; 2
for what the caller can mend; 130 if interrupted. OUTWEIGH_DEBUG=1 shows the traceback of an error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import core

if Path(core.__file__ or "").resolve().parent != Path(__file__).resolve().parent:
    what = f"outweigh: error: {core.__file__} hides outweigh's own package 'core'"
    print(f"{what}: run outside that folder, or as `python -P -m core.run`", file=sys.stderr)
    raise SystemExit(2)

from core import show
from core.config import RunConfig, did_you_mean, parse_setting
from core.errors import RunError, UserError
from core.inputs import Request, read_config, read_requests
from core.plan import DEFAULTS, resolve
from core.registry import Offer, Registry
from core.sampling import SamplingParams

if TYPE_CHECKING:
    from core.engine import Engine, RequestOutput

SAMPLING = [f for f in fields(SamplingParams) if f.name not in RunConfig.model_fields]
COMMANDS = {
    "run": "generate text",
    "list": "the offers of every seam, with owner and state (run --list)",
    "env": "versions, GPUs, and which offers run here (run --env)",
    "check": "run the conformance suite of a seam against an offer",
    "new": "write a third-party package that works, to begin from",
    "gate": "hold a working tree to its budgets, and its speed to that of another revision",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `outweigh`."""
    return guarded(dispatch, sys.argv[1:] if argv is None else argv)


def guarded(action: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run `action`; an error that people can act on becomes one sentence and an exit code."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # None where it was closed
    try:
        code = action(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of a pipe has gone; what it has not read, nobody wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (UserError, RunError, KeyboardInterrupt, OSError) as error:
        if os.environ.get("OUTWEIGH_DEBUG") == "1":
            traceback.print_exc()
        message = " ".join(str(error).split()) or "interrupted"
        print(f"outweigh: error: {message}", file=sys.stderr)
        return {UserError: 2, KeyboardInterrupt: 130}.get(type(error), 1)


def dispatch(argv: Sequence[str]) -> int:
    """`outweigh COMMAND …`."""
    command, *rest = argv or [""]
    own = {"run": rest, "list": ["--list", *rest], "env": ["--env", *rest], "--version": argv}
    if command in own:
        return run(own[command])
    if command in COMMANDS:
        return int(importlib.import_module(f"core.testing.{command}").main(rest))
    if command not in ("-h", "--help"):
        hint = did_you_mean(command, COMMANDS, "commands")
        raise UserError(f"there is no command '{command}'{hint}")
    listed = "\n".join(f"  {name:6} {what}" for name, what in COMMANDS.items())
    print(f"usage: outweigh COMMAND …\n\n{listed}\n\noutweigh COMMAND --help tells more.")
    return 0


def run(argv: Sequence[str]) -> int:
    """`python -m core.run …`."""
    args = _parser().parse_intermixed_args(argv)
    config = run_fields(args)
    if args.list or args.env or args.show or args.dry_run:
        show.print_record(inspected(args, config), sys.stdout, args.output)
        return 0
    given = {f.name: value for f in SAMPLING if (value := getattr(args, f.name)) is not None}
    requests = read_requests(args.prompts, args.prompt_file, given)
    document = generate(args, config, requests)
    if args.output == "json":
        show.print_record(document, sys.stdout, "json")
    errors = [result["error"] for result in document["results"] if result["error"]]
    if errors:
        raise RunError(f"{len(errors)} of {len(requests)} requests failed: {errors[0]}")
    return 0


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help shows every option")


def _parser() -> Parser:
    """A flag for each field of RunConfig and of SamplingParams, where their defaults stand too."""
    about = "Generate text with the parts you choose. --list and --show tell what there is."
    parser = Parser(prog="outweigh run", description=about, allow_abbrev=False)
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="text to continue, or pipe it in")
    about = "prompts, one a line; - for stdin; .jsonl: objects with a prompt and sampling fields"
    add("--prompt-file", metavar="FILE", help=about)
    about = "what a run wrote with -o json: take its options of the engine"
    add("--config", metavar="FILE", help=about)
    for name, field in RunConfig.model_fields.items():
        about = str(field.description)
        if name in DEFAULTS:
            about += "; auto: {} on a CPU, {} on CUDA".format(*DEFAULTS[name])
        if field.annotation in (bool, bool | None):
            add(_flag(name), action=argparse.BooleanOptionalAction, help=about)
        elif name not in ("settings", "plugins"):
            add(_flag(name), metavar="X", help=about)
    add("--set", action="append", metavar="SEAM.FIELD=VALUE", help="an option of an offer")
    add("-p", dest="plugin", action="append", metavar="PLUGIN", help="module or .py file, no:NAME")
    for option in SAMPLING:
        name, kind = _flag(option.name), str(option.type)
        about = f"{option.metadata['help']}: {option.metadata['takes']}"
        if kind == "bool":
            add(name, action="store_true", default=None, help=about)
        else:
            convert = next(known for known in (int, float, str) if known.__name__ in kind)
            action = "append" if "tuple" in kind else "store"
            add(name, type=convert, action=action, metavar="X", help=about)
    add("--no-chat-template", dest="chat", action="store_false", help="give prompts as they are")
    add("-o", "--output", choices=("text", "json"), default="text", help="form of what is printed")
    add("--list", action="store_true", help="list the offers of every seam and stop")
    add("--show", nargs=2, metavar=("SEAM", "NAME"), help="show one offer and stop")
    add("--env", action="store_true", help="show versions, GPUs and what runs here, and stop")
    add("--dry-run", action="store_true", help="show what would run and stop; allocates nothing")
    add("--quiet", action="store_true", help="nothing on stderr but errors")
    add("--version", action="version", version=f"outweigh {core.__version__}", help="and stop")
    return parser


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def run_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of RunConfig: those of --config, and over them those of the flags."""
    fields = read_config(args.config) if args.config else {}
    fields |= {k: v for k, v in vars(args).items() if k in RunConfig.model_fields and v is not None}
    fields["settings"] = fields.get("settings", {}) | dict(map(parse_setting, args.set or ()))
    fields["plugins"] = (*fields.get("plugins", ()), *(args.plugin or ()))
    return fields


def inspected(args: argparse.Namespace, config: Mapping[str, Any]) -> dict[str, Any]:
    """What --list, --show, --env and --dry-run show."""
    registry = Registry(config["plugins"])

    def check(offer: Offer) -> object:
        return resolve(RunConfig.of(**{**config, offer.seam: offer.name}), registry)

    if args.list:
        return {"offers": show.offer_rows(registry, Offer.load, "broken")}
    if args.env:
        return show.environment(registry, check)
    if args.dry_run:
        plan = resolve(RunConfig.of(**config), registry)
        importlib.import_module("core.loading").check_model(plan.config.model)
        return plan.dump()
    return show.describe(registry.find(*args.show))


def generate(
    args: argparse.Namespace, config: Mapping[str, Any], requests: list[Request]
) -> dict[str, Any]:
    """Build the engine and run the requests: the JSON document."""
    out = io.StringIO() if args.output == "json" else sys.stdout
    told = io.StringIO() if args.quiet else sys.stderr
    with contextlib.redirect_stdout(told):  # stdout is for text or document alone
        with show.progress_bar(told) as progress:
            engine = core.Engine(progress=progress, **config)
        with engine:
            asked = [_in_template(engine, r) for r in requests] if args.chat else requests
            notes = list(engine.notes)
            ignored = sorted({name for r in requests for name in r.params.ignored})
            notes += [f"{name} has no effect at temperature 0: raise that" for name in ignored]
            if asked != requests:
                notes.append("prompts stand in the model's chat template: --no-chat-template")
            for note in notes:
                print(f"outweigh: note: {note}")
            outputs, report = answer(engine, asked, out), engine.report()
            engine.plan.registry.hooks.call("outweigh_run_finished", report)
            show.print_rows(show.metrics_rows(outputs), told)
            print(engine.plan.names())
    results = [
        {**vars(output), **request._asdict(), "metrics": output.metrics.as_dict()}
        for request, output in zip(requests, outputs, strict=True)
    ]
    return {**report, "notes": notes, "results": results}


def _in_template(engine: Engine, request: Request) -> Request:
    """A text as the message of a user, where the model has a template for chats."""
    text = request.prompt
    ids = engine.tokenizer.chat(text) if isinstance(text, str) else None
    return request if ids is None else request._replace(prompt=ids)


def answer(engine: Engine, requests: Sequence[Request], out: TextIO) -> list[RequestOutput]:
    """Run requests to their end. The text of one is printed as it comes, several in order."""
    ids = [engine.add_request(r.prompt, r.params, priority=r.priority) for r in requests]
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        for event in engine.step():
            if len(ids) == 1:
                print(event.text, end="", flush=True, file=out)
            if event.output is not None:
                outputs[event.request_id] = event.output
    ordered = [outputs[request_id] for request_id in ids]
    print(*("" if len(ids) == 1 else output.text for output in ordered), sep="\n", file=out)
    return ordered


if __name__ == "__main__":
    sys.exit(guarded(run, sys.argv[1:]))
