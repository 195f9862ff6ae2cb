"""Names and config to the parts of an engine: resolve, load, size, bind, capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from core.batch import Limits
from core.config import RunConfig
from core.errors import RunError, UserError
from core.executor import Executor
from core.loading import LoadedModel, load_model
from core.memory import device_budget, host_budget
from core.plan import Plan, resolve
from core.registry import Registry
from core.rope import rope_tables
from core.slots import Slots

if TYPE_CHECKING:
    from core.engine import Engine
    from core.facts import ModelFacts
    from core.metrics import StepCounters
    from core.seams import KVManager, Scheduler, Span
    from core.tokenizer import Tokenizer
    from core.weights import ModelWeights

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Parts:
    """What an engine is made of."""

    config: RunConfig
    plan: Plan
    registry: Registry
    facts: ModelFacts
    weights: ModelWeights
    tokenizer: Tokenizer
    notes: list[str]
    limits: Limits
    device: torch.device
    kv: KVManager
    sched: Scheduler
    slots: Slots
    executor: Executor
    kv_cache_bytes: int

    def built(self, engine: Engine) -> None:
        """Tell the plugins that an engine stands ready."""
        self.registry.hooks.engine_built(engine)

    def describe(self) -> dict[str, Any]:
        """Resolved config, sizes and versions, JSON-able."""
        usage = self.kv.usage()
        on_cuda = self.device.type == "cuda"
        return {
            **self.plan.dump(self.config),
            "limits": vars(self.limits),
            "kv_cache_bytes": self.kv_cache_bytes,
            "kv_cache_tokens": usage.num_tokens,
            "graph_bytes": self.executor.graph_bytes,
            "device_name": torch.cuda.get_device_name(self.device) if on_cuda else "cpu",
        }


def compose(fields: dict[str, Any], counters: StepCounters, progress: Progress) -> Parts:
    """Build every part of an engine. Raises UserError before anything large is allocated where that
    is possible."""
    registry = Registry(fields.get("plugins", ()))
    plan = resolve(RunConfig.of(**fields), registry)
    config = plan.config
    offers = plan.build()
    if config.chunk_size and not config.enable_chunked_prefill:
        raise UserError(
            f"chunk_size is {config.chunk_size} and chunked prefill is off: drop one of the two"
        )
    if config.preemption == "swap" and not hasattr(offers.kv, "save"):
        raise UserError(
            f"kv '{plan.kv.name}' cannot save to the host: choose --preemption recompute, "
            "or another kv"
        )
    device = torch.device(config.device or "cpu")
    try:
        model = load_model(
            config.model,
            dtype=getattr(torch, str(config.dtype)),
            device=device,
            seed=config.seed,
            progress=lambda done, total: progress("load", done, total),
        )
        return _assemble(registry, plan, offers, model, device, counters, progress)
    except torch.OutOfMemoryError as error:
        first = str(error).split(". ")[0]
        raise RunError(
            f"{device} ran out of memory ({first}): lower --gpu-memory-utilization, "
            "--max-num-batched-tokens, --max-num-seqs or --kv-cache-bytes"
        ) from error


def _assemble(
    registry: Registry,
    plan: Plan,
    offers: Any,
    model: LoadedModel,
    device: torch.device,
    counters: StepCounters,
    progress: Progress,
) -> Parts:
    config, facts = plan.config, model.facts
    limits = _first_limits(config, facts)
    rope = rope_tables(facts, limits.max_model_len, device)
    spans = list(offers.fusion.spans(facts, device))
    budget = config.kv_cache_bytes or _budget(
        config, model, rope, spans, limits, device, offers.graphs.captures
    )
    limits = _final_limits(config, facts, limits, offers.kv, budget, plan.kv.name)
    if offers.kv.prefix_sharing:
        offers.kv.sharing = config.enable_prefix_caching is not False
    if (weights := getattr(offers.kv, "weights", None)) is not None:
        weights(model.weights.layers)
    offers.kv.bind(facts, limits, budget, device)
    slots = Slots(limits)
    fusion = offers.fusion.config
    executor = Executor(
        facts=facts,
        weights=model.weights,
        rope=rope,
        kv=offers.kv,
        spans=spans,
        fuel=getattr(fusion, "fuel", None),
        strict_spans=getattr(fusion, "only", None) is not None,
        graphs=offers.graphs,
        limits=limits,
        slots=slots,
        counters=counters,
        device=device,
        num_in_flight=2 if config.overlap else 1,
    )
    if offers.graphs.captures:
        executor.capture(progress)
    resolved = config.model_copy(
        update={"max_model_len": limits.max_model_len, "kv_cache_bytes": budget}
    )
    return Parts(
        config=resolved,
        plan=plan,
        registry=registry,
        facts=facts,
        weights=model.weights,
        tokenizer=model.tokenizer,
        notes=model.notes,
        limits=limits,
        device=device,
        kv=offers.kv,
        sched=offers.sched,
        slots=slots,
        executor=executor,
        kv_cache_bytes=budget,
    )


def _first_limits(config: RunConfig, facts: ModelFacts) -> Limits:
    """What was asked for, checked against the model; max_model_len may still shrink to what the
    cache holds."""
    assert config.max_num_seqs is not None and config.max_num_batched_tokens is not None
    longest = config.max_model_len or facts.max_position
    if longest > facts.max_position:
        raise UserError(
            f"max_model_len is {longest} and the model has {facts.max_position} positions: "
            f"lower --max-model-len to {facts.max_position} or less"
        )
    return Limits(longest, config.max_num_seqs, config.max_num_batched_tokens)


def _budget(
    config: RunConfig,
    model: LoadedModel,
    rope: tuple[torch.Tensor, torch.Tensor],
    spans: list[Span],
    limits: Limits,
    device: torch.device,
    captures: bool,
) -> int:
    if device.type == "cpu":
        return host_budget(model.facts, limits)
    return device_budget(
        model.facts,
        model.weights,
        rope,
        spans,
        limits,
        device,
        config.gpu_memory_utilization,
        captures,
    )


def _final_limits(
    config: RunConfig, facts: ModelFacts, limits: Limits, kv: KVManager, budget: int, name: str
) -> Limits:
    """Limits that the cache can keep: fewer sequences, and where the length was left open, shorter
    ones."""
    room = kv.capacity(budget, facts, limits)
    if room.num_seqs < 1 or room.num_tokens < 2:
        raise UserError(
            f"{budget / 2**30:.3f} GiB of KV cache do not hold one sequence of kv '{name}' "
            f"at max_model_len {limits.max_model_len}: raise --kv-cache-bytes or lower it"
        )
    longest = limits.max_model_len
    if config.max_model_len is None:
        longest = min(longest, room.num_tokens)
    return Limits(longest, min(limits.max_num_seqs, room.num_seqs), limits.max_num_batched_tokens)
