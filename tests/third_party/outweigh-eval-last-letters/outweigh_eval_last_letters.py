"""`last_letters`: the last letters of the words of a name, in one word.

The symbolic task of Jason Wei et al.: Chain-of-Thought Prompting Elicits Reasoning in Large
Language Models, NeurIPS 2022 (arXiv:2201.11903). A row has `name` ("Amy Brown") and `letters`
("yn"). What was asked stands letter for letter in the prompt, so that a cache which blurs keys is
seen to.

    python -m evals.quality --parts tasks --task last_letters=names.jsonl …
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from core import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from evals.quality.tasks import Row, Task

_SHOWN = (("Ada King", "ag"), ("Max Otto Born", "xon"))


def row(name: str, letters: str) -> Row:
    """What is asked in a chat, what is asked of a model without a template, and the answer."""
    from evals.quality.tasks import Row

    asked = f'Take the last letters of the words in "{name}" and put them together.'
    shots = "".join(f"Name: {shown}\nLetters: {last}\n\n" for shown, last in _SHOWN)
    message = f"{asked} Answer with these letters alone."
    return Row(message, f"{shots}Name: {name}\nLetters:", letters.lower())


def right(written: str, answer: str) -> bool:
    """Whether the last word that was written is the answer."""
    words = re.findall(r"[a-z]+", written.lower())
    return bool(words) and words[-1] == answer


def task() -> Task:
    from evals.quality.tasks import Task

    return Task("name", "letters", row, right, stop=("\n",))


@hookimpl
def outweigh_register_eval(register: Callable[[str, Any], None]) -> None:
    register("last_letters", task())
