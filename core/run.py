"""The command line: `outweigh run|list|check|new …`, or `python -m core.run [PROMPT …]`.

Text goes to stdout, everything about the run to stderr. Exit codes: 0; 1 for a run that failed; 2
for what the caller can mend; 130 if interrupted. OUTWEIGH_DEBUG=1 shows the traceback of an error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import core

if Path(core.__file__ or "").resolve().parent != Path(__file__).resolve().parent:
    print(
        f"outweigh: error: {core.__file__} hides outweigh's own package 'core': "
        "run outside that folder, or as `python -P -m core.run`",
        file=sys.stderr,
    )
    raise SystemExit(2)

from core import show
from core.config import RunConfig, did_you_mean, parse_setting
from core.errors import RunError, UserError
from core.registry import Registry
from core.seams import SEAMS

if TYPE_CHECKING:
    from core.engine import Engine, RequestOutput
    from core.sampling import SamplingParams

COMMANDS = {
    "run": "generate text",
    "list": "the offers of every seam, with owner and state",
    "check": "run a conformance suite against an offer",
    "new": "write the skeleton of a plugin",
}
CONFIG_FLAGS = (
    "model kv fusion graphs sched device dtype seed max_model_len max_num_seqs "
    "max_num_batched_tokens chunk_size kv_cache_bytes gpu_memory_utilization"
).split()
SAMPLING_FLAGS = ("max_tokens", "temperature", "ignore_eos")


def main(argv: Sequence[str] | None = None) -> int:
    """The console script `outweigh`."""
    return guarded(dispatch, sys.argv[1:] if argv is None else argv)


def guarded(action: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run `action`; an error that people can act on becomes one sentence and an exit code."""
    try:
        code = action(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of a pipe has gone; what it has not read, nobody wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BaseException as error:
        exit_code = _exit_code(error)
        if exit_code is None:
            raise
        if os.environ.get("OUTWEIGH_DEBUG") == "1":
            traceback.print_exc()
        message = "interrupted" if exit_code == 130 else str(error) or "the host is out of memory"
        print(f"outweigh: error: {' '.join(message.split())}", file=sys.stderr)
        return exit_code


def _exit_code(error: BaseException) -> int | None:
    """The exit code of what people can act on; None for a bug, which keeps its traceback."""
    if isinstance(error, UserError):
        return 2
    if isinstance(error, KeyboardInterrupt):
        return 130
    torch = sys.modules.get("torch")  # not imported for this: it may never have been needed
    out_of_memory = (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)
    return 1 if isinstance(error, (RunError, *out_of_memory)) else None


def dispatch(argv: Sequence[str]) -> int:
    """`outweigh COMMAND …`."""
    listed = "\n".join(f"  {name:6} {what}" for name, what in COMMANDS.items())
    if not argv:
        raise UserError(f"say what to do: outweigh {'|'.join(COMMANDS)}, or outweigh --help")
    command, rest = argv[0], list(argv[1:])
    if command in ("-h", "--help"):
        print(f"usage: outweigh COMMAND …\n\n{listed}\n\noutweigh COMMAND --help tells more.")
        return 0
    if command == "--version":
        return run(["--version"])
    if command == "run":
        return run(rest)
    if command == "list":
        return run(["--list", *rest])
    if command not in COMMANDS:
        raise UserError(
            f"there is no command '{command}'{did_you_mean(command, COMMANDS) or ';'} commands: "
            f"{', '.join(COMMANDS)}; to generate text, outweigh run PROMPT"
        )
    if importlib.util.find_spec(f"core.{command}") is None:
        raise UserError(f"outweigh {core.__version__} does not have the command '{command}' yet")
    return int(importlib.import_module(f"core.{command}").main(rest))


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help shows every option")


def run(argv: Sequence[str]) -> int:
    """`python -m core.run …`."""
    args = parse(argv)
    if args.list:
        rows = show.offer_rows(Registry(args.plugins))
        return _emit(rows, args.output, lambda: show.print_rows(rows, sys.stdout))
    if args.show:
        seam, name = args.show
        if seam not in SEAMS:
            raise UserError(
                f"there is no seam '{seam}'{did_you_mean(seam, SEAMS) or ';'} "
                f"--show takes one of {', '.join(SEAMS)} and the name of an offer"
            )
        shown = show.describe(Registry(args.plugins).find(seam, name))
        return _emit(shown, args.output, lambda: show.print_description(shown, sys.stdout))
    prompts = read_prompts(args.prompts, args.prompt_file)
    if args.output == "json":
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the document alone
            document, outputs = generate(args, prompts)
        print(json.dumps(document, indent=2, ensure_ascii=False, default=str))
    else:
        _, outputs = generate(args, prompts)
    failed = [output for output in outputs if output.finish_reason == "error"]
    if failed:
        raise RunError(f"{len(failed)} of {len(outputs)} requests failed: {failed[0].error}")
    return 0


def _emit(data: Any, output: str, print_text: Callable[[], None]) -> int:
    if output == "json":
        print(json.dumps(data, indent=2, ensure_ascii=False, default=str))
    else:
        print_text()
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments. `-p` is read first, so that `--help` can name what those plugins offer."""
    early = Parser(add_help=False, allow_abbrev=False)
    early.add_argument("-p", dest="plugins", action="append", default=[])
    early.add_argument("-h", "--help", action="store_true")
    known, _ = early.parse_known_args(argv)
    parser = _parser(_offered(known.plugins) if known.help else "")
    return parser.parse_intermixed_args(argv)


def _offered(plugins: Sequence[str]) -> str:
    try:
        offers = Registry(plugins).offers
    except UserError as error:
        return f"offers: {error}"
    return "\n".join(f"{seam}: {', '.join(sorted(names))}" for seam, names in offers.items())


def _parser(epilog: str) -> Parser:
    """Sets only what was given: the defaults stand in RunConfig and SamplingParams alone."""
    parser = Parser(
        prog="outweigh run",
        description="Generate text with the parts you choose.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    about = {name: field.description for name, field in RunConfig.model_fields.items()}
    add("prompts", nargs="*", default=[], metavar="PROMPT", help="text to continue, or pipe it in")
    add("--prompt-file", default=None, metavar="FILE", help="prompts, one a line; - for stdin")
    for name in CONFIG_FLAGS:
        add("--" + name.replace("_", "-"), metavar="X", help=about[name])
    switch, caching = argparse.BooleanOptionalAction, "enable_prefix_caching"
    add("--enable-prefix-caching", action=switch, help=about[caching])
    add("--set", action="append", default=[], metavar="SEAM.FIELD=VALUE", help="option of an offer")
    add("-p", dest="plugins", action="append", default=[], metavar="PLUGIN", help=about["plugins"])
    add("--max-tokens", type=int, metavar="X", help="most tokens to write")
    add("--temperature", type=float, metavar="X", help="0 is greedy")
    add("--ignore-eos", action="store_true", help="write on after the end of the text")
    add("-o", "--output", choices=("text", "json"), default="text", help="form of what is printed")
    add("--list", action="store_true", default=False, help="list the offers of every seam and stop")
    add("--show", nargs=2, default=None, metavar=("SEAM", "NAME"), help="show one offer and stop")
    add("--quiet", action="store_true", default=False, help="nothing on stderr but errors")
    add("--version", action="version", version=f"outweigh {core.__version__}", help="and stop")
    return parser


def read_prompts(given: Sequence[str], file: str | None) -> list[str]:
    """Prompts as given, then those of the file, a line each; without either, stdin as one."""
    if file is not None:
        prompts = [*given, *(line for line in _read(file).splitlines() if line.strip())]
    elif given:
        prompts = list(given)
    elif sys.stdin is None or sys.stdin.isatty():
        raise UserError("there is no prompt: give one, or --prompt-file FILE, or pipe it in")
    else:
        prompts = [text] if (text := _read("-").removesuffix("\n")) else []
    if not prompts:
        raise UserError(f"there is no prompt in {file or 'stdin'}: give one that is not empty")
    return prompts


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        name = "stdin" if file == "-" else file
        raise UserError(f"{name} cannot be read as UTF-8 text ({error}): choose another") from error


def generate(
    args: argparse.Namespace, prompts: Sequence[str]
) -> tuple[dict[str, Any], list[RequestOutput]]:
    """Build the engine and run the prompts: the JSON document and the outputs."""
    given = vars(args)
    fields = {k: v for k, v in given.items() if k in RunConfig.model_fields}
    fields["settings"] = dict(parse_setting(text) for text in args.set)
    fields["plugins"] = tuple(args.plugins)
    params = core.SamplingParams(**{k: given[k] for k in SAMPLING_FLAGS if k in given})
    told = io.StringIO() if args.quiet else sys.stderr
    with show.progress_bar(told) as progress:
        engine = core.Engine(progress=progress, **fields)
    with engine:
        for note in engine.notes:
            print(f"outweigh: note: {note}", file=told)
        outputs = answer(engine, prompts, params, silent=args.output == "json")
        report = engine.report()
        engine.plan.registry.hooks.run_finished(report)
        show.print_metrics(outputs, told)
        print(engine.plan.names(), file=told)
        record = engine.plan.dump(engine.config)
    document = {
        **record,
        "notes": engine.notes,
        "results": [_result(output) for output in outputs],
        "report": {key: value for key, value in report.items() if key not in record},
    }
    return document, outputs


def answer(
    engine: Engine, prompts: Sequence[str], params: SamplingParams, *, silent: bool
) -> list[RequestOutput]:
    """Run the prompts to their end. The text of one is printed as it comes, several in order."""
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    outputs: dict[str, RequestOutput] = {}
    num_printed = 0
    while engine.has_unfinished():
        for event in engine.step():
            if len(ids) == 1 and not silent:
                print(event.text, end="", flush=True)
            if event.output is not None:
                outputs[event.request_id] = event.output
        while num_printed < len(ids) and ids[num_printed] in outputs:
            if not silent:
                print("" if len(ids) == 1 else outputs[ids[num_printed]].text, flush=True)
            num_printed += 1
    return [outputs[request_id] for request_id in ids]


def _result(output: RequestOutput) -> dict[str, Any]:
    """One output for JSON, which knows neither NaN nor infinity."""
    metrics = output.metrics.as_dict()
    finite = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()
    }
    return {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "error": output.error,
        "metrics": finite,
    }


if __name__ == "__main__":
    sys.exit(guarded(run, sys.argv[1:]))
