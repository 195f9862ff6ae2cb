"""Curves and heat maps of a record as SVG, for a page that needs nothing beside itself."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator, Mapping, Sequence as Seq
from typing import Any

from core.errors import explained

_BLUE, _ORANGE, _GREY = "#1f77b4", "#d55e00", "#777777"
_TINY = 1e-12  # nats; where a divergence of 0 stands on a logarithmic axis


def pyplot() -> Any:
    """matplotlib without a screen. Raises UserError where it cannot be imported."""
    with explained("the report cannot be drawn", "pip install 'outweigh[quality]' brings it"):
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")


def figures(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(title, SVG) of every picture that the parts of a record give."""
    plot = pyplot()
    if comparisons := record.get("comparisons"):
        yield "KL by position", _by_position(plot, comparisons, "mean_kl", "KL in nats", log=True)
        title, label = "Difference of the loss by position", "nats"
        yield title, _by_position(plot, comparisons, "delta_nats", label, log=False)
    if part := record.get("generation"):
        yield "How long texts stay the same", _survival(plot, part["temperatures"])
        yield "Repetition, text by text", _repetition(plot, part["temperatures"])
    for kind, row in record.get("recall", {}).get("kinds", {}).items():
        yield f"Recall: {kind}", _heat_map(plot, row["cells"])


def _svg(plot: Any, figure: Any) -> str:
    """The drawing alone: what matplotlib puts before it is of a file. Ids follow from the drawing,
    not from chance, so that the same record gives the same page."""
    text = io.StringIO()
    with plot.rc_context({"svg.hashsalt": "outweigh", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    plot.close(figure)
    found = text.getvalue()
    return found[found.index("<svg") :]


def _by_position(
    plot: Any, comparisons: Mapping[str, Any], name: str, label: str, log: bool
) -> str:
    figure, axes = plot.subplots(figsize=(7, 3.5))
    for i, (what, numbers) in enumerate(comparisons.items()):
        colour = _GREY if what == "noise_floor" else f"C{i}"
        rows = numbers["buckets"]
        places = [(row["first"] + row["last"] + 1) / 2 for row in rows]
        values = [row[name] for row in rows]
        ends = [row[f"{name}_interval"] for row in rows]
        lows, highs = ([end[i] for end in ends] for i in (0, 1))
        if log:
            values, lows, highs = ([max(_TINY, x) for x in xs] for xs in (values, lows, highs))
        title = f"noise floor: {numbers['other']}" if colour == _GREY else numbers["other"]
        axes.plot(places, values, "o-", color=colour, label=title)
        axes.fill_between(places, lows, highs, color=colour, alpha=0.2)
    axes.set_xscale("log", base=2)
    if log:
        axes.set_yscale("log")
    else:
        axes.axhline(0, color="black", linewidth=0.5)
    axes.set(xlabel="position in tokens", ylabel=label)
    axes.legend()
    return _svg(plot, figure)


def _survival(plot: Any, parts: Seq[Mapping[str, Any]]) -> str:
    figure, axes = plot.subplots(figsize=(7, 3.5))
    for part, colour in zip(parts, (_BLUE, _ORANGE, _GREY), strict=False):
        rows = part["survival"]
        places = [row["tokens"] for row in rows]
        axes.step(places, [row["share"] for row in rows], where="post", color=colour,
                  label=f"temperature {part['temperature']:g}, n = {part['n']}")  # fmt: skip
        lows, highs = ([row["interval"][i] for row in rows] for i in (0, 1))
        axes.fill_between(places, lows, highs, step="post", color=colour, alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens", ylabel="share of texts still the same", ylim=(-0.02, 1.02))
    axes.legend()
    return _svg(plot, figure)


def _repetition(plot: Any, parts: Seq[Mapping[str, Any]]) -> str:
    figure, axes = plot.subplots(figsize=(4.2, 4.2))
    for part, colour in zip(parts, (_BLUE, _ORANGE, _GREY), strict=False):
        pairs = [[row[arm]["rep4"] for row in part["texts"]] for arm in ("reference", "other")]
        axes.scatter(*pairs, s=12, alpha=0.6, color=colour, label=f"T = {part['temperature']:g}")
    axes.plot((0, 1), (0, 1), color="black", linewidth=0.5)
    axes.set(xlabel="rep-4, reference", ylabel="rep-4, other", xlim=(0, 1), ylim=(0, 1))
    axes.legend()
    return _svg(plot, figure)


def _heat_map(plot: Any, cells: Seq[Mapping[str, Any]]) -> str:
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    figure, both = plot.subplots(1, 2, figsize=(8, 0.6 * len(lengths) + 1.8))
    for axes, arm in zip(both, ("reference", "other"), strict=True):
        shares = [[float("nan")] * len(depths) for _ in lengths]
        for cell in cells:
            at = lengths.index(cell["length"]), depths.index(cell["depth"])
            shares[at[0]][at[1]] = cell[arm] / cell["n"]
            axes.text(at[1], at[0], f"{cell[arm]}/{cell['n']}", ha="center", va="center", size=8)
        axes.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto", alpha=0.7)
        axes.set_xticks(range(len(depths)), [f"{depth:g}" for depth in depths])
        axes.set_yticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set(title=arm, xlabel="depth", ylabel="tokens")
    figure.tight_layout()
    return _svg(plot, figure)
