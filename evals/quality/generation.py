"""Free text of both arms after the same prompts, with the same seeds: where it parts, how it loops.

Each temperature is a comparison of its own. At temperature 0 texts part where the arms disagree on
the likeliest token, and what follows is another text; so the share of texts that are still the same
after t tokens is a survival curve. Above 0 a token's noise depends on the seed and its position
alone, so that equal logits write equal texts there too.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from core.errors import UserError
from core.sampling import SamplingParams
from evals.intervals import wilson
from evals.quality.arms import Arms, both, written
from evals.quality.pairs import difference, paired_shares
from evals.quality.repeats import loops, parting, repeats
from evals.quality.verdicts import Finding, judge_written

if TYPE_CHECKING:
    from core.engine import Engine
    from core.show import Progress
    from evals.tiny.documents import Document

_NUM_WORST = 5
_SHOWN_CHARS = 400  # of a text beside another
_TEMPLATE_TOKENS = 128  # room for what a chat's template adds


class Prompt(NamedTuple):
    """Tokens to write on after, and where they are from."""

    source: str
    name: str
    token_ids: list[int]


class Text(NamedTuple):
    """What followed a prompt. `ended` where the model ended it."""

    token_ids: list[int]
    text: str
    ended: bool


def prompts_of(
    engine: Engine, documents: Seq[Document], num: int, num_tokens: int, chat: bool
) -> list[Prompt]:
    """`num` prompts of at most `num_tokens`, spread over all documents, and over each.

    With `chat`, a document is the message of a user, cut to so many tokens, and there is one prompt
    of each. Raises UserError where the model has no template for chats.
    """
    encode, found = engine.tokenizer.encode, []
    if chat:
        for document in documents[:num]:
            ids = encode(document.text)
            whole = len(ids) <= num_tokens
            message = document.text if whole else engine.tokenizer.decode(ids[:num_tokens])
            made = engine.tokenizer.chat(message)
            if made is None:
                what = f"{engine.config.model} has no template for chats"
                raise UserError(f"{what}: leave --chat out, or choose an instruct model")
            found.append(Prompt(document.kind, document.name, made))
        return found
    chosen = documents[:num]
    each = -(-num // len(chosen))
    by_place: list[list[Prompt]] = [[] for _ in range(each)]
    for document in chosen:
        ids = encode(document.text)
        last = max(0, len(ids) - num_tokens)
        starts = sorted({last * place // each for place in range(each)})
        for row, start in zip(by_place, starts, strict=False):
            row.append(Prompt(document.kind, document.name, ids[start : start + num_tokens]))
    return [prompt for row in by_place for prompt in row][:num]


def generation(
    arms: Arms, documents: Seq[Document], progress: Progress
) -> tuple[dict[str, Any], list[Finding]]:
    """The record of the part, and its findings: those of the highest temperature."""
    args = arms.args

    def make(engine: Engine) -> list[Prompt]:
        return prompts_of(engine, documents, args.num_prompts, args.prompt_tokens, args.chat)

    def write(engine: Engine, prompts: list[Prompt], arm: str) -> dict[float, list[Text]]:
        return {
            heat: _texts(engine, prompts, heat, args, progress, f"{arm} at {heat:g}")
            for heat in args.temperatures
        }

    longest = args.prompt_tokens + args.new_tokens + (_TEMPLATE_TOKENS if args.chat else 0)
    added = f" plus {_TEMPLATE_TOKENS} for the chat's template" if args.chat else ""
    option = f"--prompt-tokens plus --new-tokens{added}"
    prompts, made = both(
        arms, make, write, progress, (option, longest), enable_prefix_caching=False
    )
    tables = [
        {"temperature": heat, **compared(prompts, made.base[heat], made.other[heat], args.seed)}
        for heat in args.temperatures
    ]
    hottest = max(tables, key=lambda table: float(table["temperature"]))
    findings = judge_generation(hottest, made.limits, ends=not args.ignore_eos)
    record = {
        "num_new_tokens": args.new_tokens,
        "engines": made.reports,
        "judged_temperature": hottest["temperature"],
        "temperatures": tables,
    }
    return record, findings


def _texts(
    engine: Engine, prompts: Seq[Prompt], heat: float, args: Any, progress: Progress, stage: str
) -> list[Text]:
    params = [
        SamplingParams(
            max_tokens=args.new_tokens,
            temperature=heat,
            seed=args.seed + i,
            ignore_eos=args.ignore_eos,
        )
        for i in range(len(prompts))
    ]
    ids = [prompt.token_ids for prompt in prompts]
    outputs = written(engine, ids, params, progress, stage)
    return [Text(o.token_ids, o.text, o.finish_reason == "stop") for o in outputs]


def compared(prompts: Seq[Prompt], base: Seq[Text], other: Seq[Text], seed: int) -> dict[str, Any]:
    """Both arms' texts of one temperature; intervals draw documents, which prompts are from."""
    groups = [(prompt.source, prompt.name) for prompt in prompts]
    rows = [_row(*pair) for pair in zip(prompts, base, other, strict=True)]
    figures = {}
    for name in rows[0]["reference"]:
        if name != "loops":
            a, b = (np.array([row[arm][name] for row in rows], float) for arm in _ARMS)
            delta, interval = difference(list(b - a), groups, seed)
            figures[name] = {
                "reference": float(a.mean()),
                "other": float(b.mean()),
                "difference": delta,
                "interval": interval,
            }
    free = [[not row[arm]["loops"] for row in rows] for arm in _ARMS]
    return {
        "n": len(rows),
        "num_documents": len(set(groups)),
        **figures,
        "without_loops": paired_shares(free[0], free[1], groups, seed),
        "survival": survival([row["parting"] for row in rows], base),
        "texts": rows,
        "worst": _worst(rows, prompts, base, other),
    }


