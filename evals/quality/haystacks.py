"""What is hidden in long contexts and asked for at their end, made up here, in plain words.

A context of each kind is a list of lines with a place for what is hidden; questions of one context
share it as a prefix. Lengths are counted by the caller's tokenizer, line by line.

    single    one number in running text
    multikey  many numbers in running text, told apart by what they belong to
    tracking  names that take their value from one another; which of them have it?
    lines     nothing but numbered names, one of which is asked for
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

from core.errors import UserError
from evals.tiny.skills import SYLLABLES, WORDS

if TYPE_CHECKING:
    import numpy as np

KINDS = ("single", "multikey", "tracking", "lines")
TOKENS_A_KEY = 128  # of running text, that one of many needles has to itself
NUM_HOPS = 4  # from the name that is given a value to the last that has it
_DIGITS = 6
_WORDS = WORDS.split()
# Filler that says nothing about numbers; {} are words.
_SENTENCES = (
    "The {} was still on the {} when the {} came back.",
    "Nobody had moved the {} since the {} was painted.",
    "They walked past the {} and left the {} where it was.",
    "A {} like that is worth more than any {} or {}.",
    "In the evening the {} smelled of {} and rain.",
    "She drew a {} on the cover and a {} inside.",
    "Behind the {} there was only an old {} and some {}.",
    "It took all day to carry the {} across to the {}.",
)

Count = Callable[[str], int]


class Question(NamedTuple):
    """What is asked, all of what an answer must hold, and what it must not."""

    depth: float
    text: str
    answers: tuple[str, ...]
    wrong: tuple[str, ...] = ()


class Context(NamedTuple):
    """A text of a kind and a number of tokens, and the questions about it."""

    kind: str
    length: int
    text: str
    questions: list[Question]


def made_up(rng: np.random.Generator) -> Iterator[str]:
    """Sentences without end."""
    while True:
        form = _SENTENCES[rng.integers(len(_SENTENCES))]
        words = (_WORDS[i] for i in rng.integers(0, len(_WORDS), form.count("{}")).tolist())
        yield form.format(*words)


def context(
    kind: str, length: int, depths: Seq[float], count: Count, rng: np.random.Generator
) -> Context:
    """One of at most `length` tokens, with a question for each depth.

    Depth 0 is the beginning, 1 the end. `single` and `tracking` hide one thing, at the first of
    `depths`, and ask for it once. Raises UserError where the length leaves no room.
    """
    if kind == "lines":
        return _lines(length, depths, count, rng)
    makers = {"single": _single, "multikey": _multikey, "tracking": _tracking}
    hidden, questions = makers[kind](length, depths, rng)
    room = length - sum(count(f"{line}\n") for _, line in hidden)
    filler = _filled(room, count, rng)
    if not filler:
        what = f"a context of {length} tokens has no room for text beside what {kind} hides"
        raise UserError(f"{what}: raise --lengths")
    placed = [((i + 0.5) / len(filler), line) for i, line in enumerate(filler)] + hidden
    lines = [line for _, line in sorted(placed, key=lambda pair: pair[0])]
    return Context(kind, length, "\n".join(lines), questions)


def _filled(room: int, count: Count, rng: np.random.Generator) -> list[str]:
    lines: list[str] = []
    for line in made_up(rng):
        room -= count(f"{line}\n")
        if room < 0:
            return lines
        lines.append(line)
    raise AssertionError("made_up ends")


def _numbers(num: int, rng: np.random.Generator) -> list[str]:
    """All different, so that no answer is right by accident."""
    low, high = 10 ** (_DIGITS - 1), 10**_DIGITS
    found: dict[str, None] = {}
    while len(found) < num:
        found[str(rng.integers(low, high))] = None
    return list(found)


def _keys(num: int, rng: np.random.Generator) -> list[str]:
    """Pairs of words, all different."""
    size = len(_WORDS)
    chosen = rng.choice(size * (size - 1), num, replace=False).tolist()
    pairs = ((i // (size - 1), i % (size - 1)) for i in chosen)
    return [f"{_WORDS[a]}-{_WORDS[b + (b >= a)]}" for a, b in pairs]


def _names(num: int, rng: np.random.Generator) -> list[str]:
    """Made-up names of three syllables, all different."""
    size = len(SYLLABLES)
    chosen = rng.choice(size**3, num, replace=False).tolist()
    parts = ((i // size**2, i // size % size, i % size) for i in chosen)
    return ["".join(SYLLABLES[i] for i in three).upper() for three in parts]


Hidden = tuple[list[tuple[float, str]], list[Question]]


def _needle(key: str, value: str) -> str:
    return f"The access code of {key} is {value}."


def _asked(key: str) -> str:
    return f"What is the access code of {key}? Give the number alone."


def _single(length: int, depths: Seq[float], rng: np.random.Generator) -> Hidden:
    (key,), (value,) = _keys(1, rng), _numbers(1, rng)
    return [(depths[0], _needle(key, value))], [Question(depths[0], _asked(key), (value,))]


def _multikey(length: int, depths: Seq[float], rng: np.random.Generator) -> Hidden:
    """Needles evenly, and asked for are those nearest to the depths."""
    num = min(1024, max(2 * len(depths), length // TOKENS_A_KEY))
    keys, values = _keys(num, rng), _numbers(num, rng)
    hidden = [
        (i / (num - 1), _needle(*pair)) for i, pair in enumerate(zip(keys, values, strict=True))
    ]
    asked = [round(depth * (num - 1)) for depth in depths]
    questions = [
        Question(depth, _asked(keys[i]), (values[i],))
        for depth, i in zip(depths, asked, strict=True)
    ]
    return hidden, questions


def _tracking(length: int, depths: Seq[float], rng: np.random.Generator) -> Hidden:
    """Two chains of assignments, each in order, from the depth on to the end."""
    names, values = _names(2 * (NUM_HOPS + 1), rng), _numbers(2, rng)
    chains = names[: NUM_HOPS + 1], names[NUM_HOPS + 1 :]
    hidden = []
    for chain, value in zip(chains, values, strict=True):
        places = sorted((depths[0] + (1 - depths[0]) * rng.random(len(chain))).tolist())
        stated = [f"Let {chain[0]} be {value}."]
        stated += [f"Let {b} be the same as {a}." for a, b in zip(chain, chain[1:], strict=False)]
        hidden += list(zip(places, stated, strict=True))
    text = f"Which names have the value {values[0]}? List all {NUM_HOPS + 1} of them."
    return hidden, [Question(depths[0], text, tuple(chains[0]), tuple(chains[1]))]


def _lines(length: int, depths: Seq[float], count: Count, rng: np.random.Generator) -> Context:
    def line(key: str, value: str) -> str:
        return f"line {key}: the register holds {value}"

    size = max(count(f"{line(key, '123456')}\n") for key in _keys(64, rng))
    num = min(5000, length // size)
    if num < 2:
        what = f"a context of {length} tokens holds {num} lines of {size} and needs 2"
        raise UserError(f"{what}: raise --lengths")
    keys, values = _keys(num, rng), _numbers(num, rng)
    asked = [round(depth * (num - 1)) for depth in depths]
    questions = [
        Question(
            depth, f"What does the register hold in line {keys[i]}? Give the number alone.",
            (values[i],),
        )
        for depth, i in zip(depths, asked, strict=True)
    ]  # fmt: skip
    text = "\n".join(line(key, value) for key, value in zip(keys, values, strict=True))
    return Context("lines", length, text, questions)
