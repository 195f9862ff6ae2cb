"""Exact counts: what a step asks of the device, what a token costs, what a schedule decides.

Each function returns names and numbers that are the same in every run, so that a budget
(`core.testing.gates`) can hold them to the last one. On a CPU a launch is an operator of torch that
computes, a sync one that needs a value on the host before it can go on (`.item()`, `nonzero`): on
CUDA it would wait. On CUDA they are the calls that the host makes of the driver, by torch's
profiler.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pluggy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core import Engine, SamplingParams
from core.batch import Limits
from core.conform import bind
from core.errors import RunError, UserError
from core.hookspecs import Hooks
from core.registry import Registry
from core.testing.clock import Arrival, VirtualEngine
from core.testing.rig import budget_for, tiny_facts

if TYPE_CHECKING:
    from core.testing.clock import Log

Counts = dict[str, int | float | str]

_WARM_UP = 10
_COPIES = {"aten::copy_", "aten::_to_copy"}
_SYNCS = {
    f"aten::{name}"
    for name in "item _local_scalar_dense is_nonzero equal nonzero masked_select _unique2 "
    "unique_consecutive unique_dim repeat_interleave.Tensor".split()
}
_RUNTIME = {
    "launches": "LaunchKernel LaunchKernelExC LaunchKernelEx LaunchCooperativeKernel",
    "replays": "GraphLaunch",
    "copies": "Memcpy MemcpyAsync Memcpy2DAsync MemcpyHtoDAsync_v2 MemcpyDtoHAsync_v2",
    "syncs": "StreamSynchronize EventSynchronize DeviceSynchronize CtxSynchronize Memcpy",
}


def decode_steps(num_sequences: int = 7, num_steps: int = 32, **fields: Any) -> Counts:
    """A decode step of `num_sequences` sequences, in the steady state.

    `fields` are those of RunConfig. Everything is a step's, over `num_steps` steps: `launches`,
    `copies`, `syncs`, `hook_calls`; on CUDA also `replays` of graphs and `allocations` of device
    memory. Raises RunError where the steps are not steady.
    """
    defaults: dict[str, Any] = {
        "model": "random:tiny", "max_model_len": 256, "max_num_seqs": num_sequences,
        "max_num_batched_tokens": 256, "kv_cache_bytes": 1 << 24, "enable_prefix_caching": False,
    }  # fmt: skip
    with Engine(**{**defaults, **fields}) as engine:
        longest = _WARM_UP + num_steps + 8
        rng = np.random.default_rng(0)
        for _ in range(num_sequences):
            ids = rng.integers(3, engine.facts.vocab_size, 3).tolist()
            engine.add_request(ids, SamplingParams(max_tokens=longest, ignore_eos=True))
        for _ in range(_WARM_UP):
            engine.step()
        on_cuda = engine._executor.device.type == "cuda"
        before, tokens = engine.counters.num_steps, 0
        with counted_hooks() as hooks, (_of_driver if on_cuda else _of_torch)() as found:
            for _ in range(num_steps):
                tokens += sum(len(event.token_ids) for event in engine.step())
        launched = engine.counters.num_steps - before
    if (launched, tokens) != (num_steps, num_steps * num_sequences):
        raise RunError(
            f"{num_steps} calls launched {launched} steps and brought {tokens} tokens of "
            f"{num_sequences} sequences, so that they are not steady: give the cache more room"
        )
    return _a_step({**found, "hook_calls": hooks.total()}, num_steps)


def schedule(
    sched: str = "fifo", kv: str = "paged", sharing: bool = False, seed: int = 0
) -> Counts:
    """A fixed trace of 120 requests under a virtual clock, with too little room for all of them.

    `schedule` is a hash of every row of every step, and of when it was planned, so that a decision
    that is taken otherwise shows; `num_steps`, `num_preemptions`, `num_recomputed_tokens`,
    `peak_held_tokens` (when somebody is admitted), and `num_faults`, rows that no device could
    compute.
    """
    offer: Any = Registry().find("sched", sched).load()
    limits = Limits(max_model_len=512, max_num_seqs=16, max_num_batched_tokens=128)
    peak = 0

    def admitted(*_: object) -> None:
        nonlocal peak
        peak = max(peak, engine.kv.usage().num_held)

    engine = VirtualEngine(
        bind("sched", offer(offer.Config())), limits=limits, num_kv_tokens=1024, kv=kv,
        sharing=sharing, record=True, on_admit=admitted,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(0.03, 120))
    prompts, outputs = rng.integers(4, 300, 120), rng.integers(1, 60, 120)
    rows = zip(at.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    log = engine.run(Arrival(t, n, m, priority=n % 3) for t, n, m in rows)
    if log.stalled:
        raise RunError(f"the trace does not come to its end: {log.stalled}")
    return {
        "schedule": fingerprint(log),
        "num_steps": log.num_steps,
        "num_preemptions": log.counters.num_preemptions,
        "num_recomputed_tokens": log.counters.num_recomputed_tokens,
        "peak_held_tokens": peak,
        "num_faults": len(log.faults),
    }


def fingerprint(log: Log) -> str:
    """Sixteen hex digits of every recorded step: when, and which tokens of whom."""
    digest = hashlib.sha256()
    for step in log.steps:
        rows = [tuple(row) for row in step.rows]
        digest.update(f"{step.planned_s:.9f} {step.num_decodes} {rows}\n".encode())
    return digest.hexdigest()[:16]


def cache(kv: str = "paged", **options: Any) -> Counts:
    """`bytes_a_token` of cache: what a kv offer stores of one more token of a tiny model, all its
    layers and heads together, in its own format. `options` are its own.

    Raises UserError where its room does not depend on its bytes.
    """
    offer: Any = Registry().find("kv", kv).load()
    made = bind("kv", offer(offer.Config(**options)))
    facts = replace(tiny_facts(), num_layers=4)
    limits = Limits(max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=256)
    few, many = (budget_for(made, facts, limits, n) for n in (2048, 32768))
    room = [made.capacity(size, facts, limits).num_tokens for size in (few, many)]
    if room[0] == room[1]:
        raise UserError(f"kv '{kv}' has room for {room[0]} tokens whatever its bytes: set no room")
    return {"bytes_a_token": _number(Fraction(many - few, room[1] - room[0]))}


@contextmanager
def counted_hooks() -> Iterator[Counter[str]]:
    """Calls of hooks meanwhile, by their names, of all engines: the core's way to call them, and
    pluggy's own."""
    found: Counter[str] = Counter()
    ours, theirs = Hooks.call, pluggy.HookCaller.__call__

    def through_core(self: Hooks, name: str, argument: object) -> Any:
        found[name] += 1
        return ours(self, name, argument)

    def through_pluggy(self: pluggy.HookCaller, **arguments: object) -> Any:
        found[self.name] += 1
        return theirs(self, **arguments)

    with (
        mock.patch.object(Hooks, "call", through_core),
        mock.patch.object(pluggy.HookCaller, "__call__", through_pluggy),
    ):
        yield found


