"""Where `evals.quality` gets its documents from, and what it says where there are none."""

from __future__ import annotations

import json

import pytest

from core.errors import UserError
from evals.quality.data import Choice, read_documents

ROWS = [{"text": f"number {i}", "other": f"other {i}", "n": i} for i in range(5)]


@pytest.fixture
def files(tmp_path):
    """A file of every format with the same rows, and a folder of .txt."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    lines = "\n\n".join(map(json.dumps, ROWS))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    Dataset.from_list(ROWS).to_parquet(str(tmp_path / "a.parquet"))
    (tmp_path / "texts").mkdir()
    for row in ROWS:
        (tmp_path / "texts" / f"{row['n']}.txt").write_text(row["text"])
    return tmp_path


def texts(*sources, **choice):
    return [one.text for one in read_documents([str(s) for s in sources], Choice(**choice))]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "texts"])
def test_every_format_gives_the_first_documents(files, name):
    assert texts(files / name, limit=3) == ["number 0", "number 1", "number 2"]
    assert len(texts(files / name)) == 5


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_the_field_is_chosen(files, name):
    assert texts(files / name, field="other", limit=1) == ["other 0"]
    with pytest.raises(UserError, match="row 1 of .* no string in 'nope': .*text, other, n"):
        texts(files / name, field="nope")
    with pytest.raises(UserError, match="no string in 'n'"):
        texts(files / name, field="n")


def test_several_sources_keep_their_order_and_their_own_limit(files):
    (files / "b.txt").write_text("\ufeffbook\n", encoding="utf-8")
    (files / "c.json").write_text('["plain", {"text": "object"}]')
    found = texts(files / "b.txt", files / "a.jsonl", files / "c.json", limit=2)
    assert found == ["book\n", "number 0", "number 1", "plain", "object"]


def test_blank_and_repeated_documents_are_no_samples(files):
    (files / "c.json").write_text('["one", " ", "one", "number 0", "two"]')
    assert texts(files / "c.json", files / "a.jsonl", limit=3) == [
        *("one", "number 0", "two"), *("number 1", "number 2", "number 3"),
    ]  # fmt: skip
    with pytest.raises(UserError, match="texts has no document with text of its own"):
        texts(files / "a.json", files / "texts")


def test_a_line_is_read_only_when_it_is_wanted(files):
    (files / "a.jsonl").write_text('{"text": "fine"}\nbroken')
    assert texts(files / "a.jsonl", limit=1) == ["fine"]
    with pytest.raises(UserError, match=r"line 2 of .*a\.jsonl is no JSON"):
        texts(files / "a.jsonl", limit=2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"{", "a.json is no JSON"),
        ("a.json", b"[1]", "row 1 of .* is no object and no string"),
        ("a.txt", b"\xff\xfe", "cannot be read as UTF-8"),
        ("a.txt", b" \n", "no document with text"),
        ("a.parquet", b"nothing", "cannot be read as parquet"),
        ("a.csv", b"x", r"none of \.txt, \.jsonl"),
    ],
)
def test_what_cannot_be_read_is_said_in_a_sentence(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        texts(tmp_path / name)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./none", "missing.jsonl"])
def test_a_file_that_is_not_there(name):
    with pytest.raises(UserError, match="there is no file or folder"):
        texts(name)


def test_an_empty_folder(tmp_path):
    with pytest.raises(UserError, match="no document with text"):
        texts(tmp_path)


def test_the_hub_is_asked_for_name_config_and_split_as_a_stream(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        for row in ROWS:
            asked.append(row["n"])
            yield row

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert texts("org/name:en", split="validation", limit=2) == ["number 0", "number 1"]
    assert asked == [(("org/name", "en"), {"split": "validation", "streaming": True}), 0, 1]
    assert texts("name", limit=1) == ["number 0"]
    assert asked[3] == (("name", None), {"split": "test", "streaming": True})


def test_without_a_network_the_hub_is_one_sentence():
    with pytest.raises(
        UserError, match="split 'test' of the data set org/none cannot be had.*give"
    ):
        texts("org/none")