_ARMS = ("reference", "other")


def _row(prompt: Prompt, base: Text, other: Text) -> dict[str, Any]:
    return {
        "source": prompt.source,
        "name": prompt.name,
        "parting": parting(base.token_ids, other.token_ids),
        **{arm: _figures(text) for arm, text in zip(_ARMS, (base, other), strict=True)},
    }


def _figures(text: Text) -> dict[str, Any]:
    length = {"length": len(text.token_ids), "ended": text.ended}
    return {**repeats(text.token_ids), **length, "loops": loops(text.token_ids)}


def survival(partings: Seq[int | None], base: Seq[Text]) -> list[dict[str, Any]]:
    """The share of texts whose first t tokens are the same, for t in powers of 2 and the longest.

    A text that ended alike in both arms has survived.
    """
    longest, n = max(len(text.token_ids) for text in base), len(partings)
    places = [2**i for i in range(longest.bit_length()) if 2**i < longest]
    rows = []
    for place in [*places, longest]:
        num = sum(at is None or at >= place for at in partings)
        share = {"share": num / n, "interval": wilson(num, n)}
        rows.append({"tokens": place, "num_same": num, **share})
    return rows


def _worst(
    rows: Seq[dict[str, Any]], prompts: Seq[Prompt], base: Seq[Text], other: Seq[Text]
) -> list[dict[str, Any]]:
    """The texts that repeat themselves most beside the reference's, from where they part on."""
    parted = [i for i, row in enumerate(rows) if row["parting"] is not None]
    parted.sort(key=lambda i: rows[i]["reference"]["rep4"] - rows[i]["other"]["rep4"])
    found = []
    for i in parted[:_NUM_WORST]:
        a, b = base[i].text, other[i].text
        same = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
        cut = slice(max(0, same - _SHOWN_CHARS // 4), same + _SHOWN_CHARS)
        about = f"{prompts[i].source}, {prompts[i].name}: parts after {rows[i]['parting']:,} tokens"
        rep = rows[i]["reference"]["rep4"], rows[i]["other"]["rep4"]
        about += f", rep-4 {rep[0]:.3f} and {rep[1]:.3f}"
        found.append({"about": about, "reference": a[cut], "other": b[cut]})
    return found


def judge_generation(table: dict[str, Any], limits: Any, ends: bool) -> list[Finding]:
    """rep4, distinct3, loops, and length where texts may end by themselves."""
    free, length = table["without_loops"], table["length"]
    new_loops = free["reference"] - free["other"], (-free["interval"][1], -free["interval"][0])
    found = {
        "rep4": (table["rep4"]["difference"], table["rep4"]["interval"]),
        "loops": new_loops,
        "distinct3": (table["distinct3"]["difference"], table["distinct3"]["interval"]),
    }
    if ends:
        scale = length["reference"]
        low, high = (end / scale for end in length["interval"])
        found["length"] = length["difference"] / scale, (low, high)
    have = {"prompts": table["n"], "documents": table["num_documents"]}
    where = f"{table['n']:,} texts at temperature {table['temperature']:g}"
    return judge_written(found, have, limits, where)
