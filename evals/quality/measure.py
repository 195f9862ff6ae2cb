"""From arguments to the record: engines are built, documents scored, numbers judged."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from core.config import versions
from core.errors import UserError
from evals import records
from evals.quality.data import Choice, read_documents
from evals.quality.lockstep import Compared, Pair, compare
from evals.quality.statistics import of_document, statistics
from evals.quality.verdicts import judge, limits_of, overall

if TYPE_CHECKING:
    from core.engine import Engine
    from core.show import Progress
    from evals.tiny.documents import Document

Settings = Mapping[str, Any]
MAX_RAW_POSITIONS = 16_384  # up to so many, a record holds every one
_CUDA_BYTES = "4GiB"  # a share of the GPU would leave nothing to the next engine


def measure(
    args: argparse.Namespace, settings: Settings, of_base: Settings, progress: Progress
) -> dict[str, Any]:
    """The record of a run: arguments, machine, engines, statistics, documents, findings, verdict.

    `settings` are those of the offer in question, whose parts beside kv hold for the reference
    too. Raises UserError and RunError.
    """
    if wrong := [key for key in of_base if not key.startswith("kv.")]:
        raise UserError(f"--set-against takes options of kv, not {wrong[0]}: give it to --set")
    choice = Choice(args.field, args.split, args.limit)
    documents = read_documents(args.data, choice)
    of_base = {**{k: v for k, v in settings.items() if not k.startswith("kv.")}, **of_base}
    with ExitStack() as stack:

        def build(kv: str, own: Settings, dtype: str | None) -> Engine:
            return stack.enter_context(_engine(args, kv, own, dtype, progress))

        base = build(args.against, of_base, args.dtype)
        texts = _token_ids(base, documents, args.tokens)
        other = build(args.kv, settings, args.dtype)
        dtype = str(base.config.dtype)
        limits = limits_of(other.plan.kv.offer, dtype)
        pair = f"{args.against} (reference)", args.kv
        engines, pairs = {pair[0]: base, pair[1]: other}, {"offer": pair}
        if args.noise_floor:
            floor = []
            for wanted in ("float32", "bfloat16"):
                name = pair[0] if wanted == dtype else f"{args.against} in {wanted}"
                if name not in engines:
                    engines[name] = build(args.against, of_base, wanted)
                floor.append(name)
            pairs["noise_floor"] = floor[0], floor[1]
        found = _scored(engines, list(pairs.values()), texts, args.rows, progress)
        reports = {name: engine.report() for name, engine in engines.items()}
        vocabulary = base.facts.vocab_size
    numbers = {
        what: {"reference": one[0], "other": one[1],
               **statistics(found[one], limits.values["tail_kl"], args.seed)}
        for what, one in pairs.items()
    }  # fmt: skip
    findings = judge(found[pair], numbers["offer"], limits, args.seed)
    return {
        "arguments": vars(args),
        "machine": records.machine(),
        "versions": versions(("datasets", "numpy")),
        "engines": reports,
        "vocabulary": vocabulary,
        "limits": limits._asdict(),
        "verdict": overall(findings),
        "findings": [finding._asdict() for finding in findings],
        "comparisons": numbers,
        "num_documents_left_out": len(documents) - len(texts),
        "documents": _by_document(list(texts), pairs, found),
        "positions": _raw(pairs, found),
    }


def _engine(
    args: argparse.Namespace, kv: str, settings: Settings, dtype: str | None, progress: Progress
) -> Engine:
    """One sequence at a time, in eager steps: a pass that scores is never captured."""
    import torch

    from core.engine import Engine

    on_cuda = torch.cuda.is_available() if args.device is None else args.device != "cpu"
    return Engine(
        model=args.model,
        kv=kv,
        graphs="none",
        settings=settings,
        plugins=tuple(args.plugins),
        device=args.device,
        dtype=dtype,
        max_model_len=args.tokens,
        max_num_seqs=1,
        kv_cache_bytes=args.kv_cache_bytes or (_CUDA_BYTES if on_cuda else None),
        enable_prefix_caching=False,
        seed=args.seed,
        progress=lambda stage, done, total: progress(f"{stage} {kv}", done, total),
    )


def _token_ids(engine: Engine, documents: list[Document], most: int) -> dict[Document, list[int]]:
    """The first tokens of every document that has two. Raises UserError where none has."""
    encoded = {document: engine.tokenizer.encode(document.text)[:most] for document in documents}
    found = {document: ids for document, ids in encoded.items() if len(ids) > 1}
    if not found:
        raise UserError(
            f"none of {len(documents)} documents gives two tokens, so that one can be predicted: "
            "name longer ones with --data, or raise --tokens"
        )
    return found


def _scored(
    engines: Mapping[str, Engine],
    pairs: list[Pair],
    texts: Mapping[Document, list[int]],
    rows: int,
    progress: Progress,
) -> dict[Pair, list[Compared]]:
    """Of each pair a Compared for every document."""
    found: dict[Pair, list[Compared]] = {pair: [] for pair in pairs}
    total, done = sum(map(len, texts.values())), 0
    progress("score, tokens", done, total)
    for ids in texts.values():
        for pair, one in compare(engines, pairs, ids, rows).items():
            found[pair].append(one)
        done += len(ids)
        progress("score, tokens", done, total)
    return found


def _by_document(
    documents: list[Document], pairs: Mapping[str, Pair], found: Mapping[Pair, list[Compared]]
) -> list[dict[str, Any]]:
    return [
        {
            "source": document.kind,
            "name": document.name,
            **{what: of_document(found[pair][i]) for what, pair in pairs.items()},
        }
        for i, document in enumerate(documents)
    ]


def _raw(pairs: Mapping[str, Pair], found: Mapping[Pair, list[Compared]]) -> Any:
    """Every position by comparison and document, or the reason why a record has none."""
    num = sum(len(one.kl) for one in found[pairs["offer"]])
    if num > MAX_RAW_POSITIONS:
        return f"left out: {num:,} positions, and a record holds up to {MAX_RAW_POSITIONS:,}"
    return {
        what: [{name: part.tolist() for name, part in one._asdict().items()} for one in found[pair]]
        for what, pair in pairs.items()
    }
