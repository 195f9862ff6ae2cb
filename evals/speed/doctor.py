"""What is wrong with a run that was recorded, and the flag to try: checks on a file of results.

    python -m evals.speed.doctor ladder/result.json
    python -m evals.speed.doctor bench.json report.json --json findings.json

Takes what evals.speed.ablate and evals.speed.bench write, what `outweigh run -o json` prints, and
what `Engine.report()` returns, as JSON. Looks for fragmentation and saw-tooth occupancy, a block
size that wastes memory, swap or recompute storms, scheduling jitter, host-bound steps, uncaptured
shapes and gaps in the ladder of graphs (evals.speed.symptoms). What a record does not tell is said,
and is no clean bill. Exit code 0: nothing found; 1: something; 2: the command cannot be carried
out.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence as Seq
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from core.errors import UserError, explained
from core.show import print_rows
from evals import records
from evals.arguments import Parser
from evals.speed.ladder.study import AGAIN
from evals.speed.symptoms import CHECKS, Finding, Seen


def examined(seen: Iterable[Seen]) -> tuple[list[Finding], dict[str, list[str]]]:
    """The findings, those alike as one, and of each check that no run could be asked why not."""
    found: dict[Finding, list[str]] = {}
    unknown: dict[str, list[str]] = {}
    known = set()
    for run in seen:
        for name, check in CHECKS.items():
            answer = check(run)
            if isinstance(answer, str):
                unknown.setdefault(name, []).append(answer)
            else:
                known.add(name)
            if isinstance(answer, Finding):
                found.setdefault(answer._replace(where=""), []).append(answer.where)
    findings = [
        finding._replace(where=where + (f", and {len(more)} more" if more else ""))
        for finding, (where, *more) in found.items()
    ]
    reasons = {name: list(dict.fromkeys(why)) for name, why in unknown.items()}
    return findings, {name: why for name, why in reasons.items() if name not in known}


def runs_of(document: Mapping[str, Any], folder: Path) -> Iterator[Seen]:
    """The runs in a result; `folder` is where it lies, perhaps with the single runs beside it.

    Raises UserError where it is no result of a known kind.
    """
    if "blocks" in document and "engines" in document:
        yield from _of_ladder(document, folder / "runs")
    elif "workloads" in document and "engines" in document:
        yield from _of_bench(document)
    elif "counters" in document and "config" in document:
        yield _of_report(document)
    else:
        raise UserError(
            "it is no result of evals.speed.ablate or evals.speed.bench, and no report of an "
            "engine: give one of these"
        )


# -------- the kinds of result


def _of_report(document: Mapping[str, Any]) -> Seen:
    metrics = [result.get("metrics") or {} for result in document.get("results", ())]
    gaps = [gap for found in metrics for gap in found.get("itl_ms", ())]
    return Seen(
        "the run", document, document["counters"], _looks(document),
        document.get("kv_cache_tokens"), _token_bytes(document), gaps_ms=gaps, num_gaps=len(gaps),
    )  # fmt: skip


def _looks(report: Mapping[str, Any]) -> list[tuple[float, float]]:
    over_time = report.get("kv_use", {}).get("over_time", ())
    return [(look["num_held_tokens"], look["num_live_tokens"]) for look in over_time]


def _token_bytes(report: Mapping[str, Any]) -> float | None:
    """Of the cache, about: tables and scratch are counted in. None where its room is set otherwise
    than by its bytes."""
    size, room = report["config"].get("kv_cache_bytes"), report.get("kv_cache_tokens")
    settings = report.get("offers", {}).get("kv", {}).get("settings", {})
    return None if not (size and room) or settings.get("num_blocks") else size / room


def _of_bench(document: Mapping[str, Any]) -> Iterator[Seen]:
    """Ours, as a whole, and each of its workloads; other engines do not tell."""
    for arm, report in document["engines"].items():
        if "counters" not in report or "config" not in report:
            continue
        yield Seen(
            arm, report, report["counters"], _looks(report), report.get("kv_cache_tokens"),
            _token_bytes(report), is_one_run=False,
        )  # fmt: skip
        for workload, by_arm in document["workloads"].items():
            if arm in by_arm:
                yield from _of_workload(f"{arm}, {workload}", report, by_arm[arm])


def _of_workload(where: str, report: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Seen]:
    """Sections of a workload (sizes of prompts or batches)."""
    config = {"config": report["config"]}
    first = found["repetitions"][0]
    raw, host = first.get("raw", {}), found.get("host", {})
    gaps = raw.get("itl_ms quantiles") or ()
    if gaps:
        yield Seen(where, config, gaps_ms=gaps, num_gaps=raw.get("num_itl", len(gaps)))
    for section, steps in first.get("steps", {}).items():
        times, own = steps.get("all", {}).get("step_ms", {}), host.get(section)
        share = None
        if own and times.get("mean"):
            part = own["ms_a_step"] / times["mean"]
            said = f"the host takes {own['ms_a_step']:.3g} ms of a step of {times['mean']:.3g} ms"
            share = part, f"{said}, {part:.0%}"
        why = host.get("not_known", "it was not measured")
        yield Seen(f"{where}, {section}", config, host_share=share, no_host=why)


def _of_ladder(document: Mapping[str, Any], folder: Path) -> Iterator[Seen]:
    """Every arm of every block, and where the TTFT of each arm goes."""
    engines = document["engines"]
    for block, result in document["blocks"].items():
        for arm, found in result.get("arms", {}).items():
            if not arm.endswith(AGAIN):
                runs = list(_single(folder, block, arm))
                yield _of_arm(f"{block}, {arm}", engines.get(_slug(arm), {}), found, runs)
    for arm, found in document.get("split", {}).items():
        report = engines.get(_slug(arm), {})
        if "parts" in found:
            yield _of_split(f"a lone prompt, {arm}", report, found)


def _of_arm(
    where: str, report: Mapping[str, Any], found: Mapping[str, Any], runs: Seq[Mapping[str, Any]]
) -> Seen:
    counters: Counter[str] = Counter()
    for run in runs:
        counters.update(run["counters"])
    looks = runs[0]["kv"]["over_time"] if runs else ()
    gaps = next((run["itl_ms quantiles"] for run in runs if run["itl_ms quantiles"]), ())
    return Seen(
        where, report, counters, [(held, live) for _, held, live in looks],
        found.get("room_tokens"), found.get("token_bytes"), gaps_ms=gaps,
        num_gaps=counters["num_decode_tokens"] // max(1, len(runs)),
    )  # fmt: skip


def _of_split(where: str, report: Mapping[str, Any], found: Mapping[str, Any]) -> Seen:
    if not str(report.get("config", {}).get("device", "cpu")).startswith("cuda"):
        why = "a step on cpu is the host's own work: there is no device part"
        return Seen(where, report, no_host=why)
    parts, whole = found["parts"], found["ttft_ms"]
    waits = parts["host"] + parts["launch gaps"]
    said = f"host and launch gaps take {waits:.3g} ms of a TTFT of {whole:.3g} ms"
    return Seen(where, report, host_share=(waits / whole, f"{said}, {waits / whole:.0%}"))


def _slug(name: str) -> str:
    """As `evals.speed.ladder.study.Store` names its files."""
    return name.replace(" ", "_").replace("/", "_")


def _single(folder: Path, block: str, arm: str) -> Iterator[Mapping[str, Any]]:
    """The single runs of an arm, if they were kept."""
    begin, end = f"{_slug(block)}--", f"--{_slug(arm)}.json"
    for path in sorted(folder.glob("*.json")):
        number = path.name.removeprefix(begin).removesuffix(end)
        if path.name == f"{begin}{number}{end}" and number.isdigit():
            yield json.loads(path.read_text(encoding="utf-8"))


# -------- the command line


def read(path: Path) -> list[Seen]:
    """The runs in a file. Raises UserError where it holds none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): give a file of results") from error
    try:
        with _as_written("it"):
            return list(runs_of(document if isinstance(document, dict) else {}, path.parent))
    except UserError as error:
        raise UserError(f"{path} cannot be examined: {error}") from error


def _as_written(what: str) -> AbstractContextManager[None]:
    """Where a result lacks something, or has it in another form: somebody has changed it."""
    misfits = AttributeError, LookupError, TypeError, ValueError
    return explained(f"{what} is not as it was written", "take the file anew", caught=misfits)


def main(argv: Seq[str] | None = None) -> int:
    parser = Parser("evals.speed.doctor", __doc__)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        records.check_folder(args.json)
        for path in args.results:
            records.check_apart(**{"RESULT": path, "--json": args.json})
        runs = [seen for path in args.results for seen in read(path)]
        with _as_written("what stands in these results"):
            findings, unknown = examined(runs)
        rows = [finding._asdict() for finding in findings]
        print_rows(
            [{"try" if k == "attempt" else k: v for k, v in r.items()} for r in rows], sys.stdout
        )
        for name, why in unknown.items():
            print(f"not known, {name}: {'; '.join(why)}")
        print(f"{len(findings)} findings in {len(runs)} runs")
        if args.json:
            records.write(args.json, {"findings": rows, "not_known": unknown})
    except UserError as error:
        print(f"outweigh: error: {error}", file=sys.stderr)
        return 2
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
