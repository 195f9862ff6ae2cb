"""Whether a tree is slower than the revision it comes from: the times of `outweigh gate`.

The base is measured against itself first (A/A), in six rounds: what its pairs differ by says how
many rounds it takes to see a slow-down of half as much again as the limit, and that there is none;
ten at least, and where they decide nothing as many as are allowed, which is the last look. A round
starts three processes, the base, the base again, the tree, which stay alive and are timed in turn,
burst by burst, forwards in even rounds and backwards in odd ones (ABBA). Processes differ by more
than their code (where memory came to lie, who else ran), so that a round is a unit, and its
processes are new. A run is the lower quartile of its bursts: what else the machine did only adds.

A gate fails where `evals.speed.verdicts` calls the tree slower, corrected over the gates, and the
ratio is beyond the limit; it passes where the interval lies within the limit, or the tree is
faster. All else is inconclusive: a slow-down that may be within the limit, a control that moved.
"""

from __future__ import annotations

import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence as Seq
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from core.config import versions
from core.errors import UserError
from core.testing.gate import Worker
from evals import records
from evals.speed.arms import in_turn
from evals.speed.paired import MIN_UNITS, Ratio, Run, paired
from evals.speed.replication import DEFAULT_PAIRS, plan
from evals.speed.verdicts import Finding, judged

if TYPE_CHECKING:
    from core.show import Progress
    from core.testing.gates import Gate, Outcome, State

# gate -> arm -> seconds of a call, or why they are not known; of one round, with these arms.
Trial = Callable[[Seq[str], int], Mapping[str, Mapping[str, float | str]]]
Times = dict[str, dict[str, list[float]]]

BASE, AGAIN, TREE = "base", "base again", "tree"
PILOT = 6  # rounds
WANTED = 0.95  # chance that a planted slow-down is seen, and that none is said to be none
BURSTS, BURST_S, MOST_CALLS = 9, 0.03, 10_000


def compared(
    gates: Seq[Gate], trees: Mapping[str, Path], path: str, most: int, progress: Progress
) -> tuple[list[Outcome], dict[str, Any]]:
    """Outcomes of `gates` and all that was measured, over `trees`, the base and the tree."""
    where = {BASE: trees[BASE], AGAIN: trees[BASE], TREE: trees[TREE]}
    return study(gates, Processes(gates, where, path), most, progress)


def study(
    gates: Seq[Gate], trial: Trial, most: int, progress: Progress
) -> tuple[list[Outcome], dict[str, Any]]:
    """As `compared`, with whatever measures a round. Raises UserError where `most` are too few."""
    if most < MIN_UNITS:
        raise UserError(f"{most} rounds are too few to judge by: give --rounds {MIN_UNITS} or more")
    rounds = _Rounds(trial, progress)
    pilot = rounds.measured("A/A", (BASE, AGAIN), min(PILOT, most))
    num, said = _num_rounds([gate for gate in gates if gate.name in pilot], pilot, most)
    for name, sentence in said.items():
        print(f"A/A, {name}: {sentence}", file=sys.stderr)
    found: Times = {}
    findings: dict[str, Finding] = {}
    for upto in dict.fromkeys((num, most)):
        if pilot and (not findings or _is_open(gates, findings)):
            found = rounds.measured("compare", (BASE, AGAIN, TREE), upto)
            findings = _findings(gates, found)
    lost = rounds.lost
    outcomes = []
    for gate in gates:
        if gate.name in lost:
            arm, why = lost[gate.name]
            state: State = "failed" if arm == TREE else "inconclusive"
            outcomes.append(gate.outcome(state, f"{arm} was not timed: {why}"))
        else:
            outcomes.append(_outcome(gate, findings[gate.name]))
    record = {
        "machine": records.machine(), "load": os.getloadavg(), "versions": versions(),
        "control": said, "pilot_s": pilot, "seconds": found,
        "ratios": {name: finding._asdict() for name, finding in findings.items()},
    }  # fmt: skip
    return outcomes, record


class _Rounds:
    """Rounds of a trial. `lost` has the gates that were lost on the way, with the arm and why."""

    def __init__(self, trial: Trial, progress: Progress) -> None:
        self._trial, self._progress = trial, progress
        self._found: dict[str, list[Mapping[str, Mapping[str, float | str]]]] = {}
        self.lost: dict[str, tuple[str, str]] = {}

    def measured(self, stage: str, arms: Seq[str], num: int) -> Times:
        """Seconds of `num` rounds of a stage, those that it has had already among them."""
        rounds = self._found.setdefault(stage, [])
        for i in range(len(rounds), num):
            self._progress(stage, i, num)
            rounds.append(self._trial(in_turn(arms, i), i))
            for name, by_arm in rounds[-1].items():
                for arm, value in by_arm.items():
                    if isinstance(value, str):
                        self.lost.setdefault(name, (arm, value))
        self._progress(stage, num, num)
        whole = [name for name in rounds[0] if name not in self.lost]
        return {
            name: {arm: [float(found[name][arm]) for found in rounds] for arm in arms}
            for name in whole
        }


