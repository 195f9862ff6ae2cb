"""A bar of the runs of a study and the time that is left; nothing off a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import TextIO

from core.show import console


class Bar:
    """To be entered. `run` is told of each run before it begins, `stage` of what engines do
    while they are built."""

    def __init__(self, file: TextIO) -> None:
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            console=console(file),
            transient=True,
            disable=not file.isatty(),
        )
        self._task = self._bar.add_task("ladder", total=None)
        self._num_told = 0

    def begin(self, num_runs: int) -> None:
        self._bar.update(self._task, total=num_runs)

    def run(self, block: str, arm: str, i: int) -> None:
        what = f"{block}, round {i + 1}: {arm}"
        self._bar.update(self._task, completed=self._num_told, description=what)
        self._num_told += 1

    def stage(self, stage: str, done: int, total: int) -> None:
        self._bar.update(self._task, description=f"{stage} {done}/{total}")

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._bar.stop()
