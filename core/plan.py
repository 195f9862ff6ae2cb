"""From a `RunConfig` to the four offers it means.

Names are resolved, options validated, combinations refused before anything is allocated.
What "auto" and None mean:

| field | cpu | cuda |
|---|---|---|
| fusion=auto | none | triton |
| graphs=auto | none | full if the kv offer is graph_safe, else none |
| dtype | float32 | bfloat16 |
| max_num_seqs | 32 | 256 |
| max_num_batched_tokens | 2048 | 8192 |
| overlap | no | yes |

`device` is cuda where torch sees a GPU; `enable_prefix_caching` is what the kv offer can.
`max_model_len` and `kv_cache_bytes` wait for the weights: the engine resolves them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from core.config import OfferConfig, RunConfig, offer_config, settings_by_seam, versions
from core.conform import bind
from core.errors import RunError, UserError
from core.registry import Offer, Owner, Registry
from core.seams import SEAMS, FusionSet, GraphStrategy, KVManager, Scheduler

AUTO: Mapping[str, Mapping[str, str]] = {
    "cpu": {"fusion": "none", "graphs": "none"},
    "cuda": {"fusion": "triton", "graphs": "full"},
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "dtype": {"cpu": "float32", "cuda": "bfloat16"},
    "max_num_seqs": {"cpu": 32, "cuda": 256},
    "max_num_batched_tokens": {"cpu": 2048, "cuda": 8192},
    "overlap": {"cpu": False, "cuda": True},
}


@dataclass(frozen=True)
class Choice:
    """What was chosen for one seam: the class, and the instance if an object was passed in."""

    seam: str
    name: str
    owner: Owner
    offer: Any
    config: OfferConfig | None
    instance: Any = None

    def build(self) -> Any:
        """The object, checked against its seam; an exception becomes a RunError that names it."""
        if self.instance is not None:
            return bind(self.seam, self.instance)
        try:
            made = self.offer(self.config)
        except (UserError, RunError):
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise RunError(
                f"{self.seam} '{self.name}' of {self.owner} could not be made: {what}"
            ) from error
        return bind(self.seam, made)


class Built(NamedTuple):
    """The four objects of a plan."""

    kv: KVManager
    fusion: FusionSet
    graphs: GraphStrategy
    sched: Scheduler


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

    def names(self) -> str:
        """The resolved names in one line, for people and for logs."""
        parts = [f"{choice.seam}={choice.name}" for choice in self.choices]
        return " ".join([*parts, f"device={self.config.device}", f"dtype={self.config.dtype}"])

    def dump(self, config: RunConfig | None = None) -> dict[str, Any]:
        """JSON-able record of what ran: config, options of each offer, owners, versions.

        `config` replaces the plan's own where the engine has resolved more of it.
        """
        owners = self.registry.owners.values()
        record = {
            "config": (config or self.config).model_dump(),
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
    kind = device.partition(":")[0]
    settings = settings_by_seam(config.settings)
    choices: dict[str, Choice] = {}
    for seam in SEAMS:
        wanted = getattr(config, seam)
        if wanted == "auto" and seam in AUTO[kind]:
            wanted = _auto(seam, kind, choices["kv"])
        choices[seam] = _choose(seam, wanted, settings[seam], registry)
    resolved = _fill(config, device, kind, choices)
    plan = Plan(resolved, **choices, registry=registry)
    refusals = _refusals(plan) + registry.hooks.check_combination(plan)
    if len(refusals) == 1:
        raise UserError(refusals[0])
    if refusals:
        numbered = "; ".join(f"({i}) {refusal}" for i, refusal in enumerate(refusals, 1))
        raise UserError(f"{len(refusals)} things speak against this combination: {numbered}")
    return plan


def _device(wanted: str | None) -> str:
    if wanted == "cpu":
        return wanted
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted is None:
        return "cuda" if num_gpus else "cpu"
    kind, _, index = wanted.partition(":")
    if kind != "cuda" or (index and not index.isdecimal()) or wanted.endswith(":"):
        raise UserError(f"there is no device '{wanted}': choose cpu, cuda or cuda:N")
    if int(index or 0) >= num_gpus:
        raise UserError(
            f"device '{wanted}' was asked for and torch {torch.__version__} sees {num_gpus} CUDA "
            "devices: choose another with --device, or --device cpu"
        )
    return wanted


def _auto(seam: str, kind: str, kv: Choice) -> str:
    # A kv that cannot be captured is no mistake of a user who left the graphs to us.
    if seam == "graphs" and not kv.offer.graph_safe:
        return AUTO["cpu"]["graphs"]
    return AUTO[kind][seam]


def _choose(seam: str, wanted: Any, settings: Mapping[str, Any], registry: Registry) -> Choice:
    """The choice of one seam from a name, a class, or a configured instance."""
    if not isinstance(wanted, str | type):
        cls, owner = type(wanted), _module_owner(type(wanted))
        if settings:
            raise UserError(
                f"{seam} was given as an object, which has its options already: set "
                f"{', '.join(settings)} in its Config instead of in the settings"
            )
        given = getattr(wanted, "config", None)
        options = given if isinstance(given, OfferConfig) else None
        return Choice(seam, cls.__qualname__, owner, cls, options, wanted)
    if isinstance(wanted, str):
        found = registry.find(seam, wanted)
    else:
        found = Offer(seam, wanted.__qualname__, wanted, _module_owner(wanted))
    offer: Any = found.load()
    options = offer_config(seam, found.name, offer.Config, settings)
    return Choice(seam, found.name, found.owner, offer, options)


def _module_owner(cls: type) -> Owner:
    origin = getattr(inspect.getmodule(cls), "__file__", None) or f"module {cls.__module__}"
    return Owner(cls.__module__, "", "", origin)


def _fill(config: RunConfig, device: str, kind: str, choices: Mapping[str, Choice]) -> RunConfig:
    """`config` with names of offers, and a value for every None known before the weights."""
    values: dict[str, Any] = {name: choice.name for name, choice in choices.items()}
    values["device"] = device
    for name, default in DEFAULTS.items():
        given = getattr(config, name)
        values[name] = default[kind] if given is None else given
    # One of the two limits given: the other one follows where its default would contradict it.
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if seqs is None and tokens is not None:
        values["max_num_seqs"] = min(values["max_num_seqs"], tokens)
    if tokens is None and seqs is not None:
        values["max_num_batched_tokens"] = max(values["max_num_batched_tokens"], seqs)
    if config.enable_prefix_caching is None:
        values["enable_prefix_caching"] = bool(choices["kv"].offer.prefix_sharing)
    return config.model_copy(update=values)


def _refusals(plan: Plan) -> list[str]:
    """What the facts of the offers themselves rule out, whoever wrote them."""
    config, kv, graphs = plan.config, plan.kv, plan.graphs
    found = []
    if graphs.offer.captures and not str(config.device).startswith("cuda"):
        found.append(
            f"graphs '{graphs.name}' captures CUDA graphs and the device is {config.device}: "
            "choose --graphs none"
        )
    if graphs.offer.captures and not kv.offer.graph_safe:
        found.append(
            f"graphs '{graphs.name}' captures attention and kv '{kv.name}' is not graph_safe: "
            "choose --graphs none or another kv"
        )
    if config.enable_prefix_caching and not kv.offer.prefix_sharing:
        found.append(
            f"prefix caching was asked for and kv '{kv.name}' cannot share prefixes: "
            "drop --enable-prefix-caching or choose another kv"
        )
    if (config.max_num_batched_tokens or 0) < (config.max_num_seqs or 0):
        found.append(
            f"a step holds max_num_batched_tokens={config.max_num_batched_tokens} tokens, fewer "
            f"than the max_num_seqs={config.max_num_seqs} sequences that decode one each: raise "
            "the one or lower the other"
        )
    return found