def _is_open(gates: Seq[Gate], findings: Mapping[str, Finding]) -> bool:
    timed = [gate for gate in gates if gate.name in findings]
    return any(_outcome(gate, findings[gate.name]).state == "inconclusive" for gate in timed)


def _num_rounds(gates: Seq[Gate], pilot: Times, most: int) -> tuple[int, dict[str, str]]:
    """How many rounds every gate has enough of, and a sentence for each about its noise."""
    num, said = DEFAULT_PAIRS, {}
    for gate in gates:
        control = _ratio(pilot[gate.name], AGAIN)
        try:
            wants = plan(
                control, effect=1 + 1.5 * gate.limit, wanted=WANTED, num_steps=len(gates),
                margin=gate.limit,
            )  # fmt: skip
        except UserError as error:
            num, said[gate.name] = most, str(error)
            continue
        num = max(num, wants.num_pairs, wants.num_pairs_no_change or most)
        said[gate.name] = wants.sentence
    return min(num, most), said


def _ratio(by_arm: Mapping[str, Seq[float]], arm: str) -> Ratio:
    base, other = ([Run(0, i, s) for i, s in enumerate(by_arm[name])] for name in (BASE, arm))
    return paired(base, other, "repeatability")


def _findings(gates: Seq[Gate], found: Times) -> dict[str, Finding]:
    """Of each gate that was timed, judged by its own control, corrected over all."""
    steps = {name: _ratio(by_arm, TREE) for name, by_arm in found.items()}
    findings = {}
    for gate in gates:
        if gate.name in steps:
            of_all = judged(steps, _ratio(found[gate.name], AGAIN), margin=gate.limit)
            findings[gate.name] = next(f for f in of_all if f.name == gate.name)
    return findings


def _outcome(gate: Gate, finding: Finding) -> Outcome:
    if finding.verdict == "slower":
        if finding.ratio > 1 + gate.limit:
            return gate.outcome("failed", f"{finding.sentence}; the limit is {gate.limit:.0%}")
        said = f"{finding.sentence}, but not by more than {gate.limit:.0%}: measure more rounds"
        return gate.outcome("inconclusive", said)
    state: State = "inconclusive" if finding.verdict == "inconclusive" else "ok"
    return gate.outcome(state, finding.sentence)


class Processes:
    """A Trial: every arm a process that is new in each round, all gates in each."""

    def __init__(self, gates: Seq[Gate], trees: Mapping[str, Path], path: str) -> None:
        self._gates, self._trees, self._path = gates, trees, path
        self._num_calls: dict[str, int] = {}

    def __call__(self, arms: Seq[str], i: int) -> dict[str, dict[str, float | str]]:
        with ExitStack() as stack:
            workers = {
                arm: stack.enter_context(Worker(self._trees[arm], self._path)) for arm in arms
            }
            return {gate.name: self._timed(gate, workers) for gate in self._gates}

    def _timed(self, gate: Gate, workers: Mapping[str, Worker]) -> dict[str, float | str]:
        """Quartiles of seconds, or what an arm raises, whose time is then nobody's."""
        for arm, worker in workers.items():
            answer = worker.ask(prepare=gate.measure, **{"with": gate.options})
            answer = answer if "error" in answer else worker.ask(time=gate.measure, calls=1)
            if "error" in answer:
                return {arm: answer["error"]}
            if gate.name not in self._num_calls:
                again = worker.ask(time=gate.measure, calls=1)
                wanted = BURST_S / max(again.get("seconds", BURST_S), 1e-9)
                self._num_calls[gate.name] = min(max(1, math.ceil(wanted)), MOST_CALLS)
        bursts = defaultdict[str, list[float]](list)
        for _ in range(BURSTS):
            for arm, worker in workers.items():
                answer = worker.ask(time=gate.measure, calls=self._num_calls[gate.name])
                if "error" in answer:
                    return {arm: answer["error"]}
                bursts[arm].append(answer["seconds"])
        return {arm: float(np.quantile(seconds, 0.25)) for arm, seconds in bursts.items()}
