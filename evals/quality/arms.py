"""The two arms that write: an engine of the reference, then one of the offer, on the same prompts.

They run one after the other, so that each has the memory for itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

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


class Arms(NamedTuple):
    """The arguments of the command, and the settings of each arm, those of other seams in both."""

    args: argparse.Namespace
    of_base: Settings
    of_other: Settings

    @classmethod
    def of(cls, args: argparse.Namespace, settings: Settings, of_base: Settings) -> Arms:
        """Raises UserError where the reference is given options of other seams of its own."""
        if wrong := [key for key in of_base if not key.startswith("kv.")]:
            raise UserError(f"--set-against takes options of kv, not {wrong[0]}: give it to --set")
        shared = {k: v for k, v in settings.items() if not k.startswith("kv.")}
        return cls(args, {**shared, **of_base}, settings)

    def base(self, progress: Progress, **options: Any) -> Engine:
        return build(self.args, self.args.against, self.of_base, progress, **options)

    def other(self, progress: Progress, **options: Any) -> Engine:
        return build(self.args, self.args.kv, self.of_other, progress, **options)


class Both(NamedTuple):
    """What both arms made of the same prompts, the limits of the offer, reports of the engines."""

    base: Any
    other: Any
    limits: Limits
    reports: dict[str, Any]


def build(
    args: argparse.Namespace, kv: str, settings: Settings, progress: Progress, **options: Any
) -> Engine:
    """An engine with a kv offer; `options` are fields of RunConfig, before those of `args`."""
    import torch

    from core.engine import Engine

    on_cuda = torch.cuda.is_available() if args.device is None else args.device != "cpu"
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
    shown: Progress = lambda stage, done, total: progress(f"{stage} {kv}", done, total)  # noqa: E731
    return Engine(progress=shown, **{**given, **options})


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
            reports[args.kv] = engine.report()
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
