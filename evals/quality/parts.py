"""From arguments to the record: the parts that were asked for, in turn, and a verdict."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from core.config import versions
from core.errors import UserError
from evals import records
from evals.quality.arms import Arms
from evals.quality.data import Choice, read_documents
from evals.quality.generation import generation
from evals.quality.measure import measure
from evals.quality.recall import recall
from evals.quality.tasks import known_tasks, task_of, tasks
from evals.quality.verdicts import overall

if TYPE_CHECKING:
    from core.show import Progress
    from evals.tiny.documents import Document

PARTS = ("text", "generation", "recall", "tasks")
FROM_DOCUMENTS = ("text", "generation")


def evaluate(
    args: argparse.Namespace,
    settings: Mapping[str, Any],
    of_base: Mapping[str, Any],
    progress: Progress,
) -> dict[str, Any]:
    """The record of a run: arguments, machine, what each part found, findings, verdict.

    `settings` are those of the offer in question, whose parts beside kv hold for the reference
    too. Raises UserError and RunError.
    """
    arms = Arms.of(args, settings, of_base)
    documents = _documents(args)
    if "tasks" in args.parts and not args.task:
        raise UserError("tasks are asked for and none is named: give --task gsm8k=FILE")
    if args.task:
        known = known_tasks(args.plugins)
        for task in args.task:
            task_of(task, known)
    record: dict[str, Any] = {
        "arguments": vars(args),
        "machine": records.machine(),
        "versions": versions(("datasets", "numpy")),
        "kv": arms.label,
        "against": args.against,
    }
    findings = []
    for part in args.parts:
        if part == "text":
            found, judged = measure(arms, documents, progress)
            record |= found
        else:
            found, judged = _written(part, arms, documents, progress)
            record[part] = found
        findings += judged
    return record | {
        "verdict": overall(findings),
        "findings": [finding._asdict() for finding in findings],
    }


def _documents(args: argparse.Namespace) -> list[Document]:
    if args.data:
        return read_documents(args.data, Choice(args.field, args.split, args.limit))
    if wanting := [part for part in args.parts if part in FROM_DOCUMENTS]:
        raise UserError(f"the following arguments are required: --data, for the part {wanting[0]}")
    return []


def _written(part: str, arms: Arms, documents: list[Document], progress: Progress) -> Any:
    if part == "generation":
        return generation(arms, documents, progress)
    if part == "recall":
        return recall(arms, documents, progress)
    return tasks(arms, progress)
