"""The document of a study as Markdown: what was found, how, and what was not measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence as Seq
from itertools import zip_longest
from typing import Any

from evals.speed.figures import table
from evals.speed.ladder.findings import JUDGED, RATE, TTFT

HEADINGS = {
    TTFT: "TTFT p50",
    "ttft_ms p99": "TTFT p99",
    "tpot_ms p50": "TPOT p50",
    "itl_ms p99": "ITL p99",
    "e2el_ms p50": "E2E p50",
    RATE: "tok/s",
}
Sections = Iterator[tuple[str, list[str]]]


def text(document: Mapping[str, Any], *, brief: bool = False) -> str:
    """All of it; `brief` leaves out what surrounds the tables."""
    lines = [] if brief else _head(document)
    for title, parts in sections(document):
        lines += [f"## {title}", "", *_apart(parts)]
    return "\n".join(lines).rstrip() + "\n"


def _apart(parts: Iterable[str]) -> Iterator[str]:
    """With an empty line behind each, but for the lines of one list."""
    for part, behind in zip_longest(parts := list(parts), parts[1:], fillvalue=""):
        yield part
        if not (part.startswith("- ") and behind.startswith("- ")):
            yield ""


def _head(document: Mapping[str, Any]) -> list[str]:
    state = "" if document["complete"] else " (not complete)"
    versions = ", ".join(f"{k} {v}" for k, v in document["versions"].items() if v)
    return [
        f"# Ablation of {document['common']['model']} on {document['device_name']}{state}",
        "",
        f"`{document['command']}`",
        "",
        f"{document['machine']}; {versions}. {how(document)}",
        "",
    ]


def how(document: Mapping[str, Any]) -> str:
    """What the numbers are about, in sentences."""
    common, arguments = document["common"], document["arguments"]
    capacity = document.get("capacity", {}).get(document["ladder"][0]["name"])
    served = "" if capacity is None else (
        f" The baseline serves {capacity:.3g} requests/s with {common['max_num_seqs']} at once, "
        "and rates are shares of that."
    )  # fmt: skip
    seconds = document.get("seconds")
    took = "" if seconds is None else f" It took {seconds / 60:.1f} minutes."
    return (
        f"The question is {document['question']}. max_model_len is {common['max_model_len']}, a "
        f"run has {arguments['num_requests']} requests (prompts around "
        f"{arguments['prompt_median']} tokens, outputs around {arguments['output_mean']}).{served} "
        "Ratios are to the rung below, with 95 % intervals over rounds; verdicts hold over all "
        f"steps of a table (Holm).{took}"
    )


def sections(document: Mapping[str, Any]) -> Sections:
    blocks = document["blocks"]
    yield "The ladder", [_ladder_table(document), *_not_available(document)]
    if "capacity" in blocks:
        yield "Capacity (closed loop)", _block(document, "capacity")
    for name in blocks:
        if name.startswith("load-"):
            yield (
                f"At {name.removeprefix('load-')} of the baseline's capacity",
                _block(document, name),
            )
    lone = [name for name in blocks if name.startswith("lone")]
    if lone:
        yield "One request at a time", _side(document, lone)
    for kind, title in (
        ("pressure", "At 0.85 of the capacity of the rung below"),
        ("burst", "In a burst"),
        ("scarce", "In a burst, with a KV pool of half of what it would like"),
    ):
        if names := [name for name in blocks if name.startswith(f"{kind}--")]:
            yield title, _side(document, names)
    if "leave-one-out" in blocks:
        yield "Left out of the whole ladder, one at a time", _left_out(blocks["leave-one-out"])
    if document.get("quality"):
        yield "What lossy rungs do to the text", _quality(document["quality"])
    if document.get("split"):
        yield "Where the TTFT of a lone prompt goes", _split(document["split"])


# -------- the ladder


def _ladder_table(document: Mapping[str, Any]) -> str:
    rows = []
    for arm in document["ladder"]:
        below = arm["before"] or "-"
        kind = "" if arm["stays"] else "branch"
        rows.append((arm["name"], below, change(arm), kind, arm["about"]))
    return table(("arm", "beside", "change", "", "what"), rows)


def change(arm: Mapping[str, Any]) -> str:
    """What sets an arm of a document apart from the one below it; of the first all that it is."""
    if arm["before"] is None:
        return f"`{' '.join(f'{k}={_plain(v)}' for k, v in arm['choices'].items())}`"
    return f"`{', '.join(f'{k}={_plain(v)}' for k, v in arm['change'].items())}`"


def _plain(value: Any) -> str:
    return (
        {True: "true", False: "false", None: "null"}.get(value, str(value))
        if not isinstance(value, list | dict)
        else str(value)
    )


def _not_available(document: Mapping[str, Any]) -> list[str]:
    found = document["left_out"]
    return [f"- not available, `{name}`: {why}" for name, why in found.items()]


# -------- blocks


def _block(document: Mapping[str, Any], name: str) -> list[str]:
    """One table of all arms, then one of verdicts a figure."""
    result = document["blocks"][name]
    found = [_arms(result)]
    for figure in JUDGED[result["load"]["kind"]]:
        if part := _verdicts(document, result, figure):
            found.append(part)
    if whole := result.get("whole"):
        found += [f"The whole ladder: {_whole(whole)}."]
    if control := result["figures"].get(TTFT, {}).get("replication"):
        found.append(f"{control[0].upper()}{control[1:]}.")
    found += [f"- not measured, `{arm}`: {why}" for arm, why in result["refused"].items()]
    return found


def _whole(whole: Mapping[str, Any]) -> str:
    return ", ".join(f"{HEADINGS[figure]} {interval(found)}" for figure, found in whole.items())


def interval(found: Mapping[str, Any]) -> str:
    return f"{found['ratio']:.3f}x [{found['low']:.3f}, {found['high']:.3f}]"


def _arms(result: Mapping[str, Any]) -> str:
    head = ("arm", "TTFT p50 / p90 / p99 ms", "ITL p50 ms", "TPOT p50 ms", "tok/s", "of roofline",
            "load", "busy", "KV peak", "recompute", "n")  # fmt: skip
    rows = []
    for name, arm in result["arms"].items():
        of, pooled = arm["figures"], arm["pooled"]
        tails = [pooled.get(f"ttft_ms p{point}", {}).get("value") for point in (90, 99)]
        ttft = " / ".join(_number(v) for v in (of.get(TTFT), *tails))
        rows.append((
            name, ttft, _number(of.get("itl_ms p50")), _number(of.get("tpot_ms p50")),
            _number(of.get(RATE)), _percent(arm["share_of_roofline"]),
            _percent(arm.get("utilisation")), _percent(arm["busy"]), _kv(arm),
            _percent(arm["recompute_tax"]), str(arm["num_runs"]),
        ))  # fmt: skip
    return table(head, rows)


def _kv(arm: Mapping[str, Any]) -> str:
    size = arm["peak_held_bytes"]
    tokens = f"{arm['peak_held_tokens']:,} of {arm['room_tokens']:,} tokens"
    return tokens if size is None else f"{size / 2**20:.2f} MiB, {tokens}"


def _verdicts(document: Mapping[str, Any], result: Mapping[str, Any], figure: str) -> str:
    found = result["figures"][figure]
    if not found["steps"]:
        return ""
    shares = result.get("shares", {}) if figure == TTFT else {}
    rows = []
    for pair in result["pairs"]:
        name = pair["name"]
        step, why = found["steps"].get(name), found["refused"].get(name)
        if step is None:
            rows.append((name, pair["before"], "", "", why or "the control was not measured"))
        else:
            share = f"{shares[name]:.0%}" if name in shares else ""
            rows.append((name, pair["before"], interval(step), share, step["verdict"]))
    control = found["control"]
    if control is not None:
        rows.append(("control (A/A)", "", interval(control), "", ""))
    return table((HEADINGS[figure], "beside", "ratio [95 %]", "share", "verdict"), rows)


def _side(document: Mapping[str, Any], names: Seq[str]) -> list[str]:
    """Blocks of a pair each: a table a figure."""
    found = []
    first = document["blocks"][names[0]]
    for figure in JUDGED[first["load"]["kind"]]:
        rows: list[Seq[str]] = []
        for name in names:
            rows += _side_rows(document["blocks"][name], figure)
        if rows:
            head = (HEADINGS[figure], "beside", "there", "here", "ratio [95 %]",
                    "control [95 %]", "recompute", "verdict")  # fmt: skip
            found.append(table(head, rows))
    for name in names:
        refused = document["blocks"][name]["refused"]
        found += [f"- not measured, `{arm}`: {why}" for arm, why in refused.items()]
    return found


def _side_rows(result: Mapping[str, Any], figure: str) -> Iterator[Seq[str]]:
    found = result["figures"][figure]
    for pair in result["pairs"]:
        step = found["steps"].get(pair["name"])
        if step is None:
            continue
        arms = result["arms"]
        below, above = arms[pair["before"]], arms[pair["after"]]
        medians = (_number(arm["figures"].get(figure)) for arm in (below, above))
        tax = " / ".join(_percent(arm["recompute_tax"]) for arm in (below, above))
        control = "" if found["control"] is None else interval(found["control"])
        yield (pair["name"], pair["before"], *medians, interval(step), control, tax,
               step["verdict"])  # fmt: skip


def _left_out(result: Mapping[str, Any]) -> list[str]:
    refused = [f"- not measured, `{arm}`: {why}" for arm, why in result["refused"].items()]
    found = left_out_table(result)
    return [found, *refused] if found else refused


def left_out_table(result: Mapping[str, Any]) -> str:
    """A row a rung that was taken out of the whole ladder; empty where none could be."""
    if "figures" not in result:
        return ""
    found = result["figures"][TTFT]
    joint = result.get("interactions", {})
    rows = []
    for name in (pair["name"] for pair in result["pairs"]):
        step, pair = found["steps"].get(name), joint.get(name)
        rows.append((
            name,
            "" if step is None else interval(step),
            found["refused"].get(name, "") if step is None else step["verdict"],
            "" if pair is None else interval(pair),
            "" if pair is None else pair["verdict"],
        ))  # fmt: skip
    head = ("rung", "TTFT p50, top over top without it", "verdict",
            "its effect there over its effect alone", "together")  # fmt: skip
    return table(head, rows)


# -------- text, and time


def _quality(found: Mapping[str, Any]) -> list[str]:
    """A row a rung, and why those that are open are."""
    head = ("rung", "beside", "mean KL [95 %]", "same top-1 [95 %]", "loss", "positions", "verdict")
    rows = []
    for name, one in found.items():
        if "mean_kl" not in one:
            rows.append((name, "", "", "", "", "", f"{one['verdict']}: {one['why']}"))
            continue
        kl, top = one["mean_kl_interval"], one["top1_interval"]
        rows.append((
            name, one["below"],
            f"{one['mean_kl']:.2e} [{kl[0]:.2e}, {kl[1]:.2e}]",
            f"{one['top1']:.2%} [{top[0]:.2%}, {top[1]:.2%}]",
            f"{one['delta_nats']:+.1e}", f"{one['num_positions']:,}", one["verdict"],
        ))  # fmt: skip
    reasons = dict.fromkeys(why for one in found.values() if (why := _why_not_shown(one)))
    return [table(head, rows), *(f"- not shown: {why}" for why in reasons)]


def _why_not_shown(one: Mapping[str, Any]) -> str:
    """The first reason of the findings that leave a rung open."""
    if one["verdict"] != "not shown":
        return ""
    findings = one.get("findings", [])
    return next((f["why"] for f in findings if f["verdict"] == "not shown"), "")


def _split(found: Mapping[str, Any]) -> list[str]:
    whole = {name: one for name, one in found.items() if "parts" in one}
    if not whole:
        return [f"- not known, `{name}`: {one['not_known']}" for name, one in found.items()]
    parts = list(next(iter(whole.values()))["parts"])
    rows = [
        (name, _number(one["ttft_ms"]), *(_number(one["parts"][part]) for part in parts))
        for name, one in whole.items()
    ]
    first = next(iter(whole.values()))
    lines = [table((f"{first['num_tokens']} tokens, ms", "TTFT", *parts), rows)]
    if lengths := first["lengths"]:
        rows = [(name, *map(_number, one["lengths"].values())) for name, one in whole.items()]
        lines.append(table(("TTFT p50 of lone prompts, ms", *map(str, lengths)), rows))
    lost = {name: one["not_known"] for name, one in found.items() if name not in whole}
    return lines + [f"- not known, `{name}`: {why}" for name, why in lost.items()]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


# -------- the dry run


def plan(
    document: Mapping[str, Any], blocks: Seq[tuple[str, str, int]], rounds: int, seconds: float
) -> str:
    """Rungs, blocks with their runs, and about how long it takes."""
    rows = [(name, load, str(num), f"{num * rounds:,}") for name, load, num in blocks]
    num_runs = sum(num for *_, num in blocks) * rounds
    lines = [_ladder_table(document), *_not_available(document), ""]
    lines += [table(("block", "load", "arms", "runs"), rows), ""]
    lines += [
        f"{num_runs:,} runs, about {seconds / 60:.1f} minutes or less; {document['question']}"
    ]
    return "\n".join(lines)
