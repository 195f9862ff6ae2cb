"""What the embedded model can do, measured through outweigh's own engine.

    python -m evals.tiny.evaluate --data EVAL_DIR --corpus CORPUS.jsonl.xz --json result.json

Parts: `bpb`, bits per byte of English books beside an order-5 Kneser-Ney byte model fitted on the
same training documents; `position`, loss at positions 4,096 to 8,191 less that at 256 to 511 of
the same window; `passkey`, five digits out of up to 7,500 tokens; `recall`, a value out of 50
pairs; `repetition`, seq-rep-4 of sampled text; `damage`, one kv offer beside another. Every part
has n, an estimate and a 95 % interval; passkey and recall run in every `--dtype`, the others in
the first. Exit code 0: every gate holds; 1: one does not, or is short of samples; 2: the command
cannot be carried out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import RunError, UserError
from core.show import console, print_rows, progress_bar
from evals import records
from evals.arguments import Parser, count, seed, share
from evals.tiny.answers import (
    DEPTHS,
    LENGTHS,
    NUM_PAIRS,
    passkey_items,
    passkey_part,
    pieces_of,
    recall_items,
    recall_part,
    repetition,
)
from evals.tiny.damage import damage
from evals.tiny.documents import (
    BOOKS,
    FOLDERS,
    RECENT,
    excerpts,
    filler,
    first_lines,
    read_documents,
)
from evals.tiny.gates import Gate, gates
from evals.tiny.losses import bits_per_byte, by_position, losses

if TYPE_CHECKING:
    from core.engine import Engine
    from core.show import Progress
    from evals.tiny.kneser_ney import KneserNey

PARTS = ("bpb", "position", "passkey", "recall", "repetition", "damage")


def make_engine(args: argparse.Namespace, dtype: str, kv: Any) -> Engine:
    """The engine of a part. Prefixes are not shared, so that every item is computed alike."""
    from core.engine import Engine

    return Engine(
        model=args.model,
        kv=kv,
        device=args.device,
        dtype=dtype,
        max_num_seqs=args.max_num_seqs,
        enable_prefix_caching=False,
        seed=args.seed,
    )


def evaluate(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The result of every part that `args.only` names, by part; passkey and recall by dtype too."""
    results: dict[str, Any] = {}
    for i, dtype in enumerate(args.dtype):
        with make_engine(args, dtype, args.kv) as engine:
            if i == 0:
                results |= dict(_once(engine, args, progress))
            for name, part in _each_dtype(engine, args, progress):
                results.setdefault(name, {})[dtype] = part
            results.setdefault("engines", {})[dtype] = engine.report()
    if "damage" in args.only:
        results["damage"] = _damage(args, progress)
    return results


