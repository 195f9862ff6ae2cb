"""Runs of a study: which, in what order, and where they are kept.

A block is a few arms under one load. It is measured round by round, every arm once, forwards and
backwards in turn (ABBA), the first of them a second time as a control. Each run is a file of its
own as soon as it has ended, so that a study that is killed loses the run in flight and no more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from core.errors import RunError, UserError, explained
from evals import records
from evals.speed.arms import in_turn
from evals.speed.paired import Question

if TYPE_CHECKING:
    from evals.speed.ladder.loads import Load
    from evals.speed.ladder.rungs import Arm
    from evals.speed.ladder.runner import Run, Runner

AGAIN = " again"
PLAN = "study.json"


class Pair(NamedTuple):
    """A step: the arm `after` is compared with the arm `before`."""

    name: str
    before: str
    after: str


class Block(NamedTuple):
    """`arms` by name; the first and its second run, the control, come with it."""

    name: str
    load: Load
    arms: dict[str, Arm]
    pairs: list[Pair]

    @property
    def control(self) -> Pair:
        base = next(iter(self.arms))
        return Pair("control", base, base + AGAIN)


def block(name: str, load: Load, arms: list[Arm], pairs: list[Pair]) -> Block:
    """A block, its control put behind its first arm."""
    first, *rest = arms
    named = {arm.name: arm for arm in (first, first._replace(name=first.name + AGAIN), *rest)}
    return Block(name, load, named, pairs)


class Store:
    """The runs in a folder. `study` is what makes two studies one: a folder holds runs of one."""

    def __init__(self, folder: Path, study: Mapping[str, Any], *, resume: bool) -> None:
        self._folder = folder / "runs"
        found = study_in(folder)
        study = json.loads(json.dumps(study, default=str))
        if found is not None and not resume:
            raise UserError(f"{folder} holds runs already: give --resume, or another --out")
        if found is not None and found != study:
            names = _differing(found, study)
            raise UserError(
                f"the runs in {folder} are of another study, which differs in "
                f"{', '.join(sorted(names))}: give the same options, or another --out"
            )
        if found is None and (folder / "result.json").exists():
            raise UserError(f"{folder} holds a result.json without its runs: name another --out")
        if found is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write(PLAN, study)

    def _path(self, block_name: str, arm: str, i: int) -> str:
        return f"{block_name}--{i:03d}--{arm}.json".replace(" ", "_").replace("/", "_")

    def get(self, block_name: str, arm: str, i: int) -> Run | None:
        run: Run | None = self._read(self._path(block_name, arm, i))
        return run

    def put(self, block_name: str, arm: str, i: int, run: Mapping[str, Any]) -> None:
        self._write(self._path(block_name, arm, i), run)

    def reports(self, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """What engines say of themselves, by arm: those of now, and those of before a resume."""
        for arm, report in found.items():
            self._write(f"engine-{arm}.json".replace(" ", "_").replace("/", "_"), report)
        files = sorted(self._folder.glob("engine-*.json"))
        names = [path.stem.removeprefix("engine-") for path in files]
        return {name: self._read(path.name) for name, path in zip(names, files, strict=True)}

    def _read(self, name: str) -> Any:
        path = self._folder / name
        return read(path) if path.is_file() else None

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        records.write(self._folder / name, dict(content))


def read(path: Path) -> dict[str, Any]:
    """What `records.write` has written. Raises UserError where that is not what it is."""
    advice = "remove it, and --resume measures it again"
    with explained(f"{path} is damaged", advice):
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not (isinstance(found, dict) and found):
            raise ValueError("it holds no object")
    return found


def study_in(folder: Path) -> dict[str, Any] | None:
    """What makes the study whose runs a folder holds; None where it holds none."""
    path = folder / "runs" / PLAN
    if path.is_file():
        return read(path)
    if path.parent.is_dir() and any(path.parent.iterdir()):
        raise UserError(f"{path.parent} holds runs of an unknown study: name another --out")
    return None


def _differing(found: Mapping[str, Any], study: Mapping[str, Any]) -> list[str]:
    """Names of what two studies have otherwise, those of arguments one by one."""
    names = [key for key in {**found, **study} if found.get(key) != study.get(key)]
    pair = [one.get("arguments") for one in (found, study)]
    if "arguments" in names and all(isinstance(one, dict) for one in pair):
        names.remove("arguments")
        names += [f"--{key.replace('_', '-')}" for key in _differing(*pair)]
    return names


class Runs:
    """The runs of one block: `by_arm[arm][round]`. `lost` says why an arm has none, or no more."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.by_arm: dict[str, dict[int, Run]] = {name: {} for name in block.arms}
        self.lost: dict[str, str] = {}

    def values(self, arm: str, figure: str) -> dict[int, float]:
        """The figure of every round in which the arm's run carries it."""
        found = {i: run["figures"].get(figure) for i, run in self.by_arm[arm].items()}
        return {i: value for i, value in found.items() if value is not None}


class Timetable(NamedTuple):
    """How often each arm runs, under which seeds, and who is told of each run (block, arm, round)
    before it begins."""

    num_rounds: int
    seed: int
    question: Question
    told: Callable[[str, str, int], None]

    def seed_of(self, i: int) -> int:
        """One trace for repeatability, one of its own for each round for generality."""
        return self.seed + (i if self.question == "generality" else 0)


def stored(block: Block, store: Store, timetable: Timetable) -> Runs:
    """What has been measured of a block so far."""
    runs = Runs(block)
    for i, name in _places(block, timetable):
        if (run := store.get(block.name, name, i)) is not None:
            runs.by_arm[name][i] = run
    return runs


def measure(block: Block, runner: Runner, store: Store, timetable: Timetable) -> Runs:
    """Every run of a block, those that are stored already from there."""
    runs = stored(block, store, timetable)
    runner.retain(block.arms.values())
    for i, name in _places(block, timetable):
        timetable.told(block.name, name, i)
        if i in runs.by_arm[name] or name in runs.lost:
            continue
        arm, seed = block.arms[name], timetable.seed_of(i)
        try:
            run = runner.measure(arm, block.load, seed=seed, label=f"{block.name} {i}")
        except (UserError, RunError) as error:
            runs.lost[name] = str(error)
            continue
        store.put(block.name, name, i, run)
        runs.by_arm[name][i] = json.loads(json.dumps(run))
    return runs


def _places(block: Block, timetable: Timetable) -> Iterator[tuple[int, str]]:
    for i in range(timetable.num_rounds):
        for name in in_turn(block.arms, i):
            yield i, name
