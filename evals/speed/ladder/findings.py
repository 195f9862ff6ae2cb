"""From the runs of a block to what its steps did: ratios, verdicts, and who was saturated."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from core.errors import UserError
from evals.speed.ladder.study import Pair, Runs, Timetable
from evals.speed.latency import percentile, smallest_sample
from evals.speed.paired import MIN_UNITS, Question, Ratio, Run, interaction, paired
from evals.speed.replication import plan
from evals.speed.verdicts import Finding, interactions, judged

TTFT, RATE = "ttft_ms p50", "output_throughput"
JUDGED = {
    "closed": (RATE, "tpot_ms p50"),
    "poisson": (TTFT, "ttft_ms p99", "tpot_ms p50", "itl_ms p99"),
    "burst": (TTFT, "ttft_ms p99", "e2el_ms p50", RATE),
    "lone": (TTFT, "tpot_ms p50"),
}
MORE_IS_BETTER = {RATE}
FULL = 0.98  # of its capacity: from there on an arm has no steady state


class Steps(NamedTuple):
    """The pairs of one figure that can be compared, and the sentence for each that cannot."""

    ratios: dict[str, Ratio]
    refused: dict[str, str]


def saturated(rate: float, capacity: float | None) -> str | None:
    """Why an arm is not measured at this rate, in requests a second."""
    if capacity is None or rate < FULL * capacity:
        return None
    return (
        f"saturated: {rate:.3g} requests/s are offered and it serves {capacity:.3g}, so its "
        "latencies would be a matter of how long one measures"
    )


def fell_behind(runs: Runs) -> dict[str, str]:
    """Arms whose queue grew in most of their runs."""
    found = {}
    for name, by_round in runs.by_arm.items():
        num = sum(run["is_behind"] for run in by_round.values())
        if num * 2 > len(by_round):
            found[name] = f"saturated: its queue grew in {num} of {len(by_round)} runs"
    return found


def compared(runs: Runs, pair: Pair, figure: str, timetable: Timetable) -> Ratio:
    """The ratio of a pair over the rounds that both have. Raises UserError where it has none."""
    sides = [runs.values(name, figure) for name in (pair.before, pair.after)]
    below, above = _rows(sides, timetable)
    return paired(below, above, timetable.question)


def _rows(sides: list[dict[int, float]], timetable: Timetable) -> list[list[Run]]:
    common = sorted(set.intersection(*(set(side) for side in sides)))
    return [[Run(timetable.seed_of(i), i, side[i]) for i in common] for side in sides]


def steps(
    runs: Runs, figure: str, timetable: Timetable, refused: Mapping[str, str]
) -> tuple[Ratio | None, Steps]:
    """The control of a block and its pairs, for one figure."""
    found = Steps({}, {})
    for pair in runs.block.pairs:
        gone = next((name for name in (pair.after, pair.before) if name in refused), None)
        if gone is not None:
            why = refused[gone]
            found.refused[pair.name] = why if gone == pair.after else f"'{gone}', below it: {why}"
            continue
        if not runs.values(pair.after, figure):
            found.refused[pair.name] = f"its runs have too few requests for {figure}"
            continue
        try:
            found.ratios[pair.name] = compared(runs, pair, figure, timetable)
        except UserError as error:
            found.refused[pair.name] = str(error)
    try:
        control = compared(runs, runs.block.control, figure, timetable)
    except UserError:
        control = None
    return control, found


def verdicts(
    steps_of: Mapping[str, Ratio], controls: Mapping[str, Ratio], figure: str
) -> dict[str, Finding]:
    """A Finding for each step, corrected over all of them, each judged by its own control."""
    return {
        name: next(
            finding
            for finding in judged(steps_of, control, more_is_better=figure in MORE_IS_BETTER)
            if finding.name == name
        )
        for name, control in controls.items()
        if name in steps_of
    }


def summary(runs: Runs) -> dict[str, dict[str, Any]]:
    """Of each arm: figures as medians over its runs, and percentiles of all its requests where
    they carry them."""
    return {name: _of_arm(by_round) for name, by_round in runs.by_arm.items() if by_round}


def _of_arm(by_round: Mapping[int, Any]) -> dict[str, Any]:
    runs = list(by_round.values())
    names = dict.fromkeys(name for run in runs for name in run["figures"])
    whole = {name: [run["figures"][name] for run in runs] for name in names}
    pooled: dict[str, Any] = {}
    for name in ("ttft_ms", "tpot_ms"):
        values = [value for run in runs for value in run["samples"][name]]
        for point in (50, 90, 99):
            if len(values) >= smallest_sample(point):
                pooled[f"{name} p{point}"] = percentile(values, point)._asdict()
    return {
        "num_runs": len(runs),
        "figures": {
            name: statistics.median(values)
            for name, values in whole.items()
            if all(value is not None for value in values)
        },
        "pooled": pooled,
        "busy": _median(run["busy"] for run in runs),
        "share_of_roofline": _median(run["share_of_roofline"] for run in runs),
        "recompute_tax": _median(run["recompute_tax"] for run in runs),
        "peak_held_tokens": max(run["kv"]["peak_held_tokens"] for run in runs),
        "room_tokens": runs[0]["kv"]["room_tokens"],
        "peak_held_bytes": _most(run["kv"]["peak_held_bytes"] for run in runs),
        "token_bytes": runs[0]["kv"]["token_bytes"],
        "fragmentation": _median(run["kv"]["fragmentation"] for run in runs),
        "num_preemptions": _median(run["counters"].get("num_preemptions") for run in runs),
    }


def _median(values: Any) -> float | None:
    found = [value for value in values if value is not None]
    return float(np.median(found)) if found else None


def _most(values: Any) -> float | None:
    return max((value for value in values if value is not None), default=None)


def block_result(runs: Runs, timetable: Timetable, refused: Mapping[str, str]) -> dict[str, Any]:
    """All of one block, JSON-able. `refused` are arms that were not measured, with the reason."""
    refused = {**refused, **runs.lost, **fell_behind(runs)}
    figures = {}
    for figure in JUDGED[runs.block.load.kind]:
        control, found = steps(runs, figure, timetable, refused)
        controls = {} if control is None else dict.fromkeys(found.ratios, control)
        said = verdicts(found.ratios, controls, figure)
        figures[figure] = {
            "control": None if control is None else numbers(control),
            "replication": control and rounds_needed(control, len(runs.block.pairs)),
            "steps": {name: finding._asdict() for name, finding in said.items()},
            "refused": found.refused,
        }
    return {
        "load": runs.block.load._asdict(),
        "pairs": [pair._asdict() for pair in runs.block.pairs],
        "arms": summary(runs),
        "refused": refused,
        "figures": figures,
    }


def together(
    results: Mapping[str, tuple[Runs, Mapping[str, str]]], timetable: Timetable
) -> dict[str, Any]:
    """Blocks of one load, a pair each, whose verdicts are corrected together: step -> result."""
    if not results:
        return {}
    kind = next(iter(results.values()))[0].block.load.kind
    found: dict[str, dict[str, Any]] = {
        name: block_result(runs, timetable, refused) for name, (runs, refused) in results.items()
    }
    for figure in JUDGED[kind]:
        ratios: dict[str, Ratio] = {}
        controls: dict[str, Ratio] = {}
        for name, (runs, _) in results.items():
            control, made = steps(runs, figure, timetable, found[name]["refused"])
            if control is not None and name in made.ratios:
                ratios[name], controls[name] = made.ratios[name], control
        for name, finding in verdicts(ratios, controls, figure).items():
            found[name]["figures"][figure]["steps"] = {name: finding._asdict()}
    return found


def numbers(ratio: Ratio) -> dict[str, float]:
    return {
        "ratio": float(ratio.ratio),
        "low": float(ratio.low),
        "high": float(ratio.high),
        "num_units": int(ratio.num_units),
        "spread": float(np.expm1(ratio.spread)),
    }


def shares(
    result: Mapping[str, Any], whole: Mapping[str, Any], kept: list[str], figure: str = TTFT
) -> dict[str, float]:
    """Of each step that stays, its part in the change of a figure over the whole ladder: log ratio
    over the sum of them. Empty where a step is missing, or where the whole is not apart from 1."""
    found = result["figures"][figure]["steps"]
    if any(name not in found for name in kept) or whole["low"] <= 1 <= whole["high"]:
        return {}
    logs = {name: math.log(found[name]["ratio"]) for name in kept}
    total = sum(logs.values())
    return {name: value / total for name, value in logs.items()}


def by_size(result: Mapping[str, Any], kept: list[str], figure: str = TTFT) -> list[str]:
    """The steps, that of the largest effect first, whichever way it goes."""
    found = result["figures"][figure]["steps"]
    sizes = {name: abs(math.log(found[name]["ratio"])) for name in kept if name in found}
    return sorted(sizes, key=lambda name: -sizes[name])


def joint(
    runs: Runs, names: list[str], base: str, top: str, timetable: Timetable, figure: str = TTFT
) -> list[Finding]:
    """Whether steps do in the whole ladder what they do alone, of a block that has the arms `base`,
    `top`, "without NAME" and "alone NAME"; of those that have all four."""
    found = {}
    for name in names:
        arms = (base, f"alone {name}", f"without {name}", top)
        if any(arm not in runs.by_arm or arm in runs.lost for arm in arms):
            continue
        rows = _rows([runs.values(arm, figure) for arm in arms], timetable)
        if len(rows[0]) >= MIN_UNITS:
            at_base, alone, without, full = rows
            found[name] = interaction(at_base, alone, without, full, timetable.question)
    if not found:
        return []
    return interactions(found, compared(runs, runs.block.control, figure, timetable))


def question_sentence(question: Question, num_rounds: int, seed: int) -> str:
    """Which question the intervals answer."""
    if question == "repeatability":
        return (
            f"repeatability: one trace (seed {seed}) {num_rounds} times; intervals are about the "
            "noise of this machine on it, and about no other workload"
        )
    return (
        f"generality: {num_rounds} traces (seeds {seed} to {seed + num_rounds - 1}), once each; "
        "intervals are about workloads of this kind"
    )


def rounds_needed(control: Ratio, num_steps: int) -> str:
    """How many rounds show an effect of 10 %, by how far the control was from itself."""
    try:
        return plan(control, num_steps=max(1, num_steps)).sentence
    except UserError as error:
        return str(error)
