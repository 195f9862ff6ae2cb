"""Where the time to first token of a lone prompt goes: attention, FFN, KV write, host, gaps.

The nodes of the decoder are run alone, all layers of a kind in a row, over a cache of the arm's
kind and with the arm's spans (`evals.speed.places`): on CUDA as a graph, so that what is timed is
the device's work. A span counts as the first of its nodes that is one of the parts. Of what is left
of the measured time to first token, host is what `Engine.step` takes before it returns from an idle
device (on a CPU: all of it), and launch gaps are the rest.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING, Any

from core.errors import RunError, UserError
from evals.speed.ladder.rungs import plan_of

if TYPE_CHECKING:
    import torch

    from core.loading import LoadedModel
    from core.plan import Plan
    from evals.speed.ladder.rungs import Arm
    from evals.speed.ladder.runner import Engines

PARTS = ("attention", "FFN", "KV write", "other nodes", "host", "launch gaps")
_PART_OF = {
    "attention": "attention",
    "kv_write": "KV write",
    "gate_up": "FFN",
    "act_mul": "FFN",
    "down": "FFN",
}
_SAMPLES, _PROMPTS = 5, 8


def part_of(nodes: tuple[str, ...]) -> str:
    """Of an operation over these nodes."""
    return next((_PART_OF[node] for node in nodes if node in _PART_OF), "other nodes")


def split(
    engines: Engines,
    arms: Seq[Arm],
    common: Mapping[str, Any],
    num_tokens: int,
    lengths: Seq[int],
) -> dict[str, dict[str, Any]]:
    """Of each arm the parts (ms) of the TTFT of a lone prompt of `num_tokens` tokens, or under
    "not_known" why they are not; and the TTFT of lone prompts of other `lengths`."""
    import torch

    from core.loading import load_model

    plan = plan_of(arms[0].choices, common)
    device = torch.device(str(plan.config.device))
    dtype = getattr(torch, str(plan.config.dtype))
    model = load_model(
        plan.config.model, dtype=dtype, device=device, seed=plan.config.seed,
        progress=lambda *_: None,
    )  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    for arm in arms:
        engines.retain([arm])
        try:
            of_lengths = {n: engines.lone_prompt(arm, n, _PROMPTS)[0] for n in lengths}
            ttft_ms, host_ms = engines.lone_prompt(arm, num_tokens, _PROMPTS)
            nodes = node_ms(plan_of(arm.choices, common), model, device, num_tokens)
        except (UserError, RunError) as error:
            found[arm.name] = {"not_known": str(error)}
            continue
        rest = max(0.0, ttft_ms - sum(nodes.values()))
        host = min(host_ms, rest) if device.type == "cuda" else rest
        parts = {**nodes, "host": host, "launch gaps": rest - host}
        in_order = {part: parts.get(part, 0.0) for part in PARTS}
        found[arm.name] = {
            "ttft_ms": ttft_ms,
            "num_tokens": num_tokens,
            "parts": in_order,
            "lengths": of_lengths,
        }
    return found


def node_ms(
    plan: Plan, model: LoadedModel, device: torch.device, num_tokens: int
) -> dict[str, float]:
    """Part -> ms of its nodes in a step of one prompt of `num_tokens` tokens."""
    import torch

    from core.chain import cover
    from core.seams import offered
    from evals.speed.places import Bench
    from evals.speed.span_times import runner, timed

    fusion = plan.fusion.build()
    spans = fusion.spans(model.facts, device)
    if (look_at := offered(fusion, "weights")) is not None:
        look_at(model.weights)
    kv = plan.kv.name
    with torch.inference_mode():
        bench = Bench(
            model.facts, model.weights, device, [num_tokens], context=1, max_rows=1, kv=kv
        )
        usable = [span for span in spans if span.when(num_tokens, model.facts, bench.sink)]
        options: Any = plan.fusion.config
        strict = getattr(options, "only", None) is not None
        operations = cover(bench.chain, usable, getattr(options, "fuel", None), strict)
        with bench.step(num_tokens) as batch:
            groups = _run_once(operations, batch)
            runs = {
                part: runner(partial(_again, calls, batch), device.type)
                for part, calls in groups.items()
            }
            found = timed(runs, Namespace(samples=_SAMPLES, replays=2, device=device.type))
    return {part: statistics.median(seconds) * 1e3 for part, seconds in found.items()}


def _run_once(operations: Any, batch: Any) -> dict[str, list[Any]]:
    """Part -> its operations, each with the values that it read in this pass."""
    live: dict[str, Any] = {}
    groups: defaultdict[str, list[Any]] = defaultdict(list)
    for operation in operations:
        reads = [live[name] for name in operation.reads]
        groups[part_of(operation.nodes)].append((operation, reads))
        out = operation.run(operation.sites, batch, *reads)
        live.update(zip(operation.writes, out, strict=True))
    return dict(groups)


def _again(calls: list[Any], batch: Any) -> Iterator[Any]:
    for operation, reads in calls:
        yield operation.run(operation.sites, batch, *reads)
