"""A ladder from its capacity to its leave-one-outs: the order of the blocks, and one document.

Capacity comes first, in a closed loop, because it fixes the rates: shares of what the *baseline*
serves, the same for every arm, and an arm that cannot keep up is refused. Rungs that matter where
requests compete are measured again, each beside the arm below it, at 0.85 of what that one serves,
in a burst, and in a burst with a KV pool of half of what the burst would like. At last the rungs of
the largest effect are taken out of the whole ladder one at a time, and put on the baseline alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from typing import Any, NamedTuple

from core.errors import RunError, UserError
from evals.speed.ladder import findings
from evals.speed.ladder.charted import charted
from evals.speed.ladder.loads import Load
from evals.speed.ladder.rungs import Arm, Ladder, without
from evals.speed.ladder.runner import Runner
from evals.speed.ladder.study import Block, Pair, Runs, Store, Timetable, block, measure, stored

PRESSED_SHARE = 0.85
SCARCE = 0.5  # of what the same burst holds at its peak where there is room
PRESSED = ("pressure", "burst", "scarce")
Check = Callable[[Arm, Arm], dict[str, Any]]
Measured = tuple[Runs, Mapping[str, str]]  # and who was refused, with the reason


class Plan(NamedTuple):
    """What is asked for. `common` and `device` are what `rungs.build` was given; with `ends_only`
    the baseline and the top alone are measured, without `is_pressed` nothing where requests
    compete."""

    ladder: Ladder
    shares: Seq[float]
    num_left_out: int
    common: Mapping[str, Any]
    device: str
    is_pressed: bool = True
    ends_only: bool = False

    @property
    def ends(self) -> list[Arm]:
        return [self.ladder.arms[0], self.ladder.top]

    @property
    def served(self) -> list[Arm]:
        """The arms that are measured under load."""
        if self.ends_only:
            return self.ends
        return [arm for arm in self.ladder.arms if arm.rung is None or not arm.rung.is_lone]

    @property
    def pressed(self) -> list[Arm]:
        if self.ends_only or not self.is_pressed:
            return []
        return [arm for arm in self.served if arm.rung is not None and arm.rung.is_pressed]

    @property
    def lone(self) -> list[Arm]:
        if self.ends_only:
            return []
        return [arm for arm in self.ladder.arms if arm.rung is not None and arm.rung.is_lone]

    @property
    def kept(self) -> list[str]:
        """Names of the rungs that stay, from the bottom."""
        return [arm.name for arm in self.ladder.kept[1:]]

    def expected(self) -> list[tuple[str, str, int]]:
        """Blocks: name, load, and number of arms, if nothing is refused."""
        num = len(self.served) + 1
        found = [("capacity", "closed", num)]
        found += [(f"load-{share:g}", "poisson", num) for share in self.shares]
        found += [("lone", "lone", 3)] if self.kept else []
        found += [(f"lone--{arm.name}", "lone", 3) for arm in self.lone]
        kinds = ("poisson", "burst", "burst")
        for arm in self.pressed:
            found += [(f"{p}--{arm.name}", k, 3) for p, k in zip(PRESSED, kinds, strict=True)]
        if self.leaves_out:
            num_left_out = min(self.num_left_out, len(self.kept))
            found.append(("leave-one-out", "poisson", 3 + 2 * num_left_out))
        return found

    @property
    def leaves_out(self) -> bool:
        return self.num_left_out > 0 and len(self.kept) > 1 and not self.ends_only


class Climb:
    """One study as it goes. `document` is what is known so far."""

    def __init__(self, plan: Plan, runner: Runner, store: Store, timetable: Timetable) -> None:
        self._plan, self._runner, self._store, self._timetable = plan, runner, store, timetable
        self.capacity: dict[str, float] = {}
        self.document: dict[str, Any] = {"blocks": {}, "charts": {}}

    def run(self) -> Iterator[str]:
        """The name of each phase when it is through."""
        self._measure_capacity()
        yield "capacity"
        for share in self._plan.shares:
            self._measure_load(share)
            yield f"load-{share:g}"
        self._measure_lone()
        yield "lone"
        if self._plan.pressed:
            self._measure_pressed()
            yield "pressure"
        if self._plan.leaves_out:
            self._leave_out()
            yield "leave-one-out"

    # -------- blocks

    def _block(self, made: Block, refused: Mapping[str, str]) -> Runs:
        """Measure a block and put its result into the document, what there is of it if it is
        interrupted."""
        runs = None
        try:
            runs = measure(made, self._runner, self._store, self._timetable)
        finally:
            runs = runs or stored(made, self._store, self._timetable)
            result = findings.block_result(runs, self._timetable, refused)
            self.document["blocks"][made.name] = result
        return runs

    def _steps(self, arms: Seq[Arm]) -> list[Pair]:
        if self._plan.ends_only:
            return [self._whole_ladder()]
        return [Pair(arm.name, arm.before, arm.name) for arm in arms if arm.before is not None]

    def _whole_ladder(self) -> Pair:
        base, top = self._plan.ends
        return Pair("whole ladder", base.name, top.name)

    def _measure_capacity(self) -> None:
        arms = self._plan.served
        runs = self._block(block("capacity", Load("closed"), arms, self._steps(arms)), {})
        for name in runs.by_arm:
            if values := runs.values(name, "request_throughput"):
                self.capacity[name] = statistics.median(values.values())
        self.document["capacity"] = dict(self.capacity)
        base = self._plan.ladder.arms[0].name
        if base not in self.capacity:
            raise RunError(f"the baseline could not be measured: {runs.lost[base]}")

    def _measure_load(self, share: float) -> None:
        arms, base = self._plan.served, self._plan.ladder.arms[0].name
        rate = share * self.capacity[base]
        refused = self._refused(arms, rate)
        able = [arm for arm in arms if arm.name not in refused]
        name = f"load-{share:g}"
        made = block(name, Load("poisson", rate), able, self._steps(arms))
        runs = self._block(made, refused)
        for arm, found in self.document["blocks"][name]["arms"].items():
            own = self.capacity.get(arm)
            found["utilisation"] = None if own is None else rate / own
        self._whole(name, runs)
        self.document["charts"][name] = charted(runs)

    def _refused(self, arms: Seq[Arm], rate: float) -> dict[str, str]:
        lost = self.document["blocks"]["capacity"]["refused"]
        found = {}
        for arm in arms:
            why = lost.get(arm.name) or findings.saturated(rate, self.capacity.get(arm.name))
            if why:
                found[arm.name] = why
        return found

    def _whole(self, name: str, runs: Runs) -> None:
        """The top beside the baseline, and each rung's part in it."""
        result, pair = self.document["blocks"][name], self._whole_ladder()
        found: dict[str, Any] = {}
        if not {pair.before, pair.after} & set(result["refused"]):
            for figure in findings.JUDGED[runs.block.load.kind]:
                try:
                    ratio = findings.compared(runs, pair, figure, self._timetable)
                except UserError:  # too few rounds, or requests
                    continue
                found[figure] = findings.numbers(ratio)
        result["whole"] = found
        whole = found.get(findings.TTFT)
        if whole is not None and not self._plan.ends_only:
            result["shares"] = findings.shares(result, whole, self._plan.kept)

    # -------- one request at a time

    def _measure_lone(self) -> None:
        if self._plan.kept:
            made = block("lone", Load("lone"), self._plan.ends, [self._whole_ladder()])
            self._block(made, {})
        for arm in self._plan.lone:
            arms = [self._plan.ladder.arm(arm.before), arm]
            self._block(block(f"lone--{arm.name}", Load("lone"), arms, self._steps([arm])), {})

    # -------- where requests compete

    def _measure_pressed(self) -> None:
        """Rung by rung, whose engines all three loads share; their verdicts are of all rungs
        together."""
        found: dict[str, dict[str, Measured]] = {kind: {} for kind in PRESSED}
        for arm in self._plan.pressed:
            below = self._plan.ladder.arm(arm.before)
            if below.name not in self.capacity or arm.name not in self.capacity:
                continue
            for kind in PRESSED:
                if (load := self._pressed_load(kind, below, arm)) is not None:
                    found[kind][arm.name] = self._press(kind, load, below, arm)
        for kind, of_kind in found.items():
            for name, result in findings.together(of_kind, self._timetable).items():
                self.document["blocks"][f"{kind}--{name}"] = result

    def _press(self, kind: str, load: Load, below: Arm, arm: Arm) -> Measured:
        refused = {} if load.rate is None else self._refused([arm], load.rate)
        name, steps = f"{kind}--{arm.name}", self._steps([arm])
        if refused:  # there is nothing to compare with
            return Runs(block(name, load, [below], steps)), refused
        return self._block(block(name, load, [below, arm], steps), {}), {}

    def _pressed_load(self, kind: str, below: Arm, arm: Arm) -> Load | None:
        if kind == "pressure":
            return Load("poisson", PRESSED_SHARE * self.capacity[below.name])
        if kind == "burst":
            return Load("burst")
        held = self.document["blocks"][f"burst--{arm.name}"]["arms"].get(below.name)
        if held is None:  # it was lost in the burst
            return None
        room = int(SCARCE * held["peak_held_tokens"])
        return Load("burst", room_tokens=self._runner.room_for(below, room))

    # -------- without one, and with one alone

    def _leave_out(self) -> None:
        plan = self._plan
        base, top = plan.ends
        last = self.document["blocks"][f"load-{plan.shares[-1]:g}"]
        arms, refused, names = [top, base], dict[str, str](), list[str]()
        for name in findings.by_size(last, plan.kept):
            made = without(plan.ladder, name, plan.common, device=plan.device)
            for kind, arm in zip(("without", "alone"), made, strict=True):
                if isinstance(arm, str):
                    refused[f"{kind} {name}"] = arm
            if isinstance(made[0], Arm):
                arms += [arm for arm in made if isinstance(arm, Arm)]
                names.append(name)
            if len(names) == plan.num_left_out:
                break
        pairs = [Pair(name, f"without {name}", top.name) for name in names]
        rate = plan.shares[0] * self.capacity[base.name]
        refused |= self._refused([top], rate)
        if top.name in refused or not names:
            self.document["blocks"]["leave-one-out"] = {"refused": refused}
            return
        runs = self._block(block("leave-one-out", Load("poisson", rate), arms, pairs), refused)
        found = findings.joint(runs, names, base.name, top.name, self._timetable)
        result = self.document["blocks"]["leave-one-out"]
        result["interactions"] = {finding.name: finding._asdict() for finding in found}


def checked(ladder: Ladder, is_lossy: Callable[[Arm], bool], check: Check) -> dict[str, Any]:
    """What each lossy rung does to the text, beside the arm below it."""
    found: dict[str, Any] = {}
    for arm in ladder.arms[1:]:
        below = ladder.arm(arm.before)
        if is_lossy(arm) and not is_lossy(below):
            try:
                found[arm.name] = check(below, arm)
            except (UserError, RunError) as error:
                found[arm.name] = {"verdict": "not shown", "why": str(error)}
    return found