class _Operators(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name in _COPIES:
            self._found["copies"] += 1
        elif name in _SYNCS:
            self._found["syncs"] += 1
        elif not func.is_view:
            self._found["launches"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _of_torch() -> Iterator[Counter[str]]:
    found = Counter[str](launches=0, copies=0, syncs=0)
    with _Operators(found):
        yield found


@contextmanager
def _of_driver() -> Iterator[Counter[str]]:
    found = Counter[str](dict.fromkeys(_RUNTIME, 0))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    allocated = _num_allocated()
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function("counted steps"):
            yield found
            found["allocations"] = _num_allocated() - allocated
    events: Any = profiler.events()
    events = [event for event in events if "CPU" in str(event.device_type)]
    # The profiler itself waits for the device at its end.
    (span,) = (event.time_range for event in events if event.name == "counted steps")
    for event in events:
        if span.start <= event.time_range.start <= span.end:
            for kind, names in _RUNTIME.items():
                call = event.name.removeprefix("cuda").removeprefix("cu")
                found[kind] += call != event.name and call in names.split()


def _num_allocated() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def _a_step(found: dict[str, int], num_steps: int) -> Counts:
    return {name: _number(Fraction(total, num_steps)) for name, total in sorted(found.items())}


def _number(exact: Fraction) -> int | float:
    """Whole, or to six digits behind the point, as it stands in a file."""
    return int(exact) if exact.denominator == 1 else round(float(exact), 6)
