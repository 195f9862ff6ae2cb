"""Charts of a study as SVG to stand inside a page: text stays text, nothing is loaded."""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Mapping, Sequence as Seq
from typing import Any

from core.errors import explained
from evals.speed.ladder.findings import TTFT
from evals.speed.ladder.split import PARTS

_COLOURS = {
    "faster": "#2a7f46",
    "slower": "#b3372f",
    "no change": "#8a8a8a",
    "inconclusive": "#c9b458",
    "": "#47658c",
}
_ABOVE: Mapping[str, Any] = {
    "frameon": False,
    "loc": "lower center",
    "bbox_to_anchor": (0.5, 1),
}
_PART_COLOURS = ("#d0d4da", "#47658c", "#6f9bd1", "#b3372f", "#9ab8a0", "#e0a458", "#5d5d5d")


def pyplot() -> Any:
    """matplotlib.pyplot, without a screen. Raises UserError where it is not installed."""
    with explained("the report has charts", "pip install 'outweigh[speed]' brings matplotlib"):
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        matplotlib.rcParams.update({"svg.fonttype": "none", "font.size": 9, "figure.dpi": 90})
        return importlib.import_module("matplotlib.pyplot")


def svg(figure: Any, salt: str) -> str:
    """The figure as an <svg> element without a declaration, metadata, or any address."""
    matplotlib = importlib.import_module("matplotlib")
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight")
    pyplot().close(figure)
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    # HTML knows the namespaces of <svg> by itself.
    return re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)


def waterfall(document: Mapping[str, Any], block: str) -> str:
    """TTFT p50 from the baseline to the top, a bar for what each rung that stays added or took."""
    result = document["blocks"][block]
    names = [arm["name"] for arm in document["ladder"] if arm["stays"]]
    medians = {
        name: result["arms"][name]["figures"][TTFT]
        for name in names
        if TTFT in result["arms"].get(name, {}).get("figures", {})
    }
    said = {name: step["verdict"] for name, step in result["figures"][TTFT]["steps"].items()}
    plot = pyplot()
    figure, axes = plot.subplots(figsize=(8, 3.6))
    below = None
    for x, (name, value) in enumerate(medians.items()):
        bottom = 0.0 if below is None else min(below, value)
        height = value if below is None else abs(value - below)
        axes.bar(x, height, bottom=bottom, color=_COLOURS[said.get(name, "")], width=0.7)
        axes.annotate(f"{value:.3g}", (x, max(value, below or 0)), ha="center", va="bottom")
        below = value
    if medians:
        axes.bar(len(medians), below, color=_COLOURS[""], width=0.7)
    axes.set_xticks(range(len(medians) + 1), [*medians, "top"], rotation=30, ha="right")
    axes.set_ylabel("TTFT p50, ms")
    handles = [plot.Rectangle((0, 0), 1, 1, color=c) for said, c in _COLOURS.items() if said]
    axes.legend(handles, [said for said in _COLOURS if said], **_ABOVE, ncols=4)
    return svg(figure, f"waterfall {block}")


def ttft_split(document: Mapping[str, Any], block: str) -> str:
    """Mean TTFT under load: the queue as measured, the rest in the parts of a lone prompt's."""
    charts = document["charts"][block]
    whole = {n: s for n, s in document["split"].items() if n in charts and "parts" in s}
    plot = pyplot()
    figure, axes = plot.subplots(figsize=(8, 0.36 * len(whole) + 1.2))
    for y, (name, one) in enumerate(whole.items()):
        total = sum(one["parts"].values()) or 1.0
        widths = [charts[name]["queue_ms"]]
        widths += [charts[name]["prefill_ms"] * one["parts"][part] / total for part in PARTS]
        left = 0.0
        for width, colour in zip(widths, _PART_COLOURS, strict=True):
            axes.barh(y, width, left=left, color=colour, height=0.7)
            left += width
    axes.set_yticks(range(len(whole)), whole)
    axes.invert_yaxis()
    axes.set_xlabel("mean TTFT, ms")
    handles = [plot.Rectangle((0, 0), 1, 1, color=colour) for colour in _PART_COLOURS]
    names = ["queue", *PARTS]
    axes.legend(handles, names, **_ABOVE, ncols=4)
    return svg(figure, f"split {block}")


def occupancy(document: Mapping[str, Any], block: str) -> str:
    """The share of the KV pool that is held, over the first run of each arm that stays."""
    figure, axes = pyplot().subplots(figsize=(8, 3.2))
    for name, chart in _kept(document, block).items():
        looks = chart["occupancy"]
        times = [look[0] for look in looks]
        axes.plot(times, [look[1] / chart["room_tokens"] for look in looks], label=name, lw=1)
    axes.set_xlabel("s")
    axes.set_ylabel("share of the pool held")
    axes.set_ylim(0, 1.05)
    axes.legend(**_ABOVE, fontsize=7, ncols=6)
    return svg(figure, f"occupancy {block}")


def distributions(document: Mapping[str, Any], block: str) -> str:
    """CDFs of TTFT and ITL of each arm that stays."""
    figure, both = pyplot().subplots(1, 2, figsize=(8, 3.2), sharey=True)
    ticker = importlib.import_module("matplotlib.ticker")
    for axes, name in zip(both, ("ttft_ms", "itl_ms"), strict=True):
        for arm, chart in _kept(document, block).items():
            if chart[name]:
                axes.plot(chart[name], [p / 100 for p in range(101)], label=arm, lw=1)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        axes.set_xlabel({"ttft_ms": "TTFT, ms", "itl_ms": "ITL, ms"}[name])
    both[0].set_ylabel("share of requests, of gaps")
    lines = both[0].get_legend_handles_labels()
    figure.legend(*lines, **{**_ABOVE, "bbox_to_anchor": (0.5, 0.9)}, fontsize=7, ncols=6)
    return svg(figure, f"distributions {block}")


def _kept(document: Mapping[str, Any], block: str) -> dict[str, Any]:
    charts = document["charts"][block]
    names: Seq[str] = [arm["name"] for arm in document["ladder"] if arm["stays"]]
    return {name: charts[name] for name in names if name in charts}
