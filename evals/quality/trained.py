"""What is hidden and asked for in the words that the embedded model was trained on, as tokens.

The model is no assistant: a question in other words it does not understand. `single` and `lines`
are those of evals.tiny.skills, `multikey` is its needles with names; nothing that it was trained on
is like `tracking`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

from core.errors import UserError
from evals.tiny.skills import PASSKEY_DIGITS, Item, Pieces, Script, passkey, question, statement

if TYPE_CHECKING:
    import numpy as np

KINDS = ("single", "multikey", "lines")
TOKENS_A_KEY = 256  # of running text, that one of many needles has to itself
_MAX_PAIRS = 200  # of a list


class Asked(NamedTuple):
    """Items of one context, and the depth of each."""

    kind: str
    length: int
    items: list[tuple[float, Item]]


def context(
    kind: str,
    length: int,
    depths: Seq[float],
    pieces: Pieces,
    filler_ids: Seq[int],
    rng: np.random.Generator,
) -> Asked:
    """One context of at most `length` tokens and an item for each depth; `single` has the first.

    filler_ids: at least `length` tokens of text. Raises UserError where the length leaves no room.
    """
    if kind == "single":
        return Asked(
            kind, length, [(depths[0], passkey(pieces, filler_ids, length, depths[0], rng))]
        )
    made = _multikey if kind == "multikey" else _lines
    return Asked(kind, length, made(length, depths, pieces, filler_ids, rng))


def _multikey(
    length: int,
    depths: Seq[float],
    pieces: Pieces,
    filler_ids: Seq[int],
    rng: np.random.Generator,
) -> list[tuple[float, Item]]:
    """Needles with names, evenly in text, and asked for are those nearest to the depths."""
    num = max(len(depths), length // TOKENS_A_KEY)
    stated, asked = pieces.named[0][0]
    keys = pieces.draw("word", num, rng)
    values = [pieces.number(PASSKEY_DIGITS, rng) for _ in range(num)]
    needles = [
        [*pieces.newline, *statement(stated, key, value), *pieces.newline]
        for key, value in zip(keys, values, strict=True)
    ]
    tails = [question(asked, key, value) for key, value in zip(keys, values, strict=True)]
    longest = 1 + max(len(tail) + len(answer) for tail, answer in tails)
    room = length - sum(map(len, needles)) - longest
    if room < 1:
        what = f"a context of {length} tokens holds {num} needles, the question and no text"
        raise UserError(f"{what}: raise --lengths by more than {-room}, or give fewer --depths")
    ids, used = list[int](), 0
    for i, needle in enumerate(needles):
        upto = round(room * i / max(1, num - 1))
        ids += [*filler_ids[used:upto], *needle]
        used = upto
    found = []
    for depth in depths:
        tail, answer = tails[round(depth * (num - 1))]
        found.append((depth, Item([*ids, *pieces.newline, *tail], answer)))
    return found


def _lines(
    length: int,
    depths: Seq[float],
    pieces: Pieces,
    filler_ids: Seq[int],
    rng: np.random.Generator,
) -> list[tuple[float, Item]]:
    """A list of pairs of any length up to 200, behind text where that is shorter than `length`."""
    head, pair, query = pieces.lists[0]
    num = _MAX_PAIRS
    while True:
        keys = pieces.draw("word", num, rng)
        values = [pieces.number(PASSKEY_DIGITS, rng) for _ in keys]
        script = Script()
        script.put(head)
        for key, value in zip(keys, values, strict=True):
            script.say(pair, key, value, 0)
        tails = [question(query, key, value) for key, value in zip(keys, values, strict=True)]
        room = length - len(script) - max(len(tail) + len(answer) for tail, answer in tails)
        if room >= 0:
            break
        num = num * 3 // 4
        if num < len(depths):
            what = f"a context of {length} tokens does not hold {len(depths)} pairs"
            raise UserError(f"{what}: raise --lengths, or give fewer --depths")
    text = [*filler_ids[: max(0, room - 1)], *pieces.newline] if room > 1 else []
    ids = [*(int(i) for i in text), *script.ids]
    picks = ((depth, tails[round(depth * (num - 1))]) for depth in depths)
    return [(depth, Item(ids + tail, answer)) for depth, (tail, answer) in picks]
