"""Questions with one right answer, from rows that the user names, answered greedily by both arms.

    gsm8k     word problems; the last number of the answer counts. Rows of question and answer, as
              in the published files: the solution, then `#### 18`. A model without a template for
              chats sees four problems solved first, which are our own.
    contains  the prompt of a row as it stands; the answer has to stand in what is written. So rows
              of LongEval lines are asked.

A plugin offers others: installed, or named by -p, it is found as every plugin of outweigh is.

    # yes_no.py    python -m evals.quality -p yes_no.py --parts tasks --task yes_no=rows.jsonl
    from core import hookimpl
    from evals.quality.tasks import Row, Task


    def row(question, answer):
        return Row(f"{question} Answer yes or no.", f"Question: {question}\\nAnswer:", answer)


    def right(written, answer):
        return written.strip().lower().startswith(answer)


    @hookimpl
    def outweigh_register_eval(register):
        register("yes_no", Task("question", "answer", row, right, stop=("\\n",)))

What was made for lm-evaluation-harness goes through evals.quality.lm_eval_model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence as Seq
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from core.errors import UserError
from core.registry import Registry
from core.sampling import SamplingParams
from evals.quality.arms import Arms, both, written
from evals.quality.data import Choice, read_rows
from evals.quality.pairs import paired_shares
from evals.quality.recall import NUM_WORST
from evals.quality.verdicts import Finding, judge_written

if TYPE_CHECKING:
    from core.engine import Engine, RequestOutput
    from core.show import Progress

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_SHOWN_CHARS = 700
_SHOTS = (
    (
        "A baker fills 6 trays with 8 rolls each and sells 29 rolls. How many rolls are left?",
        "The baker makes 6 * 8 = 48 rolls. After the sale 48 - 29 = 19 rolls are left.\n#### 19",
    ),
    (
        "Lena reads 12 pages on Monday and twice as many on Tuesday. Her book has 90 pages. How "
        "many pages has she still to read?",
        "On Tuesday she reads 2 * 12 = 24 pages. Together that is 12 + 24 = 36 pages. So 90 - 36 = "
        "54 pages are left.\n#### 54",
    ),
    (
        "Three friends share a bill of $84 and each adds a tip of $5. How much does each pay?",
        "A third of the bill is 84 / 3 = 28 dollars. With the tip each pays 28 + 5 = 33 dollars.\n"
        "#### 33",
    ),
    (
        "A tank of 200 litres is a quarter full. A pump adds 15 litres a minute. After how many "
        "minutes is it full?",
        "There are 200 / 4 = 50 litres in it. It lacks 200 - 50 = 150 litres, which take 150 / 15 "
        "= 10 minutes.\n#### 10",
    ),
)


class Row(NamedTuple):
    """A question as the model sees it, in a chat and without one, and its answer."""

    message: str
    text: str
    answer: str


class Task(NamedTuple):
    """The fields that a row has by default, what is asked of it, and whether an output is right."""

    question_field: str
    answer_field: str
    row: Callable[[str, str], Row]
    right: Callable[[str, str], bool]
    stop: tuple[str, ...]


def last_number(text: str) -> Decimal | None:
    """The last number in `text`, without the commas between its digits."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").rstrip(".")) if found else None


def _gsm8k(question: str, answer: str) -> Row:
    message = f"{question}\nThink step by step, and end with the answer as a number."
    shots = "".join(f"Question: {q}\nAnswer: {a}\n\n" for q, a in _SHOTS)
    _, mark, number = answer.rpartition("####")
    if not mark or last_number(number) is None:
        raise UserError(
            f"the answer {answer[-40:]!r} does not end with #### and a number: name rows of GSM8K, "
            "or another task"
        )
    return Row(message, f"{shots}Question: {question}\nAnswer:", number.strip())


def _contains(question: str, answer: str) -> Row:
    return Row(question, question, answer)


TASKS: Mapping[str, Task] = {
    "gsm8k": Task(
        "question", "answer", _gsm8k,
        lambda written, answer: last_number(written) == last_number(answer),
        ("\nQuestion:",),
    ),
    "contains": Task("prompt", "answer", _contains, lambda written, answer: answer in written, ()),
}  # fmt: skip


def known_tasks(plugins: Seq[str]) -> dict[str, Task]:
    """TASKS, and those that installed plugins and `plugins` offer.

    Raises RunError, with the plugin's name, for what is no Task and for a name that is taken.
    """
    found = dict(TASKS)

    def register(name: str, task: Task) -> None:
        if name in found or not isinstance(task, Task):
            raise TypeError(f"task {name!r} is offered twice, or is no Task of evals.quality.tasks")
        found[name] = task

    Registry(plugins).hooks.call("outweigh_register_eval", register)
    return found


