"""Arms of a comparison: measured in turn, against a base that runs twice.

A round measures every arm once, forwards and backwards in turn (ABBA), so that what the machine
does meanwhile meets all of them. The base has a second arm, the A/A control: how far the two are
apart is what a difference between other arms must exceed to be one.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from core.config import versions
from core.errors import RunError, UserError
from core.show import progress_bar
from evals import records

if TYPE_CHECKING:
    import argparse

    from core.engine import Engine

Figures = dict[str, dict[str, list[float]]]  # figure -> arm -> a value of every round


def in_turn(names: Iterable[str], i: int) -> list[str]:
    """The order of round `i`."""
    order = list(names)
    return order[::-1] if i % 2 else order


def build(args: argparse.Namespace, **choices: Any) -> Engine:
    """An engine for the steps that are measured; `choices` are what sets its arm apart."""
    from core.engine import Engine

    return Engine(
        model=args.model,
        device=args.device,
        max_model_len=max(*args.prefill, args.context) + 128,
        max_num_seqs=max(args.batch),
        max_num_batched_tokens=max(*args.prefill, *args.batch),
        kv_cache_bytes=args.kv_cache_bytes,
        enable_prefix_caching=False,
        **choices,
    )


def side_by_side(
    arms: Mapping[str, Callable[[], Engine]],
    measure: Callable[[Engine, int], Mapping[str, float]],
    num_rounds: int,
    *,
    rebuild: bool = False,
    left_out: dict[str, str] | None = None,
) -> Figures:
    """What `measure(engine, round)` says of every arm in every round.

    All engines live at once, or with `rebuild` one at a time. An arm that raises UserError or
    RunError is put into `left_out` with the reason; where that is None the error goes through.
    """
    found: Figures = defaultdict(lambda: defaultdict(list))
    engines: dict[str, Engine] = {}
    lost: set[str] = set()

    def start(name: str) -> None:
        engines[name] = stack.enter_context(arms[name]())

    def look(name: str, i: int) -> None:
        with arms[name]() if rebuild else nullcontext(engines[name]) as engine:
            for figure, value in measure(engine, i).items():
                found[figure][name].append(value)

    def attempt(work: Callable[..., None], name: str, *rest: int) -> None:
        try:
            if name not in lost:
                work(name, *rest)
        except (UserError, RunError) as error:
            if left_out is None:
                raise
            left_out[name] = str(error)
            lost.add(name)

    with ExitStack() as stack, progress_bar(sys.stderr) as progress:
        for i, name in enumerate(() if rebuild else arms):
            progress("build", i, len(arms))
            attempt(start, name)
        for i in range(num_rounds):
            for name in in_turn(arms, i):
                attempt(look, name, i)
            progress("measure", i + 1, num_rounds)
    whole = {figure: {n: v for n, v in by.items() if n not in lost} for figure, by in found.items()}
    return {figure: by_arm for figure, by_arm in whole.items() if by_arm}


def noise(base: list[float], again: list[float]) -> float:
    """The A/A spread, as the factor of 1 or more within which nine in ten rounds, and the medians,
    of the two arms are equal."""
    logs = np.abs(np.log(np.array(again) / np.array(base)))
    middle = abs(math.log(statistics.median(again) / statistics.median(base)))
    return math.exp(max(float(np.quantile(logs, 0.9)), middle))


def verdict(ratio: float, spread: float | None, *, more_is_better: bool = False) -> str:
    """What a ratio to the base says, given the A/A spread (None: there is no control)."""
    if spread is None:
        return "no control"
    if 1 / spread <= ratio <= spread:
        return "no change"
    return "faster" if (ratio > 1) == more_is_better else "slower"


def compared(
    found: Mapping[str, Mapping[str, list[float]]],
    base: str,
    again: str,
    more_is_better: Container[str] = (),
) -> list[dict[str, Any]]:
    """A row for each figure and arm: median, spread (largest less smallest, over the median), ratio
    of its median to the base's, and the verdict. `more_is_better` has the figures of that kind."""
    rows = []
    for figure, by_arm in found.items():
        middle = statistics.median(by_arm[base])
        spread = noise(by_arm[base], by_arm[again]) if again in by_arm else None
        for arm, values in by_arm.items():
            median = statistics.median(values)
            said = verdict(median / middle, spread, more_is_better=figure in more_is_better)
            rows.append(
                {
                    "figure": figure,
                    "arm": arm,
                    "median": median,
                    "spread": (max(values) - min(values)) / median,
                    "ratio": median / middle,
                    "control": spread,
                    "verdict": {base: "base", again: "control"}.get(arm, said),
                }
            )
    return rows


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """A row of `compared` for people."""
    control = row["control"]
    return {
        "figure": row["figure"],
        "arm": row["arm"],
        "median": f"{row['median']:.4g}",
        "spread": f"{row['spread']:.1%}",
        "x base": f"{row['ratio']:.3f}",
        "A/A within": "-" if control is None else f"{control:.3f}",
        "verdict": row["verdict"],
    }


def on_cpu(device: str | None) -> bool:
    """Whether `device`, as it was given or left open, means the CPU."""
    import torch

    return device == "cpu" or not torch.cuda.is_available()


def where(device: str | None) -> dict[str, Any]:
    """What the figures were measured on: machine, device, versions."""
    import torch

    name = "cpu" if on_cpu(device) else torch.cuda.get_device_name(device or "cuda")
    return {"machine": records.machine(), "device_name": name, "versions": versions()}