def _once(
    engine: Engine, args: argparse.Namespace, progress: Progress
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parts that read logits, and repetition."""
    books = read_documents(args.data, (BOOKS,))
    if "bpb" in args.only or "position" in args.only:
        every = "position" in args.only
        documents = read_documents(args.data, (*FOLDERS, RECENT)) if every else books
        windows = losses(engine, documents, args.window, args.num_windows, progress)
        if "bpb" in args.only:
            yield "bpb", bits_per_byte(windows, books, fitted(args.corpus, progress), progress)
        if every:
            yield "position", by_position(windows, args.window)
    if "repetition" in args.only:
        prompts = first_lines(books, args.num_prompts)
        yield "repetition", repetition(engine, prompts, args.num_tokens, args.seed, progress)


def fitted(corpus: Path, progress: Progress) -> KneserNey:
    """The byte model of the documents that the model was trained on."""
    from evals.tiny.corpus import training_documents
    from evals.tiny.kneser_ney import KneserNey

    progress("byte model, counting", 0, 1)
    model = KneserNey.fit(training_documents(corpus, "train"))
    progress("byte model, counting", 1, 1)
    return model


def _each_dtype(
    engine: Engine, args: argparse.Namespace, progress: Progress
) -> Iterator[tuple[str, dict[str, Any]]]:
    if "passkey" in args.only:
        cells, items = _passkeys(engine, args, args.num_passkey)
        yield "passkey", passkey_part(engine, cells, items, progress)
    if "recall" in args.only:
        pairs = recall_items(pieces_of(engine), args.num_recall, args.num_pairs, args.seed)
        yield "recall", recall_part(engine, pairs, args.num_pairs, progress)


def _passkeys(engine: Engine, args: argparse.Namespace, num: int) -> Any:
    text = filler(engine, read_documents(args.data, (BOOKS,)))
    return passkey_items(pieces_of(engine), text, num, args.lengths, args.depths, args.seed)


def _damage(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    dtype = args.dtype[0]
    with make_engine(args, dtype, args.kv) as engine:
        _, items = _passkeys(engine, args, args.num_damage)
        documents = read_documents(args.data)
        texts = excerpts(engine, documents, args.num_texts, args.text_tokens)
    offers = args.kv, args.kv_b
    return damage(lambda kv: make_engine(args, dtype, kv), *offers, items, texts, progress)


def parse(argv: Seq[str] | None) -> argparse.Namespace:
    parser = Parser("evals.tiny.evaluate", __doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="EVAL_DIR")
    add("--corpus", type=Path, metavar="FILE", help="the training corpus; bpb needs it")
    add("--model", default="tiny", help="default: the embedded one")
    add("--only", type=_parts, default=PARTS, metavar="PART,…", help=", ".join(PARTS))
    add("--json", type=Path, metavar="FILE", help="write options, results and gates there")
    add("--device", help="default: cuda if there is one")
    add("--dtype", nargs="+", default=["float32", "bfloat16"], metavar="DTYPE")
    add("--kv", default="paged", help="of every part, and the reference of damage")
    add("--kv-b", default="paged_int8", help="what damage holds beside it")
    add(
        "--window",
        type=count,
        default=8192,
        help="tokens of a window of text; position scales with it",
    )
    add("--num-windows", type=count, help="most windows of a document; default: all")
    add("--num-passkey", type=count, default=210, metavar="N")
    add("--lengths", type=count, nargs="+", default=list(LENGTHS), metavar="TOKENS")
    add("--depths", type=share, nargs="+", default=list(DEPTHS), metavar="SHARE")
    add("--num-recall", type=count, default=210, metavar="N")
    add("--num-pairs", type=count, default=NUM_PAIRS, help="of a list of recall")
    add("--num-prompts", type=count, default=20, help="of repetition")
    add("--num-tokens", type=count, default=200, help="that follow each of these")
    add("--num-damage", type=count, default=420, help="passkeys of damage")
    add("--num-texts", type=count, default=4, help="whose logits damage compares")
    add("--text-tokens", type=count, default=2048, help="of each of these")
    add("--max-num-seqs", type=count, default=16, help="sequences of one step")
    add("--seed", type=seed, default=0)
    args = parser.parse_args(argv)
    if "bpb" in args.only and args.corpus is None:
        parser.error("bpb compares with a byte model: give --corpus, or leave it out with --only")
    return args


def _parts(text: str) -> tuple[str, ...]:
    wanted = tuple(text.split(","))
    if unknown := sorted(set(wanted) - set(PARTS)):
        raise argparse.ArgumentTypeError(
            f"there is no part {unknown[0]!r}: choose from {','.join(PARTS)}"
        )
    return wanted


def main(argv: Seq[str] | None = None) -> int:
    args = parse(argv)
    try:
        records.check_folder(args.json)
        with progress_bar(sys.stderr) as progress:
            results = evaluate(args, progress)
    except (UserError, RunError) as error:
        print(f"outweigh: error: {error}", file=sys.stderr)
        return 2
    found = gates(results)
    show(results, found)
    if args.json:
        rows = [gate.as_row() for gate in found]
        document = {
            "arguments": vars(args), "machine": records.machine(), **results, "gates": rows,
        }  # fmt: skip
        records.write(args.json, document)
    return int(not all(gate.holds for gate in found))


def show(results: dict[str, Any], found: list[Gate]) -> None:
    """The tables of the parts, then the gates."""
    screen = console(sys.stdout)
    for dtype, part in results.get("passkey", {}).items():
        screen.print(f"\npasskey in {dtype}: right of all, by length and depth")
        print_rows(_grid(part["cells"]), sys.stdout)
    if part := results.get("position"):
        screen.print(f"\nloss by position, {part['n']} windows, {part['num_documents']} documents")
        print_rows([_bucket(row) for row in part["buckets"]], sys.stdout)
    if part := results.get("bpb"):
        screen.print("\nbits per byte")
        rows = [{"document": name, **row} for name, row in part["by_document"].items()]
        print_rows([_rounded(row) for row in rows], sys.stdout)
    screen.print("\ngates")
    print_rows([_gate(gate) for gate in found], sys.stdout)


def _grid(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows: dict[int, dict[str, Any]] = {}
    for depth in sorted({cell["depth"] for cell in cells}):
        for length in sorted({cell["length"] for cell in cells}):
            rows.setdefault(length, {"length": length})[f"depth {depth:g}"] = "-"
    for cell in cells:
        rows[cell["length"]][f"depth {cell['depth']:g}"] = f"{cell['num_right']}/{cell['n']}"
    return list(rows.values())


def _bucket(row: dict[str, Any]) -> dict[str, Any]:
    low, high = row["interval"]
    span = f"{row['first']}-{row['last']}"
    return {"positions": span, "nats": f"{row['nats']:.4f}", "95 %": f"{low:.4f} … {high:.4f}"}


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in row.items()}


def _gate(gate: Gate) -> dict[str, Any]:
    short = f" (of {gate.min_n})" if gate.n < gate.min_n else ""
    return {
        "gate": gate.name,
        "measured": f"{gate.measured:.4g}",
        "asked": f"{gate.sense} {gate.bound:g}",
        "n": f"{gate.n}{short}",
        "holds": "yes" if gate.holds else "NO",
    }


if __name__ == "__main__":
    sys.exit(main())
