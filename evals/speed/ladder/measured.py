"""One run of one arm: figures that are compared, and what they were read off.

Definitions: `evals.speed.latency` (the clock starts when a request was due) and
`evals.speed.workloads.DEFINITIONS`. Besides:

- recompute tax: tokens computed again after a preemption over all tokens computed;
- busy: the share of the run that the engine spent in steps;
- share of the roofline: `evals.speed.roofline`, over all steps of the run;
- behind: whether the queue grew over the run (`evals.speed.saturation`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any

import numpy as np

from evals.speed import roofline, workloads
from evals.speed.latency import Served as Stamps, latencies_ms
from evals.speed.workloads import percentile

if TYPE_CHECKING:
    from evals.speed.ladder.loads import Served
    from evals.speed.peers import Ours

DEFINITIONS = {
    **{name: about for name, about in workloads.DEFINITIONS.items() if name != "p50, p90, p99"},
    "ttft_ms": "first token on the host, less the moment at which the request was due",
    "queue_ms, prefill_ms": "TTFT up to the request's first step, and the rest of it",
    "capacity": "requests over duration in a closed loop of max_num_seqs, its end included, 1/s",
    "utilisation": "requests a second that are offered, over the arm's own capacity",
    "busy": "share of the run inside steps",
    "share_of_roofline": "what the steps cannot take less than, by bytes or operations, over them",
    "recompute_tax": "tokens computed again after a preemption, over tokens computed",
    "percentiles": "interpolated; of a run where one sample is expected beyond, else none; of all "
    "runs together (p90, p99 of tables) where seven are",
    "ratio": "geometric mean of the paired ratios of runs, with its 95 % interval by Student's t",
    "share": "log of a step's ratio over the sum of those of all steps that stay",
}
MAX_LOOKS = 64  # of the cache, that a record keeps
POINTS = {"ttft_ms": (50, 90, 99), "tpot_ms": (50,), "itl_ms": (50, 99), "e2el_ms": (50,)}


def figures(served: Served) -> tuple[dict[str, float | None], dict[str, list[float]]]:
    """Figures of a run, None where too few samples carry one, and the samples."""
    duration = served.end_s - served.begin_s
    found = latencies_ms(Stamps(m.arrival_s, m.token_times_s) for m in served.metrics)
    samples = {f"{name}_ms": values for name, values in found.items()}
    samples["queue_ms"] = [float(m.queue_ms or 0.0) for m in served.metrics]
    samples["prefill_ms"] = [float(m.prefill_ms or 0.0) for m in served.metrics]
    num_output = sum(m.num_output_tokens for m in served.metrics)
    numbers: dict[str, float | None] = {
        f"{name} p{point}": percentile(samples[name], point)
        for name, points in POINTS.items()
        for point in points
    }
    numbers |= {
        f"{name} mean": float(np.mean(samples[name])) for name in ("queue_ms", "prefill_ms")
    }
    numbers["output_throughput"] = num_output / duration
    numbers["request_throughput"] = len(served.metrics) / duration
    return numbers, samples


def cache_use(
    report: Mapping[str, Any], served: Served, token_bytes: float | None
) -> dict[str, Any]:
    """The KV cache over a run: room and peak in tokens and bytes, and looks by time (s)."""
    use = report["kv_use"]
    looks = use["over_time"]
    kept = looks[:: max(1, -(-len(looks) // MAX_LOOKS))]
    peak = use["peak_held_tokens"]
    return {
        "room_tokens": report["kv_cache_tokens"],
        "peak_held_tokens": peak,
        "token_bytes": token_bytes,
        "peak_held_bytes": None if token_bytes is None else peak * token_bytes,
        "fragmentation": use["fragmentation"],
        "over_time": [
            [look["at_s"] - served.begin_s, look["num_held_tokens"], look["num_live_tokens"]]
            for look in kept
        ],
    }


def work(
    engine: Ours, served: Served, done: Mapping[str, int],
    floor: Callable[[roofline.Step], float] | None,
) -> dict[str, Any]:  # fmt: skip
    """What the steps of a run came to; `done` are the counters of it."""
    steps = roofline.steps_of(engine.calls, engine.prompt_lens, engine.depth)
    inside = sum(call.end_s - call.begin_s for call in engine.calls)
    num_computed = done["num_prefill_tokens"] + done["num_decode_tokens"]
    seconds = sum(step.seconds for step in steps)
    return {
        "busy": inside / (served.end_s - served.begin_s),
        "recompute_tax": done["num_recomputed_tokens"] / max(1, num_computed),
        "share_of_roofline": None if floor is None else sum(map(floor, steps)) / seconds,
        "counters": dict(done),
    }


def quantiles(values: Seq[float]) -> list[float]:
    """At whole per cents: what stands for thousands of gaps in a record."""
    found: list[float] = np.percentile(values, np.arange(101)).tolist() if len(values) else []
    return found
