"""What the steps of a ladder did: faster, slower, no change, or that it cannot be said.

The rule, for each step, by its 95 % interval and the p of its t-test:

1. the control (the base measured twice) moved: inconclusive, for every step of the study whose
   interval is not farther from 1 than that of the control reaches;
2. the interval lies within 1/1.03 .. 1.03: no change. That is two one-sided tests at 2.5 % each; an
   effect that is there but smaller than the margin is no change too, and its sentence says so;
3. p, corrected for the number of steps, is below 0.05: faster or slower;
4. else inconclusive: more pairs may tell (`evals.speed.replication`).

The control speaks of what its two runs of the base and the other arms have in common: a machine
that heats up, a base that was slow at first. What is peculiar to an arm, such as where its engine
happened to be put in memory, it cannot show, whether it moved or not; new engines for each run
(`--rebuild` of evals.speed.ablate) can.

Holm's correction (Scandinavian J. of Statistics 6, 1979) holds whatever the steps share, and
neighbours in a ladder share an arm: if nothing changed at all, one study in twenty has a step that
is called faster or slower. The correction is of step 3 only; each "no change" errs by itself, for
at most one step in forty that lies at the margin.

What ten pairs can say (tests/test_statistics.py; machines that drift, one run in a hundred an
outlier), where runs differ by 1, 2 and 3 %: of a step that does nothing "no change" in 84, 54 and
13 of 100 studies and else nearly always "inconclusive"; of one that costs 10 % "slower" in 97, 96
and 93, else "inconclusive"; of one that costs 3 %, the margin itself, "no change" in 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np

from evals.speed.paired import CONFIDENCE, MARGIN, Ratio, Said, stacked

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Together = Literal["adds up", "interaction", "inconclusive"]


class Finding(NamedTuple):
    """One comparison for people and for records: ratio and its 95 % interval, p of "equal" after
    Holm's correction, p of "outside the margin", the verdict, and one sentence with the numbers."""

    name: str
    ratio: float
    low: float
    high: float
    num_units: int
    p_equal: float
    p_outside: float
    verdict: Said | Together
    sentence: str


def holm(p: ArrayLike) -> NDArray[np.float64]:
    """`p` [..., tests] corrected over the last axis: below α where Holm's procedure rejects."""
    found = np.asarray(p, float)
    num = found.shape[-1]
    order = np.argsort(found, -1)
    scaled = np.take_along_axis(found, order, -1) * np.arange(num, 0, -1)
    corrected = np.minimum(np.maximum.accumulate(scaled, -1), 1)
    return np.take_along_axis(corrected, np.argsort(order, -1), -1)


def has_moved(control: Ratio, margin: float = MARGIN) -> NDArray[np.bool_]:
    """Whether the base differs from itself: its interval excludes 1 by more than the noise, one
    standard error, and does not lie within the margin.

    An interval that barely excludes 1 is what chance does to one control in twenty; one that lies
    within the margin is too small a shift to matter to verdicts of that margin.
    """
    gap = np.abs(control.log_mean) - control.half
    return (gap > control.error) & ~control.is_inside(margin)


def is_beyond(steps: Ratio, control: Ratio) -> NDArray[np.bool_]:
    """Whether the intervals of `steps` [..., steps] are farther from 1, on either side, than that
    of their `control` [...] reaches: the same shift in a step would explain less."""
    reach = np.abs(control.log_mean) + control.half
    return np.asarray(np.abs(steps.log_mean) - steps.half > reach[..., None])


def decide(
    steps: Ratio, control: Ratio, *, margin: float = MARGIN, more_is_better: bool = False
) -> NDArray[np.str_]:
    """Verdicts (`Said`) of `steps` [..., steps], given the `control` [...] of their study."""
    words = get_args(Said)
    is_better = (steps.log_mean > 0) == more_is_better
    is_sure = holm(steps.p_equal) < 1 - CONFIDENCE
    is_void = has_moved(control, margin)[..., None] & ~is_beyond(steps, control)
    cases = [is_void, steps.is_inside(margin), is_sure & is_better]
    shape = steps.log_mean.shape
    chosen = np.select([np.broadcast_to(c, shape) for c in [*cases, is_sure]], [3, 2, 0, 1], 3)
    said: NDArray[np.str_] = np.array(words)[chosen]
    return said


def judged(
    steps: Mapping[str, Ratio],
    control: Ratio,
    *,
    margin: float = MARGIN,
    more_is_better: bool = False,
) -> list[Finding]:
    """A Finding for every step of a ladder, corrected together.

    A step is `evals.speed.paired.paired` of its arm to the base or to the arm before, and `control`
    that of the base's second arm to the base.
    """
    table = stacked(steps.values())
    said = decide(table, control, margin=margin, more_is_better=more_is_better)
    moved, beyond = bool(has_moved(control, margin)), is_beyond(table, control)
    findings = []
    for i, (name, step) in enumerate(steps.items()):
        word, p = said[i].item(), float(holm(table.p_equal)[i])
        findings.append(
            Finding(
                name=name,
                ratio=float(step.ratio),
                low=float(step.low),
                high=float(step.high),
                num_units=int(step.num_units),
                p_equal=p,
                p_outside=float(step.p_outside(margin)),
                verdict=word,
                sentence=_void(control)
                if moved and not beyond[i]
                else _sentence(step, p, word, margin, len(steps), control if moved else None),
            )
        )
    return findings


def interactions(
    steps: Mapping[str, Ratio], control: Ratio, *, margin: float = MARGIN
) -> list[Finding]:
    """A Finding for every step's `evals.speed.paired.interaction`, corrected together.

    "interaction" where the step's effect in the full ladder and its effect alone differ, "adds up"
    where they are equal within the margin.
    """
    words: dict[str, Together] = {"no change": "adds up", "inconclusive": "inconclusive"}
    findings = []
    for found in judged(steps, control, margin=margin):
        said = words.get(found.verdict, "interaction")
        text = found.sentence.removeprefix(found.verdict)
        findings.append(found._replace(verdict=said, sentence=said + text))
    return findings


def _numbers(ratio: Ratio) -> str:
    return f"{ratio.ratio:.3f}x [{ratio.low:.3f}, {ratio.high:.3f}] (n = {ratio.num_units})"


def _sentence(
    step: Ratio, p: float, said: Said, margin: float, num_steps: int, moved: Ratio | None
) -> str:
    """`moved` is the control where it has."""
    whole = f"{said}: {_numbers(step)}, {_why(step, p, said, margin, num_steps)}"
    if moved is not None:
        whole += f", and more than the control moved, {_numbers(moved)}"
    return whole


def _void(control: Ratio) -> str:
    return f"inconclusive: the control moved, {_numbers(control)}; find out why and measure again"


def _why(step: Ratio, p: float, said: Said, margin: float, num_steps: int) -> str:
    excludes = float(step.p_equal) < 1 - CONFIDENCE
    if said == "no change":
        return f"within {margin:.0%}" + (", though not 1" if excludes else "")
    if said != "inconclusive":
        return f"p = {p:.2g} over {num_steps} steps"
    if excludes:
        return f"which excludes 1, but not over {num_steps} steps (p = {p:.2g}); measure more pairs"
    return f"which is neither apart from 1 nor within {margin:.0%}; measure more pairs"