def task_of(text: str, known: Mapping[str, Task]) -> tuple[str, str]:
    """NAME=SOURCE of the command line. Raises UserError for a name that is no task."""
    name, mark, source = text.partition("=")
    if not mark or not source or name not in known:
        raise UserError(f"--task takes NAME=SOURCE, not {text}: NAME is one of {', '.join(known)}")
    return name, source


def read_task(task: Task, source: str, args: Any) -> list[Row]:
    """The first `args.task_limit` rows of a source."""
    fields = args.question_field or task.question_field, args.answer_field or task.answer_field
    choice = Choice(split=args.split, limit=args.task_limit)
    rows = read_rows(source, choice, fields, ("--question-field", "--answer-field"))
    return [task.row(*row) for row in rows]


def tasks(arms: Arms, progress: Progress) -> tuple[dict[str, Any], list[Finding]]:
    """The record of the part, by task, and a finding for each."""
    args = arms.args
    known = known_tasks(args.plugins)
    sources = [task_of(text, known) for text in args.task]
    brief = {f"{name} {Path(source).name}": (name, source) for name, source in sources}
    if len(brief) < len(set(sources)):  # two files of one name
        brief = {f"{name} {source}": (name, source) for name, source in sources}
    rows = {label: read_task(known[name], source, args) for label, (name, source) in brief.items()}

    def make(engine: Engine) -> dict[str, list[tuple[Row, list[int]]]]:
        return {name: _prompts(engine, its, args, name) for name, its in rows.items()}

    def write(engine: Engine, made: Any, arm: str) -> dict[str, list[RequestOutput]]:
        return {
            name: written(
                engine,
                [ids for _, ids in its],
                [_params(engine, known[name.partition(" ")[0]], args)] * len(its),
                progress,
                f"{arm}, {name}",
            )
            for name, its in made.items()
        }

    asked, made = both(arms, make, write, progress, ("--task-tokens", args.task_tokens))
    tables, findings = {}, []
    for name, its in asked.items():
        task = known[name.partition(" ")[0]]
        table = _tabled(task, [row for row, _ in its], made.base[name], made.other[name], args.seed)
        tables[name] = {**table, "num_left_out": len(rows[name]) - len(its)}
        findings.append(judge_task(name, table, made.limits))
    return {"engines": made.reports, "tasks": tables}, findings


def _prompts(engine: Engine, rows: Seq[Row], args: Any, name: str) -> list[tuple[Row, list[int]]]:
    """Rows whose prompt leaves room for an answer. Raises UserError where none does."""
    found = []
    for row in rows:
        ids = engine.tokenizer.chat(row.message)
        ids = engine.tokenizer.encode(row.text) if ids is None else ids
        if len(ids) + args.answer_tokens <= args.task_tokens:
            found.append((row, ids))
    if not found:
        what = f"no prompt of {name} leaves {args.answer_tokens} of {args.task_tokens} tokens"
        raise UserError(f"{what}: raise --task-tokens, or lower --answer-tokens")
    return found


def _params(engine: Engine, task: Task, args: Any) -> SamplingParams:
    chat = engine.tokenizer.chat("a") is not None
    return SamplingParams(max_tokens=args.answer_tokens, stop=() if chat else task.stop)


def _tabled(
    task: Task, rows: Seq[Row], base: Seq[RequestOutput], other: Seq[RequestOutput], seed: int
) -> dict[str, Any]:
    rights = [
        [task.right(output.text, row.answer) for output, row in zip(outputs, rows, strict=True)]
        for outputs in (base, other)
    ]
    shares = paired_shares(rights[0], rights[1], range(len(rows)), seed)
    lost = [i for i, (a, b) in enumerate(zip(*rights, strict=True)) if a and not b]
    worst = [
        {
            "about": f"{rows[i].message[:_SHOWN_CHARS]}\nwanted: {rows[i].answer}",
            "reference": base[i].text[:_SHOWN_CHARS],
            "other": other[i].text[:_SHOWN_CHARS],
        }
        for i in lost[:NUM_WORST]
    ]
    items = [{"reference": a, "other": b} for a, b in zip(*rights, strict=True)]
    return {**shares, "items": items, "worst": worst}


def judge_task(name: str, table: Mapping[str, Any], limits: Any) -> Finding:
    """Not shown where the reference solves so little that nothing can be lost."""
    metric, least = f"tasks {name}", limits.evidence["min_reference"]
    if table["reference_interval"][0] < least:
        why = f"the reference solves {table['reference']:.1%}, too little to lose any"
        return Finding(metric, table["difference"], table["interval"], "", "not shown", why)
    found = {metric: (table["difference"], table["interval"])}
    where = f"McNemar's p {table['mcnemar_p']:.2g}"
    return judge_written(found, {"items": table["n"]}, limits, where)[0]
