"""Both arms over the same texts, teacher-forced: engines are built, documents scored, judged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from core.errors import UserError
from evals.quality.arms import Arm, Arms, Settings, build, unpacked
from evals.quality.controls import Bfloat16KV
from evals.quality.lockstep import Compared, Pair, compare
from evals.quality.statistics import of_document, statistics
from evals.quality.verdicts import Finding, Limits, judge, judge_stored, limits_of, overall

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from core.engine import Engine
    from core.show import Progress
    from evals.tiny.documents import Document

Found = tuple[dict[str, Any], list[Finding]]
NOISE_FLOOR = "noise_floor"
MAX_RAW_POSITIONS = 16_384  # up to so many, a record holds every one
CHUNK_TOKENS = 16  # of a chunk, where scoring in chunks is held beside scoring as a whole
CHUNKED_TOKENS, NUM_CHUNKED = 256, 8  # of a document, and documents, for that
_NUM_WORST = 8
_SHOWN_TOKENS = 48


def measure(arms: Arms, documents: list[Document], progress: Progress) -> Found:
    """The record of the part that reads: engines, statistics, documents; and its findings.

    All arms are held beside one pass of the reference, and read its weights.
    """
    args = arms.args
    with ExitStack() as stack:
        read = _Readers(arms, stack, progress)
        base, name = read.reference, f"{args.against} (reference)"
        texts = _token_ids(base, documents, args.tokens)
        engines = {name: base}
        for arm in arms.others:
            engines[arm.label] = read.arm(arm)
        pairs = {arm.label: (name, arm.label) for arm in arms.others}
        limits = {
            arm.label: limits_of(engines[arm.label].plan.kv.offer, str(base.config.dtype))
            for arm in arms.others
        }
        if args.noise_floor:
            made = {name: base} if base.config.dtype == "float32" else read.in_float32()
            rounded = read.rounded(*made.values())
            pairs[NOISE_FLOOR] = *made, "bfloat16 keys and values"
            engines |= {**made, pairs[NOISE_FLOOR][1]: rounded}
        found = _scored(engines, list(pairs.values()), texts, args.rows, progress)
        reports = {name: engine.report() for name, engine in engines.items()}
        stored = {
            arm.label: _in_chunks(engines[arm.label], read.arm(arm, CHUNK_TOKENS), texts, progress)
            for arm in arms.others
            if all(one.finite.all() for one in found[pairs[arm.label]])
        }
        worst = {what: _worst(base, texts, found[pair]) for what, pair in pairs.items()}
        vocabulary = base.facts.vocab_size
    comparisons, findings = _judged(pairs, found, limits, stored, args.seed)
    for what, numbers in comparisons.items():
        numbers["worst"] = worst[what]
    record = {
        "engines": reports,
        "vocabulary": vocabulary,
        "comparisons": comparisons,
        "num_documents_left_out": len(documents) - len(texts),
        "documents": _by_document(list(texts), pairs, found),
        "positions": _raw(pairs, found),
    }
    return record, findings


class _Readers:
    """Engines that read, and close with `stack`; those of one precision share their weights."""

    def __init__(self, arms: Arms, stack: ExitStack, progress: Progress) -> None:
        self._arms, self._enter, self._progress = arms, stack.enter_context, progress
        self._options = {
            "graphs": "none",
            "max_model_len": arms.args.tokens,
            "max_num_seqs": 1,
            "enable_prefix_caching": False,
        }
        self.reference = self._build(arms.args.against, arms.of_base)

    def arm(self, arm: Arm, chunk_size: int | None = None) -> Engine:
        """One of the arms in question, beside the reference."""
        own = {"weights_of": self.reference, "chunk_size": chunk_size}
        return self._build(arm.kv, arm.settings, **own)

    def in_float32(self) -> dict[str, Engine]:
        """The reference once more, by the name of its comparison."""
        against = self._arms.args.against
        engine = self._build(against, self._arms.of_base, dtype="float32")
        return {f"{against} in float32": engine}

    def rounded(self, wide: Engine) -> Engine:
        """Beside `wide`, in float32: a cache that is rounded to bfloat16, and nothing else."""
        of_others = {k: v for k, v in self._arms.of_base.items() if not k.startswith("kv.")}
        return self._build(Bfloat16KV, of_others, dtype="float32", weights_of=wide)

    def _build(self, kv: Any, settings: Settings, **own: Any) -> Engine:
        args = self._arms.args
        settings = unpacked(args, own.get("dtype", args.dtype), settings)
        return self._enter(build(args, kv, settings, self._progress, **self._options, **own))


def _judged(
    pairs: Mapping[str, Pair],
    found: Mapping[Pair, list[Compared]],
    limits: Mapping[str, Limits],
    stored: Mapping[str, list[NDArray[np.float64]]],
    seed: int,
) -> tuple[dict[str, dict[str, Any]], list[Finding]]:
    """The numbers of every comparison, and the findings on those that have limits.

    A finding names its arm where there are several.
    """
    comparisons: dict[str, dict[str, Any]] = {}
    findings: list[Finding] = []
    tail_kl = next(iter(limits.values())).values["tail_kl"]  # the noise floor has none of its own
    for what, pair in pairs.items():
        of = limits[what].values["tail_kl"] if what in limits else tail_kl
        numbers = {"reference": pair[0], "other": pair[1], **statistics(found[pair], of, seed)}
        comparisons[what] = numbers
        if what not in limits:
            continue
        judged = judge(found[pair], numbers, limits[what], seed)
        if what in stored:
            judged.append(judge_stored(stored[what], numbers["mean_kl"], limits[what], seed))
        numbers |= {"limits": limits[what]._asdict(), "verdict": overall(judged)}
        several = f" of {what}" if len(limits) > 1 else ""
        findings += [finding._replace(metric=finding.metric + several) for finding in judged]
    return comparisons, findings


def _in_chunks(
    whole: Engine, chunked: Engine, texts: Mapping[Document, list[int]], progress: Progress
) -> list[NDArray[np.float64]]:
    """The divergence between two ways to score the same short beginnings of documents."""
    engines, pair = {"whole": whole, "in chunks": chunked}, ("whole", "in chunks")
    found = []
    for ids in list(texts.values())[:NUM_CHUNKED]:
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
    num = sum(len(one.kl) for pair in pairs.values() for one in found[pair])  # of all comparisons
    if num > MAX_RAW_POSITIONS:
        return f"left out: {num:,} positions, and a record holds up to {MAX_RAW_POSITIONS:,}"
    return {
        what: [{name: part.tolist() for name, part in one._asdict().items()} for one in found[pair]]
        for what, pair in pairs.items()
    }
