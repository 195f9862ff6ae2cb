"""In-context skills as token sequences: needles in text, key-value recall, copying.

A sequence is put together from pieces that are tokenised once (`Pieces`), so 8,192 tokens cost
about a millisecond. `training_sequence` is dense in answers, at all distances and in many
phrasings; `passkey` and `recall` build the items of an evaluation in one phrasing of those.

    pieces = Pieces(tokenizer)
    item = passkey(pieces, filler_ids, length=4096, depth=0.5, rng=np.random.default_rng(0))
    item.prompt_ids  # ends where the answer begins
    item.answer_ids  # five digits
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What the loss makes of a token of `training_sequence`.
NOISE, TEXT, ANSWER = 0, 1, 2  # drawn at random; ordinary; can be read off the context

PASSKEY_DIGITS = 5
POOL = 2048  # entries of each kind that is made up, of two words, digits or hex

WORDS = """
apple anchor arrow autumn badge basket beacon bridge bronze butter cabin candle canyon carpet castle
cedar chalk cherry circle clover cobalt copper coral cotton crystal curtain dagger desert diamond
dragon eagle ember engine falcon feather fiddle flame forest fossil fountain garden garlic ginger
glacier granite hammer harbor hazel helmet honey horizon island ivory jacket jasmine jungle kettle
kitchen ladder lantern lemon lily lizard magnet maple marble meadow mirror mountain needle nickel
ocean olive onion orange orchid otter oyster palace paper parrot pebble pencil pepper pillow planet
pocket pony potato prairie quartz rabbit rainbow raven ribbon river rocket saddle salmon sapphire
shadow silver spider spring stable summer sunset temple thunder tiger tulip tunnel turtle valley
velvet village violet walnut whale willow window winter wolf wonder yellow zebra
"""
SYLLABLES = "ba ce di fo gu ha jen kil lor mun na pe qui ros su tav ul vem wi xan yor zet".split()

NOUNS = (
    "pass key",
    "secret number",
    "magic number",
    "access code",
    "vault code",
    "locker number",
    "security code",
    "ticket number",
)
# The nameless needle: statement, then question; {noun} is one of NOUNS. The first is evaluated.
LONE = (
    ("The {noun} is {value}. Remember it.", "What is the {noun}? The {noun} is {value}"),
    ("Remember: the {noun} is {value}.", "Question: What was the {noun}?\nAnswer: {value}"),
    ("Note that {value} is the {noun}.", "The {noun} mentioned above is {value}"),
    ("({noun}: {value})", "{noun}: {value}"),
    ("By the way, the {noun} is {value}.", "Tell me the {noun}.\nIt is {value}"),
    ("Keep in mind that the {noun} is {value}.", "User: What is the {noun}?\n\nAssistant: {value}"),
)
# A needle with a name, in the same form; the first is evaluated.
NAMED = (
    (
        "The {noun} of {key} is {value}. Remember it.",
        "What is the {noun} of {key}? The {noun} of {key} is {value}",
    ),
    (
        "One of the special {noun}s for {key} is: {value}.",
        "The special {noun} for {key} mentioned in the text is: {value}",
    ),
    (
        "The {noun} for {key} is {value}.",
        "Question: What is the {noun} for {key}?\nAnswer: {value}",
    ),
    (
        "Remember that {key} has {value} as its {noun}.",
        "The {noun} that belongs to {key} is {value}",
    ),
    ("({key}: {value})", "{key}: {value}"),
    (
        "If somebody asks for the {noun} of {key}, answer {value}.",
        "User: What is the {noun} of {key}?\n\nAssistant: {value}",
    ),
)
# A list of pairs: what stands before it, one pair, one query. The first is evaluated.
LISTS = (
    (
        "Remember these pairs:\n",
        "{key}: {value}\n",
        "Question: What is the value of {key}?\nAnswer: {value}\n",
    ),
    ("", "{key} = {value}\n", "{key} = {value}\n"),
    ("Key | Value\n", "{key} | {value}\n", "{key} | {value}\n"),
    ("{\n", ' "{key}": "{value}",\n', 'data["{key}"] == "{value}"\n'),
    ("Here is a list.\n", "The value of {key} is {value}.\n", "The value of {key} is {value}.\n"),
    ("", "{key} -> {value}\n", "{key} -> {value}\n"),
    ("", "{key},{value}\n", "{key},{value}\n"),
    (
        "Learn the table by heart.\n",
        "{key} belongs to {value}.\n",
        "User: What does {key} belong to?\n\nAssistant: {value}\n",
    ),
)
# What stands before the text, before its copy, and after that.
COPIES = (
    ("Text:\n", "\nCopy:\n", "\n"),
    ("Repeat after me: ", "\nRepeated: ", "\n"),
    ("\n", "\n", "\n"),
    ('User: Repeat this: "', '"\n\nAssistant: "', '"\n'),
    ("Original: ", "\nThe same again: ", "\n"),
)

Filler = Callable[[int], "Sequence[int]"]


@dataclass(frozen=True)
class Item:
    """A prompt and the tokens that must follow it."""

    prompt_ids: list[int]
    answer_ids: list[int]


@dataclass(frozen=True)
class Entry:
    """A key or a value, tokenised as it stands after a space and as it stands without one.

    `lead` is what comes before the answer proper: the space before a digit is its own token.
    """

    lead: list[int]
    spaced: list[int]
    bare: list[int]


class Phrase:
    """A template as alternating tokens and slots; `None` in `before_slot` marks no space."""

    def __init__(self, template: str, encode: Callable[[str], list[int]]) -> None:
        self.parts: list[tuple[list[int], str, bool]] = []  # literal, slot ("" at the end), spaced
        pieces = re.split(r"\{(key|value)\}", template)
        for literal, slot in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
            spaced = bool(slot) and literal.endswith(" ")
            self.parts.append((encode(literal[:-1] if spaced else literal), slot, spaced))
        self.num_literals = sum(len(literal) for literal, _, _ in self.parts)


class Pieces:
    """Everything of the skills that depends on the tokeniser, tokenised once; can be pickled.

    tokenizer: a Hugging Face tokeniser whose digits are single tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False) if text else []

        rng = np.random.default_rng(20)  # the pools are a constant of the tokeniser
        vocabulary = tokenizer.get_vocab()
        known = sorted(t[1:] for t in vocabulary if re.fullmatch("Ġ[a-z]{4,}", t))
        words = list(dict.fromkeys([*WORDS.split(), *known]))[:POOL]
        self.eos = encode("<|endoftext|>")
        self.newline, self.space = encode("\n"), encode(" ")
        self.digits = [encode(digit)[0] for digit in "0123456789"]
        self.ordinary = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
        self.pools = {
            kind: self._entries(texts, tokenizer)
            for kind, texts in {
                "word": words,
                "words": _pairs(words, rng),
                "name": _made_up(rng),
                "hex": _unique(lambda: f"{rng.integers(16**4):04x}"),
                "number": _unique(lambda: str(rng.integers(100, 100000))),
            }.items()
        }
        self.lone = [[_both(noun, form, encode) for form in LONE] for noun in NOUNS]
        self.named = [[_both(noun, form, encode) for form in NAMED] for noun in NOUNS]
        self.lists = [
            (encode(head), Phrase(pair, encode), Phrase(query, encode))
            for head, pair, query in LISTS
        ]
        self.copies = [tuple(encode(part) for part in form) for form in COPIES]

    @staticmethod
    def _entries(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[Entry]:
        batch: Any = tokenizer([" " + text for text in texts] + texts, add_special_tokens=False)
        ids = batch["input_ids"]
        gap = tokenizer.encode(" ", add_special_tokens=False)
        entries = []
        for spaced, bare in zip(ids[: len(texts)], ids[len(texts) :], strict=True):
            lone = spaced[:1] == gap
            entries.append(Entry(gap if lone else [], spaced[1:] if lone else spaced, bare))
        return entries

    def number(self, num_digits: int, rng: np.random.Generator) -> Entry:
        """A random number of `num_digits` digits, the first of them not 0."""
        drawn = rng.integers(0, 10, num_digits).tolist()
        ids = [self.digits[d] for d in [drawn[0] or 1, *drawn[1:]]]
        return Entry(self.space, ids, ids)

    def draw(self, kind: str, count: int, rng: np.random.Generator) -> list[Entry]:
        """`count` entries of a kind, all different."""
        pool = self.pools[kind]
        if count > len(pool):
            raise UserError(
                f"{count} different keys of kind {kind!r} are asked for and there are {len(pool)}; "
                "ask for fewer"
            )
        return [pool[i] for i in rng.choice(len(pool), count, replace=False).tolist()]

    def values(self, kind: str, count: int, rng: np.random.Generator) -> list[Entry]:
        """`count` values, which may repeat; kind "digits" draws numbers of one random width."""
        if kind == "digits":
            width = PASSKEY_DIGITS if rng.random() < 0.5 else int(rng.integers(1, 9))
            return [self.number(width, rng) for _ in range(count)]
        pool = self.pools[kind]
        return [pool[i] for i in rng.integers(0, len(pool), count).tolist()]


def _unique(make: Callable[[], str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < POOL:
        found[make()] = None
    return list(found)


def _pairs(words: list[str], rng: np.random.Generator) -> list[str]:
    return _unique(lambda: " ".join(words[i] for i in rng.integers(0, len(words), 2)))


def _made_up(rng: np.random.Generator) -> list[str]:
    """Names of three syllables that no tokeniser has as one token."""
    return _unique(
        lambda: "".join(SYLLABLES[i] for i in rng.integers(0, len(SYLLABLES), 3)).capitalize()
    )


def _both(
    noun: str, form: tuple[str, str], encode: Callable[[str], list[int]]
) -> tuple[Phrase, Phrase]:
    statement, question = (part.replace("{noun}", noun) for part in form)
    return Phrase(statement, encode), Phrase(question, encode)


class Script:
    """A growing sequence: ids and, beside each, NOISE, TEXT or ANSWER."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.roles: list[int] = []

    def __len__(self) -> int:
        return len(self.ids)

    def put(self, ids: Sequence[int], role: int = TEXT) -> None:
        self.ids.extend(ids)
        self.roles.extend([role] * len(ids))

    def join(self, other: Script) -> None:
        self.ids.extend(other.ids)
        self.roles.extend(other.roles)

    def say(self, phrase: Phrase, key: Entry | None, value: Entry, value_role: int) -> None:
        """Write a phrase out. Its key is random, so NOISE; its value has `value_role`."""
        for literal, slot, spaced in phrase.parts:
            self.put(literal)
            if slot:
                entry, role = (key, NOISE) if slot == "key" else (value, value_role)
                assert entry is not None
                if spaced:
                    self.put(entry.lead)
                self.put(entry.spaced if spaced else entry.bare, role)


def question(phrase: Phrase, key: Entry | None, value: Entry) -> tuple[list[int], list[int]]:
    """The tokens of a question up to its answer, and the answer."""
    script = Script()
    script.say(phrase, key, value, ANSWER)
    start = script.roles.index(ANSWER)
    num_answers = script.roles.count(ANSWER)
    return script.ids[:start], script.ids[start : start + num_answers]


def statement(phrase: Phrase, key: Entry | None, value: Entry) -> list[int]:
    script = Script()
    script.say(phrase, key, value, NOISE)
    return script.ids


# ------------------------------------------------------------------------------- evaluation items


def passkey(
    tokenizer: PreTrainedTokenizerBase | Pieces,
    filler_ids: Sequence[int],
    length: int,
    depth: float,
    rng: np.random.Generator,
) -> Item:
    """A number of five digits stated once inside filler text, and asked for at the end.

    filler_ids: at least `length` tokens of text; the front of it is used.
    length: tokens of prompt and answer together, exactly.
    depth: 0 puts the statement before the filler, 1 behind it.
    Raises UserError where the filler is too short, the length leaves none, or depth is outside.
    """
    pieces = _pieces(tokenizer)
    if not 0 <= depth <= 1:
        raise UserError(f"depth is {depth} and must lie between 0 and 1; pass a fraction")
    stated, asked = pieces.lone[0][0]
    value = pieces.number(PASSKEY_DIGITS, rng)
    needle = [*pieces.newline, *statement(stated, None, value), *pieces.newline]
    tail, answer = question(asked, None, value)
    tail = [*pieces.newline, *tail] if depth < 1 else tail
    num_filler = length - len(needle) - len(tail) - len(answer)
    if num_filler < 0:
        least = length - num_filler
        raise UserError(f"a passkey of {length} tokens is asked for and takes {least}: raise that")
    if num_filler > len(filler_ids):
        what = f"a passkey of {length} tokens needs {num_filler} of filler"
        raise UserError(f"{what} and {len(filler_ids)} are given: give more text")
    filler = [int(i) for i in filler_ids[:num_filler]]
    cut = round(depth * num_filler)
    return Item(filler[:cut] + needle + filler[cut:] + tail, answer)


def recall(
    tokenizer: PreTrainedTokenizerBase | Pieces,
    num_pairs: int,
    rng: np.random.Generator,
    num_queries: int | None = None,
    keys: str = "word",
    values: str = "digits",
) -> list[Item]:
    """A list of `num_pairs` pairs, and one item for each query of `num_queries` (default: all).

    keys: "word", "words" (two), "name" (made up), "hex" or "number"; values: one of these, or
    "digits" (five). Items share the list as a prefix. Raises UserError for more than 2,048 pairs.
    """
    pieces = _pieces(tokenizer)
    head, pair, query = pieces.lists[0]
    names = pieces.draw(keys, num_pairs, rng)
    if values == "digits":
        drawn = [pieces.number(PASSKEY_DIGITS, rng) for _ in names]
    else:
        drawn = pieces.values(values, num_pairs, rng)
    script = Script()
    script.put(head)
    for name, value in zip(names, drawn, strict=True):
        script.say(pair, name, value, NOISE)
    items = []
    for i in rng.permutation(num_pairs)[:num_queries].tolist():
        tail, answer = question(query, names[i], drawn[i])
        items.append(Item(script.ids + tail, answer))
    return items


def _pieces(tokenizer: PreTrainedTokenizerBase | Pieces) -> Pieces:
    return tokenizer if isinstance(tokenizer, Pieces) else Pieces(tokenizer)


# ----------------------------------------------------------------------------- training sequences


def training_sequence(
    pieces: Pieces, length: int, filler: Filler, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """One sequence of a skill drawn by `rng`.

    filler: gives that many consecutive tokens of some document.
    Returns ids, uint16 [length], and roles, uint8 [length]: NOISE, TEXT or ANSWER.
    """
    make = (needles, recalls, copies)[rng.choice(3, p=[0.4, 0.4, 0.2])]
    script = make(pieces, length, filler, rng)
    ids = np.array(script.ids[:length], np.uint16)
    return ids, np.array(script.roles[:length], np.uint8)


def _log_uniform(low: int, high: int, rng: np.random.Generator) -> int:
    """An integer between low and high, small ones as likely as large ones by their order."""
    return low if high <= low else round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))


def needles(pieces: Pieces, length: int, filler: Filler, rng: np.random.Generator) -> Script:
    """Numbers stated inside one running text, each asked for once or more further on.

    A quarter has one needle and one question at the end; the rest up to one needle a hundred
    tokens, and half of the questions are asked at the end.
    """
    num_needles = 1 if rng.random() < 0.25 else _log_uniform(2, max(2, length // 110), rng)
    if num_needles <= len(NOUNS) and rng.random() < 0.5:
        nouns = rng.permutation(len(NOUNS))[:num_needles].tolist()
        keys: list[Entry | None] = [None] * num_needles
        forms = [pieces.lone[noun] for noun in nouns]
    else:
        kind = ("word", "words", "name", "hex", "number")[rng.integers(5)]
        keys = [*pieces.draw(kind, num_needles, rng)]
        forms = [pieces.named[rng.integers(len(NOUNS))]] * num_needles
    value_kind = "digits" if rng.random() < 0.7 else ("word", "hex", "number")[rng.integers(3)]
    values = pieces.values(value_kind, num_needles, rng)
    # One way of asking in a sequence; the first, which is evaluated, more often than the others.
    number = max(0, int(rng.integers(-1, len(LONE))))
    room = length * (0.25 if num_needles == 1 else 0.75)

    events: list[tuple[float, Script]] = []
    total = 0

    def add(when: float, phrase: Phrase, i: int, role: int) -> None:
        nonlocal total
        event = Script()
        event.say(phrase, keys[i], values[i], role)
        event.put(pieces.newline)
        events.append((when, event))
        total += len(event) + 1  # the end of the line before it

    places = rng.random(num_needles).tolist()
    for i, place in enumerate(places):
        add(place, forms[i][number][0], i, NOISE)
    for _ in range(rng.choice((1, 4, 32)).item()):
        for i in rng.permutation(num_needles).tolist():
            if total > room:
                break
            at_end = num_needles == 1 or rng.random() < 0.5
            when = 1.0 if at_end else places[i] + (1 - places[i]) * rng.random()
            add(when, forms[i][number][1], i, ANSWER)

    num_filler = max(0, length - total)
    text = filler(num_filler)
    script, used = Script(), 0
    for when, event in sorted(events, key=lambda event: event[0]):
        upto = round(when * num_filler)
        script.put(text[used:upto])
        if upto > used:
            script.put(pieces.newline)
        script.join(event)
        used = upto
    script.put(text[used:])
    script.put(filler(max(0, length - len(script))))
    return script


def recalls(pieces: Pieces, length: int, filler: Filler, rng: np.random.Generator) -> Script:
    """Lists of pairs and queries of them, one list after another, sometimes with text between."""
    script = Script()
    while len(script) < length:
        room = length - len(script)
        head, pair, query = pieces.lists[max(0, int(rng.integers(-1, len(LISTS))))]
        key_kind = ("word", "words", "name", "hex", "number")[rng.integers(5)]
        value_kind = "digits" if rng.random() < 0.5 else ("word", "words", "hex")[rng.integers(3)]
        num_pairs = _log_uniform(2, min(room // 24 + 2, 500), rng)
        keys = pieces.draw(key_kind, num_pairs, rng)
        values = pieces.values(value_kind, num_pairs, rng)
        script.put(head)
        for key, value in zip(keys, values, strict=True):
            script.say(pair, key, value, NOISE)
        script.put(pieces.newline)
        if rng.random() < 0.3:
            script.put(filler(_log_uniform(16, max(16, room // 2), rng)))
            script.put(pieces.newline)
        for _ in range(2):
            for i in rng.permutation(num_pairs).tolist():
                script.say(query, keys[i], values[i], ANSWER)
                if len(script) >= length:
                    return script
        script.put(pieces.eos)
    return script


def copies(pieces: Pieces, length: int, filler: Filler, rng: np.random.Generator) -> Script:
    """Random tokens or real text, and its copies, sometimes with other text between."""
    script = Script()
    while len(script) < length:
        room = length - len(script)
        before, between, after = pieces.copies[rng.integers(len(COPIES))]
        size = _log_uniform(4, max(4, min(room // 2, 2048)), rng)
        if rng.random() < 0.5:
            source, role = [*filler(size)], TEXT
        else:
            drawn = rng.integers(0, len(pieces.ordinary), size).tolist()
            source, role = [pieces.ordinary[i] for i in drawn], NOISE
        script.put(before)
        script.put(source, role)
        if rng.random() < 0.3:
            script.put(pieces.newline)
            script.put(filler(_log_uniform(16, max(16, room // 2), rng)))
        for _ in range(int(rng.integers(1, 4))):
            script.put(between)
            script.put(source, ANSWER)
        script.put(after)
        script.put(pieces.eos)
    return script
