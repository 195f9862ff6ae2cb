"""`last_letters`: what is asked, what counts as right, and that the plugin offers it."""

from __future__ import annotations

import pytest

from evals.quality.tasks import known_tasks

TASK = known_tasks(())["last_letters"]


def test_a_row_asks_for_the_letters() -> None:
    row = TASK.row("Amy Brown", "YN")
    assert row.answer == "yn"
    assert row.text.endswith("Name: Amy Brown\nLetters:") and '"Amy Brown"' in row.message


def test_the_answers_shown_are_right() -> None:
    text = TASK.row("Amy Brown", "yn").text
    shown = [block.splitlines() for block in text.split("\n\n")[:-1]]
    assert len(shown) == 2
    for name, letters in shown:
        words = name.removeprefix("Name: ").split()
        assert letters == f"Letters: {''.join(word[-1] for word in words)}"


@pytest.mark.parametrize(
    ("written", "is_right"), [(" yn", True), ("The letters are YN.", True), ("ny", False), ("", 0)]
)
def test_gate(written: str, is_right: bool) -> None:
    assert TASK.right(written, "yn") == is_right
