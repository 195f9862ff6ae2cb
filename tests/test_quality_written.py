"""What the arms of `evals.quality` write: repetition, recall, tasks, their statistics and verdicts.

Numbers on texts and answers that are known; then every part through the command, on random weights.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from core import Engine
from core.errors import RunError, UserError
from evals import intervals
from evals.quality import __main__ as command, haystacks, tasks as tasks_module, trained
from evals.quality.__main__ import main
from evals.quality.data import Choice, read_rows
from evals.quality.generation import Prompt, Text, compared, prompts_of, survival
from evals.quality.options import all_options, parse
from evals.quality.pairs import paired_shares
from evals.quality.parts import PARTS
from evals.quality.recall import Asked, asked, in_turns
from evals.quality.repeats import loops, parting, repeats
from evals.quality.tasks import TASKS, known_tasks, last_number, task_of
from evals.quality.verdicts import EXIT_CODES, judge_stored, judge_written, limits_of
from evals.tiny.answers import pieces_of
from evals.tiny.documents import Document
from plugins.kv.paged import Paged
from plugins.kv.paged_int8 import PagedInt8

# ---------------------------------------- repetition


def test_repetition_of_known_texts():
    got = repeats([1, 2, 3, 4, 1, 2, 3, 4])
    assert got["rep1"] == 0.5 and got["distinct1"] == 0.5
    assert got["rep4"] == pytest.approx(1 / 5) and got["distinct4"] == pytest.approx(4 / 5)
    assert repeats([1, 2, 3])["rep4"] == 0 and repeats([])["distinct1"] == 1


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([7] * 16, True),
        ([7] * 15, False),
        ([1, 2, 3, 4] * 4, True),
        ([1, 2, 3, 4] * 3 + [1, 2, 3], False),
        ([*range(100), *([5, 6, 7] * 6), *range(50)], True),
        (list(range(64)) * 4, True),
        (list(range(65)) * 4, False),
        (list(range(40)) * 3, False),
        ([], False),
    ],
)
def test_a_loop_stands_there_four_times_in_a_row(ids, expected):
    assert loops(ids) is expected


@given(st.lists(st.integers(0, 2), max_size=60))
@settings(max_examples=60, deadline=None)
def test_loops_are_those_of_a_search_by_hand(ids):
    def by_hand():
        for period in range(1, len(ids) // 4 + 1):
            size = max(16, 4 * period)
            for start in range(len(ids) - size + 1):
                part = ids[start : start + size]
                if part[period:] == part[:-period]:
                    return True
        return False

    assert loops(ids) == by_hand()


def test_where_texts_part():
    assert parting([1, 2, 3], [1, 2, 4]) == 2 and parting([1], [2]) == 0
    assert parting([1, 2], [1, 2]) is None
    assert parting([1, 2], [1, 2, 3]) == 2  # one ended, the other went on


def texts(*ids):
    return [Text(list(one), "".join(map(chr, one)), False) for one in ids]


def test_survival_counts_texts_that_are_the_same_so_far():
    rows = survival([None, 3, 0, 8], texts(range(10), range(10), range(10), range(10)))
    found = {row["tokens"]: row["num_same"] for row in rows}
    assert found == {1: 3, 2: 3, 4: 2, 8: 2, 10: 1}
    assert rows[0]["share"] == 0.75 and rows[0]["interval"][0] < 0.75 < rows[0]["interval"][1]


def test_texts_compared_by_hand():
    prompts = [Prompt("books", name, [1]) for name in ("a", "a", "b")]
    base = texts(range(65, 85), range(65, 85), range(65, 85))
    other = texts(range(65, 85), [65] * 20, range(65, 80))
    got = compared(prompts, base, other, 0)
    assert got["n"] == 3 and got["num_documents"] == 2
    assert got["rep4"]["reference"] == 0 and got["rep4"]["other"] == pytest.approx(16 / 17 / 3)
    assert got["length"]["difference"] == pytest.approx(-5 / 3)
    assert got["without_loops"]["num_lost"] == 1 and got["without_loops"]["num_gained"] == 0
    assert [row["parting"] for row in got["texts"]] == [None, 1, 15]
    worst = got["worst"][0]  # most repetition first, and none that is the same
    assert (
        len(got["worst"]) == 2 and worst["other"].startswith("AAAA") and "rep-4" in worst["about"]
    )


@pytest.fixture(scope="module")
def tiny():
    with Engine(model="tiny", device="cpu", dtype="float32", max_model_len=64) as engine:
        yield engine


def test_prompts_are_spread_over_all_documents_then_over_each(tiny):
    encode = tiny.tokenizer.encode
    long, short = "One two three four five. " * 40, "Only this."
    documents = [Document("a", "x", long), Document("b", "x", short), Document("c", "x", long)]
    got = prompts_of(tiny, documents, 7, 10, False)
    assert [one.name for one in got] == ["a", "b", "c", "a", "c", "a", "c"]
    assert got[0].token_ids == encode(long)[:10] and got[1].token_ids == encode(short)
    assert got[3].token_ids != got[0].token_ids and all(len(p.token_ids) <= 10 for p in got)
    assert [one.name for one in prompts_of(tiny, documents, 2, 10, False)] == ["a", "b"]
    with pytest.raises(UserError, match="no template for chats: leave --chat out"):
        prompts_of(tiny, documents, 2, 10, True)


# ---------------------------------------- pairs


def test_pairs_by_hand():
    base, other = [True] * 6 + [False] * 2, [True] * 4 + [False] * 2 + [True, False]
    got = paired_shares(base, other, range(8), 0)
    assert (got["num_lost"], got["num_gained"], got["n"]) == (2, 1, 8)
    assert got["difference"] == pytest.approx(-1 / 8)
    assert got["interval"][0] < -1 / 8 < got["interval"][1]
    assert got["mcnemar_p"] == 1.0


def test_items_of_one_context_are_no_independent_samples():
    base = [True] * 100
    other = [i >= 10 for i in range(100)]
    apart = paired_shares(base, other, range(100), 0)["interval"]
    clustered = paired_shares(base, other, [i // 10 for i in range(100)], 0)["interval"]
    assert clustered[0] < apart[0] - 0.05 and clustered[1] >= apart[1]


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 9), (12, 5), (30, 30)])
def test_mcnemar_is_that_of_statsmodels(gained, lost):
    from statsmodels.stats.contingency_tables import mcnemar

    wanted = mcnemar([[50, gained], [lost, 7]], exact=True).pvalue
    assert intervals.mcnemar(gained, lost) == pytest.approx(wanted)


@pytest.mark.parametrize(("gained", "lost", "n"), [(0, 0, 100), (3, 9, 60), (40, 2, 50)])
def test_the_paired_interval_is_as_wide_on_both_sides(gained, lost, n):
    low, high = intervals.paired_interval(gained, lost, n)
    assert -1 <= low < (gained - lost) / n < high <= 1
    assert (-high, -low) == pytest.approx(intervals.paired_interval(lost, gained, n))
    assert low < intervals.paired_lower_bound(gained, lost, n)  # 95 % on both sides, or on one
    z2 = 1.959964**2
    if not gained and not lost:
        assert high == pytest.approx(z2 / (n + z2), rel=1e-4)


# ---------------------------------------- recall


def words(text):
    return len(text.split()) + text.count("\n")


@pytest.mark.parametrize("kind", haystacks.KINDS)
@pytest.mark.parametrize("length", [300, 2000])
def test_contexts_hold_their_answers_once_and_their_length(kind, length):
    depths = [0.0, 0.5, 1.0]
    for seed in range(3):
        found = haystacks.context(kind, length, depths, words, np.random.default_rng(seed))
        assert 0.85 * length < words(found.text) <= length
        lone = kind in ("single", "tracking")
        assert [one.depth for one in found.questions] == (depths[:1] if lone else depths)
        for one in found.questions:
            for answer in one.answers:
                assert found.text.count(answer) >= 1
            if kind != "tracking":
                (answer,) = one.answers
                assert found.text.count(answer) == 1
                place = found.text.index(answer) / len(found.text)
                assert abs(place - one.depth) < 0.2
                assert answer not in one.text


def test_chains_lead_to_their_value_and_to_no_other():
    rng = np.random.default_rng(0)
    found = haystacks.context("tracking", 400, [0.25], words, rng)
    (one,) = found.questions
    values = {}
    for line in found.text.split("\n"):
        if line.startswith("Let "):
            name, _, source = line[4:-1].partition(" be ")
            source = source.removeprefix("the same as ")
            values[name] = values.get(source, source)  # in the order in which they stand there
    asked_for = next(value for value in values.values() if value in one.text)
    assert {name for name, value in values.items() if value == asked_for} == set(one.answers)
    assert len(one.answers) == haystacks.NUM_HOPS + 1
    assert set(values) - set(one.answers) == set(one.wrong) and one.wrong


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("It is 123456.", True),
        ("**123,456**", True),
        ("1234567", False),
        ("12345 6", False),
        ("", False),
    ],
)
def test_an_answer_is_a_number_of_its_own(text, right):
    one = Asked("single", 10, 0.0, 0, [1], ("123456",))
    assert one.right(SimpleNamespace(text=text)) is right


def test_all_names_are_wanted_and_no_wrong_one():
    one = Asked("tracking", 10, 0.0, 0, [1], ("KOR", "MUN"), ("TAV",))
    assert one.right(SimpleNamespace(text="KOR, MUN")) and not one.right(
        SimpleNamespace(text="KOR")
    )
    assert not one.right(SimpleNamespace(text="KOR, MUN and TAV"))
    assert one.right(SimpleNamespace(text="MUN and KOR, but not TAVI"))


@pytest.mark.parametrize("kind", trained.KINDS)
def test_items_in_the_words_of_training(tiny, kind):
    pieces, rng = pieces_of(tiny), np.random.default_rng(1)
    filler = tiny.tokenizer.encode("Some words that say nothing. " * 300)[:1000]
    found = trained.context(kind, 1000, [0.0, 0.5, 1.0], pieces, filler, rng)
    assert len(found.items) == (1 if kind == "single" else 3)
    for depth, item in found.items:
        assert 0.9 * 1000 < len(item.prompt_ids) + len(item.answer_ids) <= 1000
        text, answer = (tiny.tokenizer.decode(x) for x in (item.prompt_ids, item.answer_ids))
        assert text.count(answer.strip()) == 1 and len(answer.strip()) == 5
        if kind == "multikey":
            assert abs(text.index(answer.strip()) / len(text) - depth) < 0.15
    shared = [item.prompt_ids[:600] for _, item in found.items]
    assert all(ids == shared[0] for ids in shared)


def test_one_needle_with_a_name(tiny):
    """Of a depth alone, in a short text."""
    filler = tiny.tokenizer.encode("Some words that say nothing. " * 100)
    rng = np.random.default_rng(1)
    found = trained.context("multikey", 128, [0.5], pieces_of(tiny), filler, rng)
    ((_, item),) = found.items
    assert len(item.prompt_ids) + len(item.answer_ids) <= 128


def test_an_interruption_is_one_sentence(monkeypatch, capsys, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "evaluate", interrupted)
    assert main(["--parts", "recall", "--out", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "outweigh: interrupted, nothing was written\n"


def options(**replaced):
    given = {"seed": 0, "kinds": None, "num_recall": 7, "lengths": [256], "depths": [0.0, 0.5, 1.0]}
    return SimpleNamespace(**(given | replaced))


def test_the_grid_is_asked_in_turn_and_each_kind_has_its_number(tiny):
    items = list(asked(tiny, "text", options(lengths=[700, 800]), []))
    kinds = [item.kind for item in items]
    assert {kind: kinds.count(kind) for kind in haystacks.KINDS} == dict.fromkeys(
        haystacks.KINDS, 7
    )
    many = [item for item in items if item.kind == "multikey"]
    assert [(one.length, one.depth) for one in many[:6]] == [
        (700, 0.0), (700, 0.5), (700, 1.0), (800, 0.0), (800, 0.5), (800, 1.0),
    ]  # fmt: skip
    assert [one.context for one in many] == [many[0].context + i // 3 for i in range(7)]
    assert all(len(item.prompt_ids) < item.length for item in items)
    again = list(asked(tiny, "text", options(lengths=[700, 800]), []))
    assert again == items
    with pytest.raises(UserError, match="no kind 'tracking' of recall in the style trained"):
        list(asked(tiny, "trained", options(kinds=["tracking"]), []))
    with pytest.raises(UserError, match="tiny has no template for chats: choose --style text"):
        list(asked(tiny, "chat", options(lengths=[700]), []))


def test_questions_of_a_context_come_in_turns():
    items = [Asked("lines", 9, d, c, [1], ()) for c in range(3) for d in (0.0, 1.0)]
    got = [(item.context, item.depth) for item in in_turns(items, 2)]
    assert got == [(0, 0.0), (1, 0.0), (0, 1.0), (1, 1.0), (2, 0.0), (2, 1.0)]


def test_what_leaves_no_room_is_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(UserError, match="8 tokens has no room.*--lengths"):
        haystacks.context("single", 8, [0.0], words, rng)
    with pytest.raises(UserError, match="9 tokens holds 1 lines of .*needs 2: raise --lengths"):
        haystacks.context("lines", 9, [0.0], words, rng)


@pytest.mark.parametrize("style", ["trained", "text"])
def test_lengths_that_leave_no_room_are_refused_by_a_number_that_is_above_0(tiny, style):
    with pytest.raises(UserError, match="raise") as refused:
        list(asked(tiny, style, options(lengths=[4]), []))
    numbers = [int(word) for word in re.findall(r"-?\d+", str(refused.value))]
    assert 4 in numbers and min(numbers) > 0


# ---------------------------------------- tasks


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 and then 1,234.50 in all", "1234.50"),
        ("#### -7", "-7"),
        ("it costs $18.", "18"),
        ("none", None),
    ],
)
def test_the_last_number(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


def test_a_row_of_gsm8k_is_asked_with_four_of_our_own_solved():
    row = TASKS["gsm8k"].row("How many?", "3 + 4 = <<3+4=7>>7\n#### 7")
    assert row.answer == "7" and row.text.endswith("Question: How many?\nAnswer:")
    assert row.text.count("####") == 4 and "####" not in row.message
    right = TASKS["gsm8k"].right
    assert right("3 + 4 = 7.0", "7") and not right("8", "7") and not right("", "7")
    with pytest.raises(UserError, match="does not end with ####"):
        TASKS["gsm8k"].row("a", "b")


def test_our_own_solutions_are_right():
    from evals.quality.tasks import _SHOTS

    for _, solution in _SHOTS:
        for left, right in (part.split("=") for part in _equations(solution)):
            assert eval(left) == Decimal(right.strip()), solution
        assert last_number(solution.partition("####")[0]) is not None


def _equations(text):
    import re

    return re.findall(r"\d+ [*/+-] \d+(?: [*/+-] \d+)? = \d+", text)


@pytest.mark.parametrize("text", ["gsm8k", "gsm8k=", "gsm9k=a.json", "=a"])
def test_a_task_is_a_name_and_a_source(text):
    with pytest.raises(UserError, match="--task takes NAME=SOURCE.*gsm8k, contains"):
        task_of(text, TASKS)


def test_the_documented_plugin_offers_its_task(tmp_path):
    lines = tasks_module.__doc__.split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("    from core"))
    end = next(i for i, line in enumerate(lines) if "register(" in line and "yes_no" in line)
    file = tmp_path / "yes_no.py"
    file.write_text("\n".join(line[4:] for line in lines[start : end + 1]))
    known = known_tasks([str(file)])
    assert list(known) == [*TASKS, "yes_no"]
    task = known["yes_no"]
    assert task.row("Is it?", "no").text == "Question: Is it?\nAnswer:"
    assert task.right(" No, it is not.", "no") and task.stop == ("\n",)


@pytest.mark.parametrize(
    "body", ['register("gsm8k", TASKS["gsm8k"])', 'register("own", "a.module:Task")']
)
def test_what_is_no_task_or_taken_names_its_plugin(tmp_path, body):
    file = tmp_path / "wrong.py"
    head = "from evals.quality.tasks import TASKS\ndef outweigh_register_eval(register):\n    "
    file.write_text(head + body)
    with pytest.raises(RunError, match="wrong.py failed in outweigh_register_eval.*no Task"):
        known_tasks([str(file)])


def test_rows_have_their_fields(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"q": "one", "a": 1}\n{"q": "two", "a": 2.5}\nbroken')
    read = lambda limit, *fields: read_rows(  # noqa: E731
        str(file), Choice(limit=limit), fields, ("--question-field", "--answer-field")
    )
    assert read(2, "q", "a") == [("one", "1"), ("two", "2.5")]  # a line is read when it is wanted
    with pytest.raises(UserError, match="no string in 'x': choose --answer-field from q, a"):
        read(1, "q", "x")
    with pytest.raises(UserError, match="line 3 of .* is no JSON"):
        read(3, "q", "a")
    for source in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(UserError, match="has no rows: give one of .jsonl"):
            read_rows(str(source), Choice(), ("q",), ("--question-field",))


# ---------------------------------------- verdicts


@pytest.mark.parametrize(
    ("metric", "measured", "interval", "verdict"),
    [
        ("rep4", 0.0, (-0.01, 0.01), "pass"),
        ("rep4", -0.3, (-0.4, -0.2), "pass"),
        ("rep4", 0.02, (0.0, 0.04), "not shown"),
        ("rep4", 0.05, (0.03, 0.07), "fail"),
        ("recall", 0.0, (-0.019, 0.019), "pass"),
        ("recall", -0.1, (-0.15, -0.05), "fail"),
        ("recall", 0.1, (0.05, 0.15), "pass"),
        ("tasks gsm8k", -0.02, (-0.05, 0.01), "not shown"),
        ("length", 0.5, (0.4, 0.6), "fail"),
        ("length", -0.5, (-0.6, -0.4), "fail"),
        ("distinct3", 0.08, (0.05, 0.11), "fail"),
        ("distinct3", 0.0, (-0.01, 0.01), "pass"),
    ],
)
def test_what_is_written_is_judged_by_its_interval(metric, measured, interval, verdict):
    limits = limits_of(PagedInt8, "float32")
    (got,) = judge_written({metric: (measured, interval)}, {"items": 500}, limits, "here")
    assert got.verdict == verdict and got.why.startswith("here")


@pytest.mark.parametrize(
    ("level", "mean_kl", "verdict"),
    [(2e-6, 0.0, "pass"), (3e-5, 2e-4, "pass"), (2e-4, 2e-4, "fail"), (2e-4, 0.0, "fail")],
)
def test_chunks_may_differ_by_a_share_of_what_the_offer_costs(level, mean_kl, verdict):
    limits = limits_of(PagedInt8, "float32")
    parts = [np.full(256, level)] * 8
    assert judge_stored(parts, mean_kl, limits, 0).verdict == verdict
    few = judge_stored(parts[:7], mean_kl, limits, 0)
    assert few.verdict == "not shown" and "7 documents of the 8" in few.why


def test_too_few_samples_show_nothing():
    limits = limits_of(Paged, "float32")
    (got,) = judge_written({"rep4": (0.0, (0.0, 0.0))}, {"prompts": 23}, limits, "")
    assert got.verdict == "not shown" and "23 prompts of the 24" in got.why


def test_an_offer_may_name_limits_of_what_it_writes():
    class Own(PagedInt8):
        quality = {"rep4": 0.05, "mean_kl": 0.02}

    limits = limits_of(Own, "bfloat16")
    assert limits.written["rep4"] == 0.05 and limits.values["mean_kl"] == 0.02
    assert limits.written["recall"] == limits_of(Paged, "bfloat16").written["recall"]


# ---------------------------------------- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("written")
    rng = np.random.default_rng(0)
    rows = ["".join(map(chr, rng.integers(97, 123, 200))) for _ in range(8)]
    (path / "texts.json").write_text(json.dumps(rows))
    sums = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(4)]
    (path / "sums.jsonl").write_text("\n".join(map(json.dumps, sums)))
    lines = [{"prompt": f"say {i}", "answer": str(i)} for i in range(3)]
    (path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture
def run(folder, capsys):
    def go(*given):
        own = ["--model", "random:tiny", "--device", "cpu", "--data", str(folder / "texts.json")]
        try:
            code = main([*own, *map(str, given)])
        except SystemExit as end:  # of the parser
            code = end.code
        out, err = capsys.readouterr()
        return code, out, err

    return go


ALL = (
    "--parts text,generation,recall,tasks --tokens 64 --num-prompts 8 --prompt-tokens 16 "
    "--new-tokens 24 --style text --lengths 1000 --num-recall 2 --task-tokens 1200 "
    "--answer-tokens 8"
).split()


@pytest.fixture(scope="module")
def whole(folder):
    """All parts of paged beside paged, reported."""
    tasks = ["--task", f"gsm8k={folder}/sums.jsonl", "--task", f"contains={folder}/lines.jsonl"]
    where = ["--model", "random:tiny", "--device", "cpu", "--data", str(folder / "texts.json")]
    out = folder / "out"
    code = main([*where, "--kv", "paged", *ALL, *tasks, "--out", str(out)])
    return code, json.loads((out / "result.json").read_text()), out


def test_paged_beside_paged_writes_the_same(whole):
    code, record, _ = whole
    assert code == EXIT_CODES["not shown"]  # of so few
    for part in record["generation"]["temperatures"]:
        assert [row["parting"] for row in part["texts"]] == [None] * 8
        assert part["rep4"]["difference"] == 0 and part["survival"][-1]["share"] == 1
    for row in record["recall"]["kinds"].values():
        assert row["num_lost"] == row["num_gained"] == 0 and row["n"] == 2
    assert list(record["tasks"]["tasks"]) == ["gsm8k sums.jsonl", "contains lines.jsonl"]
    metrics = [finding["metric"] for finding in record["findings"]]
    assert metrics[-3:] == ["recall", "tasks gsm8k sums.jsonl", "tasks contains lines.jsonl"]
    assert {"stored", "rep4", "loops", "distinct3"} <= set(metrics)
    assert "fail" not in {finding["verdict"] for finding in record["findings"]}


def test_who_finds_nothing_loses_nothing_and_shows_nothing(whole):
    findings = {finding["metric"]: finding for finding in whole[1]["findings"]}
    assert "the reference finds too little" in findings["recall"]["why"]
    assert "too little to lose any" in findings["tasks gsm8k sums.jsonl"]["why"]


def test_the_report_stands_alone(whole):
    page = (whole[2] / "report.html").read_text()
    assert page.count("<svg") == 4 + len(haystacks.KINDS) and page.endswith("</body></html>\n")
    for outside in ("<script", "<link", "<img", "src=", "@import"):
        assert outside not in page
    assert "KL by position" in page and "How long texts stay the same" in page
    assert "Worst: paged, teacher-forced" in page and "not shown: neither is shown of paged" in page
    assert not list(whole[2].glob("*.partial"))


def test_the_report_in_markdown(whole):
    text = (whole[2] / "result.md").read_text()
    assert text.startswith("# paged beside paged on random:tiny\n\n**not shown: ")
    assert "## Findings" in text and "| rep4 |" in text and "| of a text |" in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")


def test_what_a_text_holds_is_no_markup(whole):
    from evals.quality.report import page

    record = json.loads(json.dumps(whole[1]))
    record["comparisons"]["paged"]["worst"][0]["reference"] = "<b>&"
    assert "&lt;b&gt;&amp;" in page(record) and "<b>&" not in page(record)


def test_a_report_without_matplotlib_is_refused_at_once(run, monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run("--out", tmp_path / "x")
    assert code == 2 and "pip install 'outweigh[quality]'" in err and out == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--parts text,recal", "no part 'recal': choose from text,generation,recall,tasks"),
        ("--parts text,tasks", "give --task gsm8k=FILE"),
        ("--parts text,tasks --tokens 9 --task sums=x.jsonl", "--task takes NAME=SOURCE"),
        ("--parts recall --depths 1.5", "'1.5' is not a number from 0 to 1"),
        ("--parts generation --temperatures -1", "'-1' is not a number from 0"),
        ("--parts generation --new-tokens 9999", "lower --prompt-tokens plus --new-tokens to 4096"),
        ("--parts generation --prompt-tokens 9999", "lower --prompt-tokens plus --new-tokens to"),
        ("--parts text,recall --tokens 9 --lengths 9999", "lower --lengths to 4096"),
        ("--parts text,recall --tokens 9 --kinds double", "no kind 'double' of recall"),
        ("--parts generation --chat", "no template for chats: leave --chat out"),
        ("--out /proc/none", "/proc/none cannot be made"),
    ],
)
def test_what_cannot_be_carried_out_is_one_sentence(run, given, message):
    code, out, err = run(*given.split())
    assert code == 2 and message in err and err.count("\n") == 1 and out == ""


# An option of some parts, beside the parts that it is not of.
BESIDE_OTHERS = {
    "--data": "x.json", "--field": "body", "--limit": "3", "--split": "test", "--tokens": "9",
    "--rows": "9", "--noise-floor": "", "--batch": "2", "--preemption": "swap",
    "--num-prompts": "9", "--prompt-tokens": "9", "--new-tokens": "9", "--temperatures": "0",
    "--ignore-eos": "", "--chat": "", "--no-sharing": "", "--style": "text", "--kinds": "lines",
    "--num-recall": "9", "--lengths": "999", "--depths": "0.5", "--task": "gsm8k=x.json",
    "--question-field": "q", "--answer-field": "a", "--task-limit": "9", "--task-tokens": "9",
    "--answer-tokens": "9",
}  # fmt: skip


def test_options_of_parts_are_all_in_the_table():
    assert {owned.option for owned in all_options().owned.values()} == set(BESIDE_OTHERS)


@pytest.mark.parametrize("option", BESIDE_OTHERS)
def test_an_option_beside_parts_that_do_not_take_it_is_refused(option, capsys):
    owners = {owned.option: owned.parts for owned in all_options().owned.values()}[option]
    given = [option, *BESIDE_OTHERS[option].split()]
    for part in set(PARTS) - set(owners):
        assert main(["--parts", part, *given]) == 2
        said = capsys.readouterr().err
        assert f"{option} is of {' or '.join(owners)}, and --parts is {part}: drop" in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--field body --data a.txt b.txt", "--field chooses of a row, and a.txt, b.txt holds"),
        ("--field body", "--field is of documents and there are none: name some with --data"),
        ("--split train --data a.jsonl ./b", "--split is of a data set of the hub, and a.jsonl"),
        ("--parts tasks --task gsm8k=a.json --split train", "and a.json is none: drop --split"),
        ("--parts recall --style text --data a.txt", "--data is the filler of recall in the style"),
        ("--parts recall --model DIR --data a.txt", "drop --data, or choose --style trained"),
        ("--parts generation --kv paged paged_int8 --data a.txt", "run --parts generation for one"),
        ("--kv paged paged --data a.txt", "--kv names paged twice"),
        ("--kv paged:16 --data a.txt", "--kv takes NAME or NAME:FIELD=VALUE,…, not paged:16"),
        ("--kv paged paged_int8 --set kv.block_size=8 --data a.txt", "write --kv NAME:block_size"),
        ("--parts tasks --task gsm8k=nowhere.jsonl", "no file or folder nowhere.jsonl"),
    ],
)
def test_what_would_change_nothing_is_refused(given, message, capsys):
    assert main(given.split()) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "given",
    [
        "--data a.txt",
        "--data a.txt b.jsonl --field body",
        "--data org/name --split train",
        "--parts recall --data a.txt",
        "--parts tasks --task gsm8k=org/name --split train",
        "--parts recall --style text --kinds lines",
        "--data a.txt --kv paged paged:block_size=8 paged_int8",
    ],
)
def test_what_changes_something_is_taken(given):
    args = parse(given.split(), None)
    assert args.seed == 0 and args.parts and args.kv
