"""What a run of evals.speed.bench came to: rows that compare its arms, and tables for people."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Container, Iterator, Mapping
from typing import Any

from core.show import print_rows
from evals.speed import grid
from evals.speed.arms import compared
from evals.speed.workloads import fewest_samples

OURS, AGAIN = "ours", "ours again"
RATES = ("throughput", "goodput")


def rows_of(workload: str, by_arm: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each figure and arm: p50 and min over repetitions, ratio to ours, verdict; and how
    many samples each repetition had at least, where its figure is read off samples."""
    values: dict[str, dict[str, list[float | None]]] = {}
    samples: dict[tuple[str, str], int] = {}
    for arm, found in by_arm.items():
        for one in found["repetitions"]:
            for figure, value in one["figures"].items():
                values.setdefault(figure, {}).setdefault(arm, []).append(value)
                num, place = one["num_samples"].get(figure), (figure, arm)
                if num is not None:
                    samples[place] = min(num, samples.get(place, num))
    rows = [row for figure, given in values.items() for row in summary(workload, figure, given)]
    void = {arm for arm, found in by_arm.items() if _is_saturated(found)}
    return [
        row
        | {"samples": samples.get((row["figure"], row["arm"]))}
        | ({"ratio_to_ours": None, "verdict": "saturated"} if _is_void(row, void) else {})
        for row in rows
    ]


def _is_saturated(found: Mapping[str, Any]) -> bool:
    return any(one["is_saturated"] for one in found["repetitions"])


def _is_void(row: Mapping[str, Any], saturated: Container[str]) -> bool:
    """Latencies of what was saturated, or is compared with it, are none."""
    return not _is_rate(row["figure"]) and (row["arm"] in saturated or OURS in saturated)


def _is_rate(figure: str) -> bool:
    """More is better; of a grid, its cell stands behind the name."""
    return figure.partition(" ")[0].endswith(RATES)


def summary(
    workload: str, figure: str, by_arm: Mapping[str, list[float | None]]
) -> list[dict[str, Any]]:
    """Rows of one figure. There is no ratio to what is not positive, or not there."""
    whole = {arm: [v for v in values if v is not None] for arm, values in by_arm.items()}
    whole = {arm: values for arm, values in whole.items() if len(values) == len(by_arm[arm])}
    positives = {arm: values for arm, values in whole.items() if min(values) > 0}
    said: dict[str, dict[str, Any]] = {}
    if OURS in positives:
        rises = [figure] if _is_rate(figure) else []
        rows = compared({figure: positives}, OURS, AGAIN, more_is_better=rises)
        said = {row["arm"]: row for row in rows}
    return [
        {
            "workload": workload,
            "figure": figure,
            "arm": arm,
            "repetitions": len(values),
            "p50": statistics.median(whole[arm]) if arm in whole else None,
            "min": min(whole[arm]) if arm in whole else None,
            "ratio_to_ours": said[arm]["ratio"] if arm in said else None,
            "control": said[arm]["control"] if arm in said else None,
            "verdict": said[arm]["verdict"] if arm in said else None,
        }
        for arm, values in by_arm.items()
    ]


def show(document: Mapping[str, Any]) -> None:
    """Tables of the figures, of the steps and of the host's time; then what whoever reads them must
    know, and what there is not."""
    rows = document["rows"]
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    for arm in arms:
        if lines := grid.table(rows, arm):
            if len(arms) > 1:
                print(f"grid, {arm}")
            print_rows(lines, sys.stdout)
    # The cells of a grid stand there already; beside other arms they are compared one by one.
    others = [row for row in rows if row["workload"] != "grid" or len(arms) > 1]
    print_rows([_cells(row) for row in others], sys.stdout)
    ours = {name: by_arm[OURS] for name, by_arm in document["workloads"].items() if OURS in by_arm}
    print_rows([row for found in ours.values() for row in _step_rows(found)], sys.stdout)
    hosts = [row for found in ours.values() for row in _host_rows(found["host"])]
    print_rows(hosts, sys.stdout)
    for sentence in dict.fromkeys(_sentences(document, ours)):
        print(sentence)


def _cells(row: Mapping[str, Any]) -> dict[str, Any]:
    control = row["control"]
    names = {"p50": "p50", "min": "min", "ratio_to_ours": "x ours"}
    figures = {
        shown: None if row[name] is None else f"{row[name]:.4g}" for name, shown in names.items()
    }
    return {
        "workload": row["workload"],
        "figure": row["figure"],
        "arm": row["arm"],
        "reps": row["repetitions"],
        "samples": row["samples"],
        **figures,
        "A/A within": None if control is None else f"{control:.3f}",
        "verdict": row["verdict"],
    }


def _step_rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of the last repetition: every section and kind of step."""
    return [
        {
            "section": section,
            "steps": kind,
            "n": one["step_ms"]["n"],
            "p50 ms": one["step_ms"]["p50"],
            "p99 ms": one["step_ms"]["p99"],
            "total ms": one["total_ms"],
            "floor ms": one.get("floor_ms"),
            "% of roofline": f"{one['share_of_roofline']:.1%}" if "floor_ms" in one else None,
        }
        for section, by_kind in found["repetitions"][-1]["steps"].items()
        for kind, one in by_kind.items()
    ]


def _host_rows(host: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "section": section,
            "host ms a step": one["ms_a_step"],
            "host p50 ms a launching call": one["call_ms"]["p50"],
        }
        for section, one in host.items()
        if section != "not_known"
    ]


def _sentences(document: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    for what, why in document["left_out"].items():
        yield f"not measured, {what}: {why}"
    for name, by_arm in document["workloads"].items():
        for arm, found in by_arm.items():
            last = found["repetitions"][-1]
            yield from (f"{name}, {arm}: {note}" for note in last["notes"])
            for why in dict.fromkeys(last["refused"].values()):
                what = ", ".join(key for key, reason in last["refused"].items() if reason == why)
                yield f"not measured, {arm}, {what}: {why}"
    for row in document["rows"]:
        point = row["figure"].rpartition(" p")[2]
        if row["p50"] is None and point.isdigit():
            fewest = fewest_samples(float(point))
            yield f"-: p{point} takes {fewest} samples or more in each repetition"
    if document["bandwidth"]["terabytes_per_s"] is None:
        yield "no share of a roofline: give --bandwidth or --measure-bandwidth, and --flops"
    elif document["bandwidth"]["teraflops_per_s"] is None:
        yield "no share of a roofline: give --flops"
    for found in ours.values():
        if "not_known" in found["host"]:
            yield f"host time apart from the device's is not known: {found['host']['not_known']}"
