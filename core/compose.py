"""Names and config to the parts of an engine: resolve, load, size, bind, capture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from core.batch import Limits
from core.chain import Decoder, check_spans
from core.config import RunConfig
from core.errors import RunError, UserError, reason
from core.executor import Executor
from core.loading import LoadedModel, load_model
from core.memory import device_budget, host_budget
from core.plan import Plan, resolve
from core.registry import Registry
from core.rope import rope_tables
from core.seams import Capacity, offered
from core.slots import Slots

if TYPE_CHECKING:
    from core.facts import ModelFacts
    from core.metrics import StepCounters
    from core.seams import KVManager, Scheduler
    from core.show import Progress

WEIGHTS = attrgetter("model", "dtype", "device", "seed")  # of a RunConfig


@dataclass(frozen=True)
class Parts:
    """What an engine is made of. `plan.config` is resolved to the last field."""

    plan: Plan
    model: LoadedModel
    limits: Limits
    kv: KVManager
    sched: Scheduler
    slots: Slots
    executor: Executor

    def describe(self) -> dict[str, Any]:
        """Resolved config, sizes and versions, JSON-able."""
        device = self.executor.device
        name = torch.cuda.get_device_name if device.type == "cuda" else str
        return {
            **self.plan.dump(),
            "limits": {**vars(self.limits)},
            "kv_cache_tokens": self.kv.usage().num_tokens,
            "graph_bytes": self.executor.graph_bytes,
            "device_name": name(device),
        }


def compose(
    fields: dict[str, Any], counters: StepCounters, progress: Progress, like: Parts | None
) -> Parts:
    """Build every part of an engine. Raises UserError before anything large is allocated where that
    is possible. `like` are those of an engine that has the model already."""
    plan = resolve(RunConfig.of(**fields), Registry(fields.get("plugins", ())))
    try:
        with plan.blaming():
            return _assemble(plan, counters, progress, like)
    except (RuntimeError, MemoryError) as error:  # torch's CPU allocator has no error of its own
        if "memory" not in reason(error).lower():
            raise
        what = f"{plan.config.device} ran out of memory ({reason(error)[:200]})"
        advice = "kv's own options, --max-num-batched-tokens or --max-num-seqs"
        raise RunError(f"{what}: lower --kv-cache-bytes, {advice}") from error


def _assemble(plan: Plan, counters: StepCounters, progress: Progress, like: Parts | None) -> Parts:
    config, offers = plan.config, plan.build()
    device, dtype = torch.device(config.device or "cpu"), getattr(torch, str(config.dtype))
    load = partial(load_model, config.model, dtype=dtype, device=device, seed=config.seed)
    if like and WEIGHTS(like.plan.config) != WEIGHTS(config):
        raise UserError("weights_of has another model, dtype, device or seed: give one like it")
    model = like.model._replace(notes=[]) if like else load(progress=partial(progress, "load"))
    facts, kv = model.facts, offers.kv
    limits = _first_limits(config, facts)
    rope = rope_tables(facts, limits.max_model_len, device)
    decoder = Decoder(facts, model.weights, rope, device)
    check_spans(spans := offers.fusion.spans(facts, device))
    for offer in (offers.fusion, kv):
        if (look_at := offered(offer, "weights")) is not None:
            look_at(model.weights)
    share = config.gpu_memory_utilization  # None on a CPU
    budget = config.kv_cache_bytes or (
        host_budget(facts, limits) if share is None
        else device_budget(decoder, spans, limits, share, offers.graphs.captures)
    )  # fmt: skip
    limits = _final_limits(config, facts, limits, kv, budget, plan.kv.name)
    if limits.max_model_len < (config.max_model_len or facts.max_position):
        what = f"the KV cache holds sequences of {limits.max_model_len} tokens and the model"
        model.notes.append(f"{what} {facts.max_position}: give it more room for longer ones")
    kv.sharing = bool(config.enable_prefix_caching)
    kv.bind(facts, limits, budget, device)
    slots = Slots(limits)
    executor = Executor(
        decoder, kv, spans, plan.fusion.config, offers.graphs, limits, slots, counters,
        num_in_flight=2 if config.overlap else 1,
    )  # fmt: skip
    if offers.graphs.captures:
        executor.capture(progress)
    sizes = {"max_model_len": limits.max_model_len, "kv_cache_bytes": budget}
    plan = replace(plan, config=config.model_copy(update=sizes))
    return Parts(plan, model, limits, kv, offers.sched, slots, executor)


def _first_limits(config: RunConfig, facts: ModelFacts) -> Limits:
    """What was asked for, checked against the model; max_model_len may still shrink to what the
    cache holds."""
    assert config.max_num_seqs is not None and config.max_num_batched_tokens is not None
    longest = config.max_model_len or facts.max_position
    if longest > facts.max_position:
        what = f"max_model_len is {longest} and the model has {facts.max_position} positions"
        raise UserError(f"{what}: lower --max-model-len to {facts.max_position} or less")
    return Limits(longest, config.max_num_seqs, config.max_num_batched_tokens)


def _final_limits(
    config: RunConfig, facts: ModelFacts, limits: Limits, kv: KVManager, budget: int, name: str
) -> Limits:
    """Limits that the cache can keep: fewer sequences, and where the length was left open, shorter
    ones."""
    room = Capacity(*kv.capacity(budget, facts, limits))
    if room.num_seqs < 1 or room.num_tokens < 2:
        what = f"{budget:,} bytes of KV cache hold no sequence of kv '{name}' at max_model_len"
        which = f"{limits.max_model_len} ({facts.kv_bytes_per_token:,} bytes a token unquantised)"
        which += ": raise --kv-cache-bytes, or lower --max-model-len, --max-num-seqs"
        advice = "--max-num-batched-tokens (tables and scratch come first) or the block size"
        raise UserError(f"{what} {which}, {advice}")
    longest = config.max_model_len or min(limits.max_model_len, room.num_tokens)
    return Limits(longest, min(limits.max_num_seqs, room.num_seqs), limits.max_num_batched_tokens)
