"""What of the runs of a block is drawn: distributions and the cache over time, kept small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from evals.speed.ladder.measured import quantiles

if TYPE_CHECKING:
    from evals.speed.ladder.study import Runs


def charted(runs: Runs) -> dict[str, Any]:
    """Of each arm: TTFT of all requests and ITL (means over runs) at whole per cents, the mean wait
    in the queue and the rest of the TTFT in ms, and the cache in the first run."""
    found = {}
    for name, by_round in runs.by_arm.items():
        if not by_round:
            continue
        of_arm = list(by_round.values())
        gaps = [run["itl_ms quantiles"] for run in of_arm if run["itl_ms quantiles"]]
        found[name] = {
            "ttft_ms": quantiles([v for run in of_arm for v in run["samples"]["ttft_ms"]]),
            "itl_ms": np.mean(gaps, 0).tolist() if gaps else [],
            "queue_ms": _mean(of_arm, "queue_ms"),
            "prefill_ms": _mean(of_arm, "prefill_ms"),
            "occupancy": by_round[min(by_round)]["kv"]["over_time"],
            "room_tokens": of_arm[0]["kv"]["room_tokens"],
        }
    return found


def _mean(runs: list[Any], name: str) -> float:
    return float(np.mean([value for run in runs for value in run["samples"][name]]))
