"""The ladder as data: each rung is one change of the configuration below it.

A configuration is a mapping of the names that the command line knows: fields of `RunConfig`, and
options of offers as `seam.option`. What a rung changes is one *variable*: a field, an option, or
the choice of an offer, together with options that the offer before does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence as Seq
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from core.config import RunConfig, did_you_mean, parse_setting
from core.errors import UserError
from core.plan import DEFAULTS, resolve
from core.registry import Registry
from core.seams import SEAMS

if TYPE_CHECKING:
    from core.plan import Plan

Choices = Mapping[str, Any]

BASELINE: Choices = {
    "kv": "contiguous",
    "fusion": "none",
    "graphs": "none",
    "overlap": False,
    "sched": "fifo",
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "preemption": "recompute",
}
BASE = "baseline"
_NAME = re.compile(r"[\w=.+-]+")


class Added(str):
    """A value that is put at the end of a list, which begins empty."""


class Rung(NamedTuple):
    """One change. `device` is what it needs, None: any; a branch (`stays` False) is measured beside
    the rung below it and the ladder goes on without it.

    `is_pressed`: its effect shows where requests compete, so that it is measured there too.
    `is_lone`: it is about single requests, and measured with one at a time only.
    `rests_on`: a rung without which it does harm, and is left out too.
    """

    name: str
    change: Mapping[str, Any]
    about: str
    device: Literal["cpu", "cuda"] | None = None
    stays: bool = True
    is_pressed: bool = False
    is_lone: bool = False
    is_default: bool = True
    rests_on: str | None = None


class Arm(NamedTuple):
    """A configuration that is measured. `before` is the arm that it is compared with."""

    name: str
    choices: Choices
    before: str | None = None
    rung: Rung | None = None


class Ladder(NamedTuple):
    """What is measured, the baseline first, and why the rest is not, by name."""

    arms: list[Arm]
    left_out: dict[str, str]

    def arm(self, name: str | None) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def kept(self) -> list[Arm]:
        """From the baseline to the top, without branches."""
        return [arm for arm in self.arms if arm.rung is None or arm.rung.stays]

    @property
    def top(self) -> Arm:
        return self.kept[-1]


# -------- the ladder of the article


def all_rungs(chunk_size: int) -> list[Rung]:
    """Every rung for every device, from the bottom to the top."""
    return [
        Rung("paged", {"kv": "paged"}, "keys and values in blocks instead of one row a sequence"),
        *_block_sizes(),
        Rung("prefix", {"enable_prefix_caching": True}, "blocks of equal prefixes are shared"),
        Rung(
            "chunked",
            {"enable_chunked_prefill": True},
            "a prompt takes what a step has left, instead of a step that holds it whole",
            is_pressed=True,
        ),
        Rung(
            f"chunk={chunk_size}",
            {"chunk_size": chunk_size},
            "most tokens of a prompt in a step",
            is_pressed=True,
        ),
        Rung(
            "chunk=off",
            {"chunk_size": None},
            "the same without a limit, one request at a time",
            stays=False,
            is_lone=True,
        ),
        *_fusions(),
        *_graphs(),
        Rung(
            "shortest",
            {"sched": "shortest"},
            "the least prompt work first",
            stays=False,
            is_pressed=True,
            is_default=False,
        ),
        Rung("aging", {"sched": "aging"}, "short prompts first, waiting counts", is_pressed=True),
        Rung(
            "rate=0.3",
            {"sched.rate_fraction": 0.3},
            "what waiting counts, as a share of the prefill speed (before: 0.1)",
            stays=False,
            is_pressed=True,
            is_default=False,
        ),
        Rung(
            "swap",
            {"preemption": "swap"},
            "a victim's keys go to the host instead of being computed again",
            is_pressed=True,
        ),
        Rung("paged_int8", {"kv": "paged_int8"}, "keys and values in INT8"),
    ]


def _block_sizes() -> Iterator[Rung]:
    for size in (8, 32, 64):
        about = "tokens of a block (before: 16)"
        is_default = size == 32
        yield Rung(
            f"block={size}", {"kv.block_size": size}, about, stays=False, is_default=is_default
        )


def _fusions() -> Iterator[Rung]:
    """For each device its set as a whole, and span by span, of which a ladder has one."""
    sets: tuple[tuple[Literal["cpu", "cuda"], str], ...] = tuple(
        zip(("cpu", "cuda"), DEFAULTS["fusion"], strict=True)
    )
    for device, fusion in sets:
        yield Rung(f"fusion={fusion}", {"fusion": fusion}, "spans of nodes fused", device)
    for device, fusion in sets:
        config: Any = Registry().find("fusion", fusion).load()
        for name in config.Config.names:
            change = {"fusion": fusion, "fusion.only": Added(name)}
            about = f"one more span of {fusion}"
            yield Rung(f"span={name}", change, about, device, is_default=False)


def _graphs() -> Iterator[Rung]:
    yield Rung("graphs=full", {"graphs": "full"}, "steps captured and replayed", "cuda")
    about = "a step planned and launched while the device runs the one before it"
    yield Rung("overlap", {"overlap": True}, about, "cuda", rests_on="graphs=full")
    for name in ("decode", "piecewise"):
        yield Rung(
            f"graphs={name}",
            {"graphs": name},
            "beside `full`: fewer steps captured, or less of each",
            "cuda",
            stays=False,
            is_default=False,
        )


def chosen(rungs: Seq[Rung], patterns: Seq[str] | None) -> list[Rung]:
    """Those that `patterns` (of a shell; "all") name, in the order of the ladder; None: the default
    ones. Raises UserError for a pattern that names none."""
    if patterns is None:
        return [rung for rung in rungs if rung.is_default]
    names = list(dict.fromkeys(rung.name for rung in rungs))
    wanted = ["*" if pattern == "all" else pattern for pattern in patterns]
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"there is no rung '{pattern}'{did_you_mean(pattern, names)}")
    found = [r for r in rungs if any(fnmatchcase(r.name, pattern) for pattern in wanted)]
    if any(rung.name.startswith("span=") for rung in found):  # in place of the set as a whole
        found = [r for r in found if not r.name.startswith("fusion=") or r.name in wanted]
    return found


def base_of(given: Choices) -> Choices:
    """The baseline with what was `given` in its place; graphs bring their own overlap with them."""
    mine = {"overlap": None} if given.get("graphs", "none") != "none" else {}
    return {**BASELINE, **mine, **given}


def own_rung(text: str) -> Rung:
    """NAME=FIELD=VALUE, or with more `,FIELD=VALUE` behind it, as a rung."""
    name, _, rest = text.partition("=")
    if not _NAME.fullmatch(name) or "=" not in rest:
        raise UserError(f"--arm takes NAME=FIELD=VALUE (as in mine=kv.block_size=32), not '{text}'")
    return Rung(name, assignments(rest), "given by --arm", is_pressed=True)


def assignments(text: str) -> dict[str, Any]:
    """FIELD=VALUE,FIELD=VALUE as a mapping; a value is JSON if it parses, else text."""
    found = {}
    for part in re.split(r",(?=[\w.]+=)", text):
        field, equals, _ = part.partition("=")
        if not equals:
            raise UserError(f"'{part}' is no assignment: write FIELD=VALUE")
        if "." not in field and (field not in RunConfig.model_fields or field == "settings"):
            known = [name for name in RunConfig.model_fields if name != "settings"]
            raise UserError(f"a run has no field '{field}'{did_you_mean(field, known)}")
        value = parse_setting(part if "." in field else f".{part}")[1]
        found[field] = value
    return found


# -------- from rungs to arms


def engine_fields(choices: Choices) -> dict[str, Any]:
    """Arguments of an Engine."""
    fields = {name: value for name, value in choices.items() if "." not in name}
    return fields | {"settings": {name: v for name, v in choices.items() if "." in name}}


def changed(
    choices: Choices, change: Mapping[str, Any], common: Mapping[str, Any]
) -> dict[str, Any]:
    """`choices` after `change`. Options of an offer that is replaced stay where the new one has
    them too."""
    found = dict(choices)
    for name, value in change.items():
        if name in SEAMS and value != found.get(name):
            registry = Registry(tuple(common.get("plugins", ())))
            offer: Any = registry.find(name, value).load() if isinstance(value, str) else value
            known = {f"{name}.{option}" for option in offer.Config.model_fields}
            found = {k: v for k, v in found.items() if k.partition(".")[0] != name or k in known}
        if isinstance(value, Added):
            value = [*found.get(name, ()), str(value)]
        found[name] = value
    return found


def plan_of(choices: Choices, common: Mapping[str, Any]) -> Plan:
    """What an engine of these choices would be. Raises UserError with all that speaks against."""
    config = RunConfig.of(**{**common, **engine_fields(choices)})
    return resolve(config, Registry(config.plugins))


def differences(before: Plan, after: Plan) -> list[str]:
    """The variables by which two runs differ, after every default has been filled in."""
    found = []
    for name in RunConfig.model_fields:
        if name not in (*SEAMS, "settings"):
            if getattr(before.config, name) != getattr(after.config, name):
                found.append(name)
    for one, other in zip(before.choices, after.choices, strict=True):
        options, others = (c.config.model_dump() if c.config else {} for c in (one, other))
        common = [name for name in options if name in others]
        found += [one.seam] if one.name != other.name else []
        found += [f"{one.seam}.{name}" for name in common if options[name] != others[name]]
    return found


def build(
    base: Choices, rungs: Iterable[Rung], common: Mapping[str, Any], *, device: str
) -> Ladder:
    """The ladder over `base` of all `rungs` that run on `device` ("cpu" or "cuda").

    `common` are the fields that all arms share. Raises UserError where the baseline does not run,
    where a rung changes more than one variable, or where two have one name.
    """
    below = Arm(BASE, dict(base))
    plans = {BASE: plan_of(base, common)}
    ladder = Ladder([below], {})
    for rung in rungs:
        if rung.name in plans or rung.name in ladder.left_out:
            raise UserError(f"two arms are called '{rung.name}': give each its own name")
        if rung.device not in (None, device):
            ladder.left_out[rung.name] = f"needs {rung.device}, and the device is {device}"
            continue
        try:
            choices = changed(below.choices, rung.change, common)
            plan = plan_of(choices, common)
        except UserError as error:
            ladder.left_out[rung.name] = str(error)
            continue
        variables = differences(plans[below.name], plan)
        if not variables:
            ladder.left_out[rung.name] = f"it changes nothing of '{below.name}' here"
            continue
        if len(variables) > 1:
            raise UserError(
                f"'{rung.name}' changes {len(variables)} variables of '{below.name}' at once "
                f"({', '.join(variables)}): make an arm of each"
            )
        plans[rung.name] = plan
        arm = Arm(rung.name, choices, below.name, rung)
        ladder.arms.append(arm)
        below = arm if rung.stays else below
    return ladder


def without(
    ladder: Ladder, name: str, common: Mapping[str, Any], *, device: str
) -> tuple[Arm | str, Arm | str]:
    """The top without the rung `name` and what rests on it, and the baseline with it alone; for
    each the reason where there is no such configuration, or it would say nothing of the rung."""
    rungs = [arm.rung for arm in ladder.kept if arm.rung is not None]
    others = (rung for rung in rungs if name not in (rung.name, rung.rests_on))
    rest = build(ladder.arms[0].choices, others, common, device=device)
    less: Arm | str = rest.top._replace(name=f"without {name}", rung=None, before=None)
    if rest.left_out:
        other, why = next(iter(rest.left_out.items()))
        less = f"then '{other}' is not to be had: {why}"
    elif rest.top.choices == ladder.top.choices:
        less = "a rung above it sets the same variable: the top is the same without"
    return less, _alone(ladder, name, common, device)


def _alone(ladder: Ladder, name: str, common: Mapping[str, Any], device: str) -> Arm | str:
    arm, base = ladder.arm(name), ladder.arms[0]
    assert arm.rung is not None, "the baseline is no rung"
    below = ladder.arm(arm.before)
    change = arm.rung.change
    if arm.rung.rests_on is not None:
        return f"it rests on '{arm.rung.rests_on}'"
    if not any(isinstance(value, Added) for value in change.values()):
        for field in change:
            if base.choices.get(field) != below.choices.get(field):
                return f"it would be another change, since '{base.name}' has another {field}"
    made = build(base.choices, [arm.rung], common, device=device)
    if made.left_out:
        return made.left_out[name]
    return made.top._replace(name=f"alone {name}", rung=None, before=None)
