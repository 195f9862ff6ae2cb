"""What the embedded model must be able to do, and whether a result shows it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from evals.tiny.damage import MARGIN

_SENSES = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}

MAX_RATIO = 0.92  # bits per byte over those of the byte model
MIN_ACCURACY = {"passkey": 0.95, "recall": 0.9}
MAX_REPEATED = 0.2  # median seq-rep-4 of sampled text
MAX_KL = 1e-3  # nats
MIN_WINDOWS, MIN_ITEMS, MIN_PROMPTS = 20, 200, 20
MIN_PAIRED, MIN_POSITIONS = 400, 4096


@dataclass(frozen=True)
class Gate:
    """`measured` stands to `bound` as `sense` says, on no fewer than `min_n` samples."""

    name: str
    measured: float
    sense: str
    bound: float
    n: int
    min_n: int

    @property
    def holds(self) -> bool:
        return self.n >= self.min_n and bool(_SENSES[self.sense](self.measured, self.bound))

    def as_row(self) -> dict[str, Any]:
        return {**vars(self), "holds": self.holds}


def gates(results: dict[str, Any]) -> list[Gate]:
    """The gates of the parts that `results` has, as `evals.tiny.evaluate.evaluate` gives them."""
    found = []
    if part := results.get("bpb"):
        found.append(Gate("bits per byte, x of Kneser-Ney", part["estimate"], "<=", MAX_RATIO,
                          part["n"], MIN_WINDOWS))  # fmt: skip
    if part := results.get("position"):
        found.append(Gate("loss, late minus early: upper end", part["interval"][1], "<", 0.0,
                          part["n"], MIN_WINDOWS))  # fmt: skip
    for name, bound in MIN_ACCURACY.items():
        for dtype, part in results.get(name, {}).items():
            found.append(Gate(f"{name}, {dtype}", part["estimate"], ">=", bound,
                              part["n"], MIN_ITEMS))  # fmt: skip
    if part := results.get("repetition"):
        found.append(Gate("seq-rep-4, median", part["estimate"], "<=", MAX_REPEATED,
                          part["n"], MIN_PROMPTS))  # fmt: skip
    if part := results.get("damage"):
        found += damage_gates(part)
    return found


def damage_gates(part: dict[str, Any]) -> list[Gate]:
    """That an offer is no worse than the reference: passkeys within a margin, and the logits."""
    who = f"{part['kv_b']} beside {part['kv_a']}"
    return [
        Gate(f"{who}: passkey, lower bound", part["difference_bound"], ">", -MARGIN,
             part["n"], MIN_PAIRED),
        Gate(f"{who}: mean KL", part["mean_kl"], "<=", MAX_KL,
             part["num_positions"], MIN_POSITIONS),
    ]  # fmt: skip
