"""Whether a comparison shows that an offer costs no more than it may: non-inferiority, by interval.

Each limit of limits.toml is judged by the 95 % interval of what was measured: `pass` where all of
it is within the limit, `fail` where all of it is beyond, `not shown` where it straddles the limit
or where there is too little text. Logits that are not finite fail by themselves. The whole fails if
one limit fails, and passes if all pass.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from core.errors import UserError
from evals.quality.statistics import drift, mean_interval

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from evals.intervals import Interval
    from evals.quality.lockstep import Compared

Said = Literal["pass", "fail", "not shown"]
EXIT_CODES: Mapping[Said, int] = {"pass": 0, "fail": 1, "not shown": 3}
_EARLY = (256, 1023)
_FILE = Path(__file__).with_name("limits.toml")
_INF = float("inf")
# What a limit allows, as a sentence and as the least and the most, in multiples of the limit.
_AT_MOST = "<= {:g}", (-_INF, 1.0)
_RANGES: Mapping[str, tuple[str, tuple[float, float]]] = {
    "top1": (">= {:g}", (1.0, _INF)),
    "distinct3": ("within {:g}", (-1.0, 1.0)),
    "recall": (">= -{:g}", (-1.0, _INF)),
    "tasks": (">= -{:g}", (-1.0, _INF)),
    "length": ("within {:g}", (-1.0, 1.0)),
}


class Limits(NamedTuple):
    """What an offer is held to, by metric, on how much text, and who says so.

    `values` are of what is read teacher-forced, `written` of what is written.
    """

    values: dict[str, float]
    evidence: dict[str, float]
    source: str
    written: dict[str, float]


class Finding(NamedTuple):
    """One limit: what was measured, its interval, the limit, the verdict and its reason."""

    metric: str
    measured: float | None
    interval: Interval | None
    asked: str
    verdict: Said
    why: str


def limits_of(offer: Any, dtype: str) -> Limits:
    """Those of a kv offer, class or instance, that runs in `dtype`.

    A lossy one may name its own in `quality`. Raises UserError for a metric that is not known.
    """
    table = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    own: Mapping[str, float] = {} if offer.lossless else getattr(offer, "quality", {})
    kind = ("float32" if dtype == "float32" else "half") if offer.lossless else ""
    values = table["lossless"][kind] if kind else table["lossy"]
    stored = table["stored"]
    floor = stored["float32" if dtype == "float32" else "half"]
    values = {**values, "stored": floor, "stored_share": stored["share"]}
    if unknown := sorted(set(own) - set(values) - set(table["written"])):
        known = ", ".join([*values, *table["written"]])
        what = f"the offer is held to {unknown[0]!r} by its attribute quality"
        raise UserError(f"{what}, which is no metric: choose from {known}")
    source = (
        f"lossless.{kind}" if kind else "lossy" + (f", its own {', '.join(own)}" if own else "")
    )
    limits = [
        {name: own.get(name, limit) for name, limit in part.items()}
        for part in (values, table["written"])
    ]
    return Limits(limits[0], table["evidence"], source, limits[1])


def judge(
    found: Seq[Compared], numbers: Mapping[str, Any], limits: Limits, seed: int
) -> list[Finding]:
    """A Finding for every limit, from `statistics` of the same documents."""
    lacking = _lacking(numbers, limits.evidence)
    findings = [_finite(numbers)]
    for metric, limit in limits.values.items():
        if metric == "drift":
            findings.append(_drift(found, numbers, limit, limits.evidence, lacking, seed))
        elif metric not in ("tail_kl", "stored", "stored_share"):
            pair = numbers[metric], numbers[f"{metric}_interval"]
            findings.append(_decided(metric, *pair, limit, lacking))
    return findings


def overall(findings: Seq[Finding]) -> Said:
    said = {finding.verdict for finding in findings}
    return "fail" if "fail" in said else "not shown" if "not shown" in said else "pass"


def _lacking(numbers: Mapping[str, Any], evidence: Mapping[str, float]) -> str:
    """Why nothing can be shown, or ""."""
    for what in ("documents", "positions"):
        have, need = numbers[f"num_{what}"], evidence[f"min_{what}"]
        if have < need:
            return f"{have:,} {what} of the {need:,.0f} that it takes: give more --data"
    return ""


def _finite(numbers: Mapping[str, Any]) -> Finding:
    num = numbers["num_not_finite"]
    said: Said = "fail" if num else "pass"
    why = f"{num:,} of {numbers['num_positions']:,} positions"
    return Finding("not_finite", num, None, "0", said, why)


def judge_stored(parts: Seq[NDArray[Any]], mean_kl: float, limits: Limits, seed: int) -> Finding:
    """Whether scoring reads what is stored: the same documents as a whole and in short chunks.

    `parts` are the divergences between the two, a document each. They may be as large as rounding
    makes them, or a share of what the offer costs: sums in another order tip codes on the edge.
    """
    need = int(limits.evidence["min_documents"])
    lacking = ""
    if len(parts) < need:
        lacking = f"{len(parts)} documents of the {need} that it takes: give more --data"
    limit = max(limits.values["stored"], limits.values["stored_share"] * mean_kl)
    measured = float(np.concatenate(parts).mean())
    return _decided("stored", measured, mean_interval(parts, seed), limit, lacking)


def judge_written(
    found: Mapping[str, tuple[float, Interval]],
    have: Mapping[str, int],
    limits: Limits,
    where: str,
) -> list[Finding]:
    """A Finding for each metric of `found`, which is the other arm's less the reference's.

    `have` counts the samples, of which limits.toml wants so many: prompts, documents, items.
    """
    lacking = ""
    for what, num in have.items():
        need = limits.evidence.get(f"min_{what}", 0)
        if num < need and not lacking:
            lacking = f"{num:,} {what} of the {need:,.0f} that it takes: give more"
    findings = []
    for metric, (measured, interval) in found.items():
        limit = limits.written[metric.partition(" ")[0]]
        decided = _decided(metric, measured, interval, limit, lacking)
        findings.append(decided._replace(why=f"{where}: {decided.why}"))
    return findings


def _decided(
    metric: str, measured: float, interval: Interval, limit: float, lacking: str
) -> Finding:
    """By the range that `limit` leaves the metric: at most it, unless _RANGES says otherwise."""
    name = metric.partition(" ")[0]
    form, (least, most) = _RANGES.get(name, _AT_MOST)
    low, high = least * limit, most * limit
    said: Said = "not shown"
    why = lacking or "the interval straddles the limit: give more"
    if not lacking and low <= interval[0] and interval[1] <= high:
        said, why = "pass", "all of the interval is within the limit"
    elif not lacking and (interval[1] < low or interval[0] > high):
        said, why = "fail", "all of the interval is beyond the limit"
    return Finding(metric, measured, interval, form.format(limit), said, why)


def _drift(
    found: Seq[Compared],
    numbers: Mapping[str, Any],
    limit: float,
    evidence: Mapping[str, float],
    lacking: str,
    seed: int,
) -> Finding:
    """Of the last bucket behind the early one that has text enough."""
    late = [
        (row["first"], row["last"])
        for row in numbers["buckets"]
        if row["first"] > _EARLY[1]
        and row["num_documents"] >= evidence["min_documents"]
        and row["num_positions"] >= evidence["min_bucket_positions"]
    ]
    if not late:
        need = f"{evidence['min_documents']} documents and {evidence['min_bucket_positions']}"
        why = f"positions from {_EARLY[1] + 1:,} on take {need} positions: give longer documents"
        return Finding("drift", None, None, f"<= {limit:g}", "not shown", lacking or why)
    measured, interval = drift(found, _EARLY, late[-1], seed)
    decided = _decided("drift", measured, interval, limit, lacking)
    return decided._replace(why=f"positions {late[-1][0]:,}-{late[-1][1]:,}: {decided.why}")
