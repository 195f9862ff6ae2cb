"""The two arms that write: an engine of the reference, then one of the offer, on the same prompts.

They run one after the other, so that each has the memory for itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from core.config import parse_setting
from core.errors import RunError, UserError
from evals.quality.verdicts import Limits, limits_of

if TYPE_CHECKING:
    from core.engine import Engine, RequestOutput
    from core.sampling import SamplingParams
    from core.show import Progress

_T = TypeVar("_T")
_Made = TypeVar("_Made")
Settings = Mapping[str, Any]
CUDA_BYTES = "4GiB"  # a share of the GPU would leave nothing to the next engine
_BATCH = 64  # requests between two moves of the progress bar; more where a step has more rows


class Arm(NamedTuple):
    """An offer in question, under the name that a record has for it, with settings of all seams."""

    label: str
    kv: str
    settings: Settings

    def build(self, args: argparse.Namespace, progress: Progress, **options: Any) -> Engine:
        return build(args, self.kv, self.settings, progress, **options)


class Arms(NamedTuple):
    """The arguments of the command, and the settings of each arm, those of other seams in all."""

    args: argparse.Namespace
    of_base: Settings
    others: tuple[Arm, ...]

    @classmethod
    def of(cls, args: argparse.Namespace, settings: Settings, of_base: Settings) -> Arms:
        """Raises UserError where an arm is named twice, or an option has no arm that it is of."""
        if wrong := [key for key in of_base if not key.startswith("kv.")]:
            raise UserError(f"--set-against takes options of kv, not {wrong[0]}: give it to --set")
        of_kv = [key for key in settings if key.startswith("kv.")]
        if of_kv and len(args.kv) > 1:
            option = of_kv[0].removeprefix("kv.")
            what = f"--set {of_kv[0]} is an option of one kv and {len(args.kv)} are given"
            raise UserError(f"{what}: write --kv NAME:{option}=VALUE")
        if twice := [text for text in args.kv if args.kv.count(text) > 1]:
            raise UserError(f"--kv names {twice[0]} twice: name each once")
        shared = {k: v for k, v in settings.items() if not k.startswith("kv.")}
        others = tuple(
            Arm(text, name, {**settings, **own}) for text in args.kv for name, own in [_named(text)]
        )
        return cls(args, {**shared, **of_base}, others)

    @property
    def label(self) -> str:
        """Of all arms in question."""
        return ", ".join(arm.label for arm in self.others)

    def base(self, progress: Progress, **options: Any) -> Engine:
        return build(self.args, self.args.against, self.of_base, progress, **options)

    def other(self, progress: Progress, **options: Any) -> Engine:
        """Of the first arm; parts in which the arms write have no other."""
        return self.others[0].build(self.args, progress, **options)


def _named(text: str) -> tuple[str, dict[str, Any]]:
    """NAME, or NAME:FIELD=VALUE,… as the name and its settings."""
    name, colon, options = text.partition(":")
    parts = options.split(",") if colon else []
    if wrong := [part for part in parts if "=" not in part]:
        raise UserError(f"--kv takes NAME or NAME:FIELD=VALUE,…, not {text}: mend {wrong[0]!r}")
    return name, dict(parse_setting(f"kv.{part}") for part in parts)


class Both(NamedTuple):
    """What both arms made of the same prompts, the limits of the offer, reports of the engines."""

    base: Any
    other: Any
    limits: Limits
    reports: dict[str, Any]


def build(
    args: argparse.Namespace, kv: Any, settings: Settings, progress: Progress, **options: Any
) -> Engine:
    """An engine with a kv offer; `options` are arguments of Engine, before those of `args`."""
    from core.engine import Engine

    on_cuda = _on_cuda(args)
    given = {
        "model": args.model,
        "kv": kv,
        "settings": settings,
        "plugins": tuple(args.plugins),
        "device": args.device,
        "dtype": args.dtype,
        "kv_cache_bytes": args.kv_cache_bytes or (CUDA_BYTES if on_cuda else None),
        "seed": args.seed,
    }
    name = getattr(kv, "__name__", kv)
    shown: Progress = lambda stage, done, total: progress(f"{stage} {name}", done, total)  # noqa: E731
    return Engine(progress=shown, **{**given, **options})


def unpacked(args: argparse.Namespace, dtype: str | None, settings: Settings) -> Settings:
    """Settings of an engine that reads and does not write, `settings` before its own.

    A second copy of the weights, in oneDNN's layout, would pay for itself in steps of few rows. It
    stands where `auto` is `onednn` (core.plan.DEFAULTS).
    """
    packs = not _on_cuda(args) and dtype != "float16"
    return {"fusion.pack": False, **settings} if packs else settings


def _on_cuda(args: argparse.Namespace) -> bool:
    import torch

    return torch.cuda.is_available() if args.device is None else bool(args.device != "cpu")


def both(
    arms: Arms,
    make: Callable[[Engine], _Made],
    write: Callable[[Engine, _Made, str], _T],
    progress: Progress,
    longest: tuple[str, int],
    **options: Any,
) -> tuple[_Made, Both]:
    """`make(engine)` the items with the reference's tokenizer; `write(engine, items, arm)` in both.

    `longest` is how many tokens a sequence has at most, after the option of the command that says
    so; `--batch` of them run at once.
    """
    option, num_tokens = longest
    args = arms.args
    given = {"max_model_len": num_tokens, "max_num_seqs": args.batch, "preemption": args.preemption}
    given |= options
    try:
        with arms.base(progress, **given) as engine:
            items = make(engine)
            base = write(engine, items, "reference")
            reports = {f"{args.against} (reference)": engine.report()}
        with arms.other(progress, **given) as engine:
            limits = limits_of(engine.plan.kv.offer, str(engine.config.dtype))
            other = write(engine, items, "other")
            reports[arms.label] = engine.report()
    except UserError as error:  # which names the engine's own option
        raise UserError(str(error).replace("--max-model-len", option)) from error
    return items, Both(base, other, limits, reports)


def written(
    engine: Engine,
    prompts: Seq[Seq[int]],
    params: Seq[SamplingParams],
    progress: Progress,
    stage: str,
) -> list[RequestOutput]:
    """What follows each prompt. Raises RunError where a request fails, which is no bad answer."""
    size = max(_BATCH, engine.limits.max_num_seqs)
    outputs: list[RequestOutput] = []
    progress(stage, 0, len(prompts))
    for start in range(0, len(prompts), size):
        end = start + size
        outputs += engine.generate(list(prompts[start:end]), params[start:end], progress=False)
        if failed := next((o.error for o in outputs[start:] if o.error), None):
            raise RunError(f"a request of {stage} failed, which is no wrong answer: {failed}")
        progress(stage, len(outputs), len(prompts))
    return outputs
