"""From a `RunConfig` to the four offers it means.

Names are resolved, options validated, combinations refused before anything is allocated. `DEFAULTS`
says what "auto" and None mean. `device` is cuda where torch sees a GPU; `enable_prefix_caching` is
what the kv offer can, `overlap` whether the graphs offer captures. `max_model_len` and
`kv_cache_bytes` wait for the weights: the engine resolves them.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from core.config import OfferConfig, RunConfig, settings_by_seam, validated, versions
from core.conform import bind
from core.errors import RunError, UserError, explained, reason
from core.registry import Offer, Owner, Registry, origin
from core.seams import SEAMS, FusionSet, GraphStrategy, KVManager, Scheduler, offered

# On a CPU, on CUDA.
DEFAULTS: Mapping[str, tuple[Any, Any]] = {
    "fusion": ("onednn", "triton"),
    "graphs": ("none", "full"),  # none too where the kv offer is not graph_safe
    "dtype": ("float32", "bfloat16"),
    "max_num_seqs": (32, 256),
    "max_num_batched_tokens": (2048, 8192),
    "gpu_memory_utilization": (None, 0.9),
}

# In a traceback, a line of the core that asks an offer, or a span of one: its seam and its method.
_ASKS = re.compile(rf'"{re.escape(__file__[:-7])}.*\n.*[^a-z]({"|".join(SEAMS)}|span)\.(\w+)\(')


class Choice(NamedTuple):
    """What was chosen for one seam: the class, and the instance if an object was passed in."""

    seam: str
    name: str
    owner: Owner
    offer: Any
    config: OfferConfig | None
    instance: Any = None

    def __str__(self) -> str:
        return f"{self.seam} '{self.name}' of {self.owner}"

    def build(self) -> Any:
        """The object, checked against its seam; an exception becomes a RunError that names it."""
        with explained(f"{self} could not be made", f"choose another {self.seam}", RunError):
            made = self.offer(self.config) if self.instance is None else self.instance
        return bind(self.seam, made)


class Built(NamedTuple):
    """The four objects of a plan."""

    kv: KVManager
    fusion: FusionSet
    graphs: GraphStrategy
    sched: Scheduler


class Blaming(NamedTuple):
    """See `Plan.blaming`. Every step enters one; a generator would take almost three times as
    long."""

    plan: Plan

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, UserError | RunError):
            if blame := self.plan.blame(error):
                raise RunError(f"{blame}; choose another, or report that to its authors") from error


@dataclass(frozen=True)
class Plan:
    """A run that nothing speaks against; nothing has been allocated for it yet."""

    config: RunConfig
    kv: Choice
    fusion: Choice
    graphs: Choice
    sched: Choice
    registry: Registry = field(repr=False)

    @property
    def choices(self) -> tuple[Choice, Choice, Choice, Choice]:
        return self.kv, self.fusion, self.graphs, self.sched

    def build(self) -> Built:
        """Make the four objects. Raises UserError where one does not fit its seam."""
        return Built(*(choice.build() for choice in self.choices))

    def blaming(self) -> Blaming:
        """An exception out of an offer becomes a RunError that names its owner."""
        return Blaming(self)

    def blame(self, error: BaseException) -> str | None:
        """What `error` says, behind the offer that it came out of: the innermost on its way, the
        span that ran, or the one whose answer was of no use to the line that had asked for it.

        Before all of them the kv offer, where its attention is not as wide as its queries: that
        stops whoever reads it. None where the error met none of them.
        """
        walked = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        step = next((f.f_locals for f in walked if "operation" in f.f_locals), {})
        said, operation, live = reason(error), step.get("operation"), step.get("live", {})
        q, ctx = (tuple(getattr(live.get(name), "shape", ())) for name in ("q", "ctx"))
        if "ctx" in getattr(operation, "reads", ()) and len(q) == 3 and ctx != (q[0], q[1] * q[2]):
            return f"{self.kv} answered attend with nonsense: {said}"
        for frame in reversed(walked):
            cls, module = type(frame.f_locals.get("self")), frame.f_globals.get("__name__")
            for choice in self.choices:
                if cls is choice.offer or module == choice.offer.__module__:
                    return f"{choice} failed in {frame.f_code.co_name}: {said}"
        if isinstance(getattr(operation, "sites", None), tuple):
            return f"{self.fusion} failed in span {step['operation'].name!r}: {said}"
        for seam, method in _ASKS.findall("".join(traceback.format_tb(error.__traceback__)))[-1:]:
            if isinstance(error, TypeError | AttributeError | ValueError):
                return f"{getattr(self, seam, self.fusion)} answered {method} with nonsense: {said}"
        return None

    def names(self) -> str:
        """The resolved names in one line, for people and for logs."""
        parts = [f"{choice.seam}={choice.name}" for choice in self.choices]
        return " ".join([*parts, f"device={self.config.device}", f"dtype={self.config.dtype}"])

    def dump(self) -> dict[str, Any]:
        """JSON-able record of what ran: config, options of each offer, owners, versions."""
        owners = self.registry.owners.values()
        record = {
            "config": self.config.model_dump(),
            "offers": {
                choice.seam: {
                    "name": choice.name,
                    "owner": str(choice.owner),
                    "settings": choice.config.model_dump() if choice.config else {},
                }
                for choice in self.choices
            },
            "versions": versions(o.distribution for o in owners if o.distribution),
        }
        return dict(json.loads(json.dumps(record, default=str)))


def resolve(config: RunConfig, registry: Registry) -> Plan:
    """The plan of `config`. Raises one UserError with all that speaks against it."""
    device = _device(config.device)
    values = _defaults(config, on_cuda=device != "cpu")
    settings = settings_by_seam(config.settings)
    choices: dict[str, Choice] = {}
    for seam in SEAMS:
        wanted = values.get(seam, getattr(config, seam))
        # A kv that cannot be captured is no mistake of a user who left the graphs to us.
        if seam == "graphs" and seam in values and not choices["kv"].offer.graph_safe:
            wanted = "none"
        choices[seam] = _choose(seam, wanted, settings[seam], registry)
        values[seam] = choices[seam].name
    if config.enable_prefix_caching is None:
        values["enable_prefix_caching"] = choices["kv"].offer.prefix_sharing
    if config.overlap is None:  # an eager step has run when its launch returns
        values["overlap"] = choices["graphs"].offer.captures
    resolved = config.model_copy(update={"device": device, **values})
    plan = Plan(resolved, **choices, registry=registry)
    if refusals := [*_refusals(plan), *registry.hooks.check_combination(plan)]:
        raise UserError("; moreover, ".join(refusals))
    return plan


def _device(wanted: str | None) -> str:
    if wanted == "cpu":
        return wanted
    import torch

    num_gpus = torch.cuda.device_count()
    gpus = ["cuda", *(f"cuda:{i}" for i in range(num_gpus))] if num_gpus else []
    if wanted is None or wanted in gpus:
        return wanted or (gpus[0] if gpus else "cpu")
    what = f"there is no device '{wanted}', torch {torch.__version__} sees {num_gpus} CUDA devices"
    raise UserError(f"{what}: choose one of {', '.join(['cpu', *gpus])}")


def _defaults(config: RunConfig, on_cuda: bool) -> dict[str, Any]:
    """A value for every field of `DEFAULTS` that was left open."""
    values = {k: v[on_cuda] for k, v in DEFAULTS.items() if getattr(config, k) in (None, "auto")}
    if config.dtype == "float16" and values.get("fusion") == "onednn":
        values["fusion"] = "none"  # which has nothing for it
    # Of two limits the one that was not given follows where its default would contradict the other.
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if seqs is None and tokens is not None:
        values["max_num_seqs"] = min(values["max_num_seqs"], tokens)
    if tokens is None and seqs is not None:
        values["max_num_batched_tokens"] = max(values["max_num_batched_tokens"], seqs)
    return values


def _choose(seam: str, wanted: Any, settings: Mapping[str, Any], registry: Registry) -> Choice:
    """The choice of one seam from a name, a class, or a configured instance."""
    if isinstance(wanted, str):
        found = registry.find(seam, wanted)
    else:
        cls = wanted if isinstance(wanted, type) else type(wanted)
        owner = Owner(cls.__module__, "", "", origin(cls) or f"module {cls.__module__}")
        found = Offer(seam, cls.__qualname__, cls, owner)
    offer: Any = found.load()
    if isinstance(wanted, str | type):
        config = validated(offer.Config, settings, f"{seam} '{found.name}'", f"{seam}.")
        return Choice(seam, found.name, found.owner, offer, config)
    if settings:
        advice = f"set {', '.join(settings)} in its Config instead of in the settings"
        raise UserError(f"{seam} was given as an object, which has its options already: {advice}")
    given = getattr(wanted, "config", None)
    config = given if isinstance(given, OfferConfig) else None
    return Choice(seam, found.name, found.owner, offer, config, wanted)


def _refusals(plan: Plan) -> Iterator[str]:
    """What the facts of the offers themselves rule out, whoever wrote them."""
    config, kv, graphs = plan.config, plan.kv, f"graphs '{plan.graphs.name}' captures"
    seqs, tokens = config.max_num_seqs or 0, config.max_num_batched_tokens or 0
    if plan.graphs.offer.captures and config.device == "cpu":
        yield f"{graphs} CUDA graphs and the device is cpu: choose --graphs none"
    if plan.graphs.offer.captures and not kv.offer.graph_safe:
        yield f"{graphs} and kv '{kv.name}' is not graph_safe: choose --graphs none or another kv"
    if config.enable_prefix_caching and not kv.offer.prefix_sharing:
        why = f"prefix caching was asked for and kv '{kv.name}' cannot share prefixes"
        yield f"{why}: drop --enable-prefix-caching or choose another kv"
    if config.preemption == "swap" and offered(kv.offer, "save") is None:
        yield f"kv '{kv.name}' cannot save to the host: choose --preemption recompute or another kv"
    if config.chunk_size and not config.enable_chunked_prefill:
        yield f"chunk_size is {config.chunk_size} and chunked prefill is off: drop one of the two"
    if (share := config.gpu_memory_utilization) and config.device == "cpu":
        yield f"gpu_memory_utilization is {share} and the device is cpu: give --kv-cache-bytes"
    if tokens < seqs:
        what = f"max_num_batched_tokens={tokens} tokens, fewer than the max_num_seqs={seqs}"
        yield f"a step holds {what} sequences that decode one each: raise one or lower the other"
