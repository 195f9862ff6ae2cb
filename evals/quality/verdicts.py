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

from core.errors import UserError
from evals.quality.statistics import drift

if TYPE_CHECKING:
    from evals.intervals import Interval
    from evals.quality.lockstep import Compared

Said = Literal["pass", "fail", "not shown"]
EXIT_CODES: Mapping[Said, int] = {"pass": 0, "fail": 1, "not shown": 3}
_EARLY = (256, 1023)
_FILE = Path(__file__).with_name("limits.toml")


class Limits(NamedTuple):
    """What an offer is held to, by metric, on how much text, and who says so."""

    values: dict[str, float]
    evidence: dict[str, int]
    source: str


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
    if offer.lossless:
        kind = "float32" if dtype == "float32" else "half"
        return Limits(table["lossless"][kind], table["evidence"], f"lossless.{kind}")
    own: Mapping[str, float] = getattr(offer, "quality", {})
    if unknown := sorted(set(own) - set(table["lossy"])):
        known = ", ".join(table["lossy"])
        what = f"the offer is held to {unknown[0]!r} by its attribute quality"
        raise UserError(f"{what}, which is no metric: choose from {known}")
    source = "lossy" + (f", its own {', '.join(own)}" if own else "")
    return Limits({**table["lossy"], **own}, table["evidence"], source)


def judge(
    found: Seq[Compared], numbers: Mapping[str, Any], limits: Limits, seed: int
) -> list[Finding]:
    """A Finding for every limit, from `statistics` of the same documents."""
    lacking = _lacking(numbers, limits.evidence)
    findings = [_finite(numbers)]
    for metric, limit in limits.values.items():
        if metric == "drift":
            findings.append(_drift(found, numbers, limit, limits.evidence, lacking, seed))
        elif metric != "tail_kl":
            pair = numbers[metric], numbers[f"{metric}_interval"]
            findings.append(_decided(metric, *pair, limit, lacking))
    return findings


def overall(findings: Seq[Finding]) -> Said:
    said = {finding.verdict for finding in findings}
    return "fail" if "fail" in said else "not shown" if "not shown" in said else "pass"


def _lacking(numbers: Mapping[str, Any], evidence: Mapping[str, int]) -> str:
    """Why nothing can be shown, or ""."""
    for what in ("documents", "positions"):
        have, need = numbers[f"num_{what}"], evidence[f"min_{what}"]
        if have < need:
            return f"{have:,} {what} of the {need:,} that it takes: give more --data"
    return ""


def _finite(numbers: Mapping[str, Any]) -> Finding:
    num = numbers["num_not_finite"]
    said: Said = "fail" if num else "pass"
    why = f"{num:,} of {numbers['num_positions']:,} positions"
    return Finding("not_finite", num, None, "0", said, why)


def _decided(
    metric: str, measured: float, interval: Interval, limit: float, lacking: str
) -> Finding:
    """top1 has to be `limit` at least, all else at most."""
    sense = ">=" if metric == "top1" else "<="
    worst, best = interval if sense == ">=" else interval[::-1]
    sign = 1 if sense == ">=" else -1
    said: Said = "not shown"
    why = lacking or "the interval straddles the limit: give more --data"
    if not lacking and sign * (worst - limit) >= 0:
        said, why = "pass", "all of the interval is within the limit"
    elif not lacking and sign * (best - limit) < 0:
        said, why = "fail", "all of the interval is beyond the limit"
    return Finding(metric, measured, interval, f"{sense} {limit:g}", said, why)


def _drift(
    found: Seq[Compared],
    numbers: Mapping[str, Any],
    limit: float,
    evidence: Mapping[str, int],
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
