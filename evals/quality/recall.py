"""What both arms find again in long contexts, by kind, length and depth.

Items of one context share it as a prefix. They are asked in turns, so that the later ones find its
blocks and read what is shared. The contexts are in plain words, as a chat where the model has a
template; for the embedded model in the words of its training.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from core.errors import UserError
from core.loading import EMBEDDED
from core.sampling import SamplingParams
from evals.quality import haystacks, trained
from evals.quality.arms import Arms, both, written
from evals.quality.pairs import paired_shares
from evals.quality.verdicts import Finding, judge_written
from evals.tiny.answers import pieces_of

if TYPE_CHECKING:
    from core.engine import Engine, RequestOutput
    from core.show import Progress
    from evals.quality.verdicts import Limits
    from evals.tiny.documents import Document

STYLES = ("trained", "chat", "text")
NUM_WORST = 5
_ANSWER_TOKENS = {"tracking": 96}
_FEW_TOKENS = 24  # of an answer that is one number
_TEMPLATE_TOKENS = 160  # room for a question and what a chat's template adds
_SHOWN_CHARS = 300


class Asked(NamedTuple):
    """One question: where it is in the grid, its prompt, and what answers it.

    `answer_ids` where the answer is wanted token for token; else a text must hold all of `answers`
    and none of `wrong`. `context` numbers what it shares with others.
    """

    kind: str
    length: int
    depth: float
    context: int
    prompt_ids: list[int]
    answers: tuple[str, ...]
    wrong: tuple[str, ...] = ()
    answer_ids: tuple[int, ...] = ()

    def right(self, output: RequestOutput) -> bool:
        if self.answer_ids:
            return tuple(output.token_ids) == self.answer_ids
        missing = any(not _stands_in(answer, output.text) for answer in self.answers)
        return not missing and not any(_stands_in(name, output.text) for name in self.wrong)


def _stands_in(answer: str, text: str) -> bool:
    """As a word or a number of its own, commas between digits or not."""
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", plain) is not None


def recall(
    arms: Arms, documents: Seq[Document], progress: Progress
) -> tuple[dict[str, Any], list[Finding]]:
    """The record of the part, and its finding. `documents` are filler for the embedded model."""
    args = arms.args

    def make(engine: Engine) -> tuple[str, list[Asked]]:
        style = args.style or style_of(engine)
        return style, in_turns(list(asked(engine, style, args, documents)), args.batch)

    def write(engine: Engine, made: tuple[str, list[Asked]], arm: str) -> list[RequestOutput]:
        style, items = made
        params = [_params(item, style) for item in items]
        prompts = [item.prompt_ids for item in items]
        return written(engine, prompts, params, progress, f"{arm}, recall")

    longest = max(args.lengths)
    options = {"enable_prefix_caching": False} if args.no_sharing else {}
    (style, items), made = both(arms, make, write, progress, ("--lengths", longest), **options)
    table = tabled(items, made.base, made.other, args.seed)
    findings = judge_recall(table, items, made, args.seed)
    cached = {arm: _share_cached(getattr(made, arm)) for arm in ("base", "other")}
    return {"style": style, "engines": made.reports, "share_cached": cached, **table}, findings


def trained_style(args: Any) -> bool:
    """Whether these arguments ask for the words of training, whose filler is out of documents."""
    return "recall" in args.parts and (args.style or _of_model(args.model)) == "trained"


def _of_model(model: str) -> str | None:
    return "trained" if model == EMBEDDED else None


def style_of(engine: Engine) -> str:
    if style := _of_model(engine.config.model):
        return style
    return "text" if engine.tokenizer.chat("a") is None else "chat"


def _params(item: Asked, style: str) -> SamplingParams:
    if item.answer_ids:
        return SamplingParams(max_tokens=len(item.answer_ids), ignore_eos=True)
    stop = ("\n\n", "\nQuestion:") if style == "text" else ()
    return SamplingParams(max_tokens=_ANSWER_TOKENS.get(item.kind, _FEW_TOKENS), stop=stop)


def asked(engine: Engine, style: str, args: Any, documents: Seq[Document]) -> Iterator[Asked]:
    """`args.num_recall` items of each of `args.kinds`, over the grid of lengths and depths."""
    known = trained.KINDS if style == "trained" else haystacks.KINDS
    if unknown := [kind for kind in args.kinds or () if kind not in known]:
        what = f"there is no kind {unknown[0]!r} of recall in the style {style}"
        raise UserError(f"{what}: choose from {', '.join(known)}")
    rng = np.random.default_rng(args.seed)
    make = _in_training(engine, args, documents, rng) if style == "trained" else _in_words(
        engine, style, args, rng
    )  # fmt: skip
    number = itertools.count()
    for kind in args.kinds or known:
        left = args.num_recall
        # One thing is hidden in a context of these, and a context has one depth.
        lone = kind in ("single", "tracking")
        depths = [[depth] for depth in args.depths] if lone else [list(args.depths)]
        for length, wanted in itertools.cycle(itertools.product(args.lengths, depths)):
            context = next(number)
            for item in itertools.islice(make(kind, length, wanted, context), left):
                yield item
                left -= 1
            if not left:
                break


def _in_training(
    engine: Engine, args: Any, documents: Seq[Document], rng: np.random.Generator
) -> Any:
    pieces = pieces_of(engine)
    encode, longest = engine.tokenizer.encode, max(args.lengths)
    filler = [token for document in documents for token in encode(document.text)]
    lines = haystacks.made_up(rng)
    while len(filler) < longest:
        filler += encode(f"{next(lines)}\n")

    def make(kind: str, length: int, depths: Seq[float], number: int) -> Iterator[Asked]:
        start = int(rng.integers(0, len(filler) - length + 1))
        text = filler[start : start + length]
        found = trained.context(kind, length, depths, pieces, text, rng)
        for depth, item in found.items:
            answer = engine.tokenizer.decode(item.answer_ids)
            yield Asked(
                kind, length, depth, number, item.prompt_ids, (answer,), (), tuple(item.answer_ids)
            )

    return make


def _in_words(engine: Engine, style: str, args: Any, rng: np.random.Generator) -> Any:
    encode = engine.tokenizer.encode
    counts: dict[str, int] = {}

    def count(line: str) -> int:
        if line not in counts:
            counts[line] = len(encode(line))
        return counts[line]

    def make(kind: str, length: int, depths: Seq[float], number: int) -> Iterator[Asked]:
        taken = _TEMPLATE_TOKENS + _ANSWER_TOKENS.get(kind, _FEW_TOKENS)
        if (room := length - taken) < 1:
            what = (
                f"--lengths {length} leaves no room beside {taken} tokens for question and answer"
            )
            raise UserError(f"{what}: raise it")
        found = haystacks.context(kind, room, depths, count, rng)
        for one in found.questions:
            text = f"{found.text}\n\n{one.text}"
            ids = None if style == "text" else engine.tokenizer.chat(text)
            if ids is None:
                if style == "chat":
                    what = f"{engine.config.model} has no template for chats"
                    raise UserError(f"{what}: choose --style text")
                ids = encode(f"{found.text}\n\nQuestion: {one.text}\nAnswer:")
            yield Asked(kind, length, one.depth, number, ids, one.answers, one.wrong)

    return make


def in_turns(items: Seq[Asked], num_contexts: int) -> list[Asked]:
    """Of so many contexts at a time the first items, then the second ones, and so on."""
    nth: dict[int, int] = {}
    places = []
    for item in items:
        rank = nth[item.context] = nth.get(item.context, -1) + 1
        places.append((item.kind, item.context // num_contexts, rank, item.context))
    kinds = list(dict.fromkeys(item.kind for item in items))
    order = sorted(range(len(items)), key=lambda i: (kinds.index(places[i][0]), *places[i][1:]))
    return [items[i] for i in order]


def _share_cached(outputs: Seq[RequestOutput]) -> float:
    """Of all prompt tokens, those that were found in shared blocks."""
    cached = sum(output.metrics.num_cached_tokens for output in outputs)
    return cached / sum(output.metrics.num_prompt_tokens for output in outputs)


def tabled(
    items: Seq[Asked], base: Seq[RequestOutput], other: Seq[RequestOutput], seed: int
) -> dict[str, Any]:
    """Shares by kind, and by length and depth in each; what the other arm lost, side by side."""
    rights = [(item.right(a), item.right(b)) for item, a, b in zip(items, base, other, strict=True)]
    kinds = {}
    for kind in dict.fromkeys(item.kind for item in items):
        its = [i for i, item in enumerate(items) if item.kind == kind]
        kinds[kind] = _shares(items, rights, its, seed) | {"cells": _cells(items, rights, its)}
    lost = [i for i, (a, b) in enumerate(rights) if a and not b]
    worst = [
        {
            "about": f"{items[i].kind}, {items[i].length:,} tokens, depth {items[i].depth:g}: "
            f"wanted {', '.join(items[i].answers)}",
            "reference": base[i].text[:_SHOWN_CHARS],
            "other": other[i].text[:_SHOWN_CHARS],
        }
        for i in lost[:NUM_WORST]
    ]
    rows = [
        {**_place(item), "reference": a, "other": b}
        for item, (a, b) in zip(items, rights, strict=True)
    ]
    return {"kinds": kinds, "items": rows, "worst": worst}


def _place(item: Asked) -> dict[str, Any]:
    places = "kind", "length", "depth", "context"
    return {name: getattr(item, name) for name in places}


def _shares(
    items: Seq[Asked], rights: Seq[tuple[bool, bool]], its: Seq[int], seed: int
) -> dict[str, Any]:
    base, other = zip(*(rights[i] for i in its), strict=True)
    return paired_shares(base, other, [items[i].context for i in its], seed)


def _cells(
    items: Seq[Asked], rights: Seq[tuple[bool, bool]], its: Seq[int]
) -> list[dict[str, Any]]:
    found: dict[tuple[int, float], list[tuple[bool, bool]]] = {}
    for i in its:
        found.setdefault((items[i].length, items[i].depth), []).append(rights[i])
    return [
        {
            "length": length,
            "depth": depth,
            "n": len(pairs),
            "reference": sum(a for a, _ in pairs),
            "other": sum(b for _, b in pairs),
        }
        for (length, depth), pairs in sorted(found.items())
    ]


def judge_recall(table: dict[str, Any], items: Seq[Asked], made: Any, seed: int) -> list[Finding]:
    """One finding over all kinds that the reference can do."""
    limits: Limits = made.limits
    least = limits.evidence["min_reference"]
    able = [k for k, row in table["kinds"].items() if row["reference_interval"][0] >= least]
    unable = [f"{k} ({row['reference']:.0%})" for k, row in table["kinds"].items() if k not in able]
    out = f"; left out, since the reference cannot: {', '.join(unable)}" if unable else ""
    if not able:
        why = f"the reference finds too little to lose any: {', '.join(unable)}"
        return [Finding("recall", None, None, "", "not shown", why)]
    its = [i for i, item in enumerate(items) if item.kind in able]
    rights = [(row["reference"], row["other"]) for row in table["items"]]
    shares = _shares(items, rights, its, seed)
    where = f"{', '.join(able)}, McNemar's p {shares['mcnemar_p']:.2g}{out}"
    found = {"recall": (shares["difference"], shares["interval"])}
    return judge_written(found, {"items": shares["n"]}, limits, where)
