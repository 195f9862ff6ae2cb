"""Both arms over the same texts, teacher-forced: engines are built, documents scored, judged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from core.errors import UserError
from evals.quality.arms import Arms
from evals.quality.lockstep import Compared, Pair, compare
from evals.quality.statistics import of_document, statistics
from evals.quality.verdicts import Finding, judge, judge_stored, limits_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from core.engine import Engine
    from core.show import Progress
    from evals.tiny.documents import Document

Found = tuple[dict[str, Any], list[Finding]]
MAX_RAW_POSITIONS = 16_384  # up to so many, a record holds every one
CHUNK_TOKENS = 16  # of a chunk, where scoring in chunks is held beside scoring as a whole
CHUNKED_TOKENS, NUM_CHUNKED = 256, 8  # of a document, and documents, for that
_NUM_WORST = 8
_SHOWN_TOKENS = 48


def measure(arms: Arms, documents: list[Document], progress: Progress) -> Found:
    """The record of the part that reads: engines, statistics, documents; and its findings."""
    args = arms.args
    options = {"graphs": "none", "max_model_len": args.tokens, "max_num_seqs": 1}
    options["enable_prefix_caching"] = False
    with ExitStack() as stack:
        enter = stack.enter_context
        base = enter(arms.base(progress, **options))
        texts = _token_ids(base, documents, args.tokens)
        other = enter(arms.other(progress, **options))
        dtype = str(base.config.dtype)
        limits = limits_of(other.plan.kv.offer, dtype)
        pair = f"{args.against} (reference)", args.kv
        engines, pairs = {pair[0]: base, pair[1]: other}, {"offer": pair}
        if args.noise_floor:
            floor = []
            for wanted in ("float32", "bfloat16"):
                name = pair[0] if wanted == dtype else f"{args.against} in {wanted}"
                if name not in engines:
                    engines[name] = enter(arms.base(progress, **options, dtype=wanted))
                floor.append(name)
            pairs["noise_floor"] = floor[0], floor[1]
        found = _scored(engines, list(pairs.values()), texts, args.rows, progress)
        reports = {name: engine.report() for name, engine in engines.items()}
        vocabulary = base.facts.vocab_size
        stored = []
        if all(one.finite.all() for one in found[pair]):
            chunked = enter(arms.other(progress, **options, chunk_size=CHUNK_TOKENS))
            stored = _in_chunks(other, chunked, list(texts.values()), progress)
        worst = _worst(base, texts, found[pair])
    numbers = {
        what: {"reference": one[0], "other": one[1],
               **statistics(found[one], limits.values["tail_kl"], args.seed)}
        for what, one in pairs.items()
    }  # fmt: skip
    findings = judge(found[pair], numbers["offer"], limits, args.seed)
    if stored:
        findings.append(judge_stored(stored, numbers["offer"]["mean_kl"], limits, args.seed))
    record = {
        "engines": reports,
        "vocabulary": vocabulary,
        "limits": limits._asdict(),
        "comparisons": numbers,
        "num_documents_left_out": len(documents) - len(texts),
        "documents": _by_document(list(texts), pairs, found),
        "worst": worst,
        "positions": _raw(pairs, found),
    }
    return record, findings


def _in_chunks(
    whole: Engine, chunked: Engine, texts: list[list[int]], progress: Progress
) -> list[NDArray[np.float64]]:
    """The divergence between two ways to score the same short beginnings of documents."""
    engines, pair = {"whole": whole, "in chunks": chunked}, ("whole", "in chunks")
    found = []
    for ids in texts[:NUM_CHUNKED]:
        # Slices end with a chunk, so that those of both have to be of its size.
        one = compare(engines, [pair], ids[:CHUNKED_TOKENS], CHUNK_TOKENS)[pair]
        found.append(one.kl)
        progress("score in chunks", len(found), min(NUM_CHUNKED, len(texts)))
    return found


def _worst(
    engine: Engine, texts: Mapping[Document, list[int]], found: list[Compared]
) -> list[dict[str, Any]]:
    """The positions where the arms diverge most, one a document: what stood before, what came."""
    rows: list[dict[str, Any]] = []
    for (document, ids), one in zip(texts.items(), found, strict=True):
        at = int(one.kl.argmax())
        before = engine.tokenizer.decode(ids[max(0, at + 1 - _SHOWN_TOKENS) : at + 1])
        came = engine.tokenizer.decode(ids[at + 1 : at + 2])
        about = f"{document.kind}, {document.name}, position {at:,}: KL {one.kl[at]:.3g}"
        shown = {
            arm: f"{before} → {came!r} with probability {math.exp(-nats[at]):.4f}"
            for arm, nats in (("reference", one.base_nats), ("other", one.nats))
        }
        rows.append({"about": about, "kl": float(one.kl[at]), **shown})
    return sorted(rows, key=lambda row: -float(row["kl"]))[:_NUM_WORST]


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
