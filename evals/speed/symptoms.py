"""What can be wrong with a run, told from what was recorded of it: one function for each symptom.

A check gives a Finding, None where all is well, or a sentence, why it cannot be known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from core.batch import Limits
from core.errors import UserError
from core.registry import Registry

EMPTY = 0.25  # share of the room held that no token lies in, where whole rows are handed out
EMPTY_BLOCKS = 0.10  # where blocks are: those of 32 tokens cost 3 % of throughput at that
TEETH = 3  # times that the cache fills up and drains by a third
STORM, FEWEST_PREEMPTIONS = 0.05, 3  # of the tokens computed: done again, or carried to and fro
JITTER, FEWEST_GAPS = 5.0, 100  # p99 of the gaps between tokens over their median
HOST = 0.5  # share of a step in which the device waits for the host
EAGER = 0.05  # of steps that could have been replayed
PADDING, FEW_ROWS = 0.34, 16  # of a decode step, and rows that cost nothing


class Finding(NamedTuple):
    """A symptom: where it was seen, the numbers that show it, and the flag to try."""

    symptom: str
    where: str
    evidence: str
    attempt: str


@dataclass(frozen=True)
class Seen:
    """What is known of one run; what is not is empty, or None.

    `report` is the engine's, as `Engine.report()` has it; `token_bytes` what its cache stores of a
    token. `looks` are tokens of room held, and
    tokens that lie in it, over time; of one run alone if `is_one_run`. `gaps_ms` are the gaps
    between tokens, or their distribution at whole per cents, `num_gaps` how many there were.
    `host_share` is the host's part of a step, with what says so; `no_host` why it is not known.
    """

    where: str
    report: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    looks: Seq[tuple[float, float]] = ()
    room_tokens: float | None = None
    token_bytes: float | None = None
    is_one_run: bool = True
    gaps_ms: Seq[float] = ()
    num_gaps: int = 0
    host_share: tuple[float, str] | None = None
    no_host: str = "it was not measured: evals.speed.bench does, on CUDA"

    @property
    def config(self) -> Mapping[str, Any]:
        return self.report.get("config", {})

    def options(self, seam: str) -> Mapping[str, Any]:
        """The settings of the offer of a seam."""
        found: Mapping[str, Any] = self.report.get("offers", {}).get(seam, {}).get("settings", {})
        return found

    def finding(self, symptom: str, evidence: str, attempt: str) -> Finding:
        return Finding(symptom, self.where, evidence, attempt)


Answer = Finding | str | None


def fragmentation(seen: Seen) -> Answer:
    """Room that is held and empty, and a cache that fills up and drains in waves."""
    if not seen.looks or not seen.room_tokens:
        return "occupancy was not recorded"
    empty, full = _empty(seen), _fullest(seen)
    num = teeth([held for held, _ in seen.looks]) if seen.is_one_run else 0
    blocks = "block_size" in seen.options("kv")
    if full >= 0.5 and empty >= EMPTY and not blocks:
        said = f"{empty:.0%} of the room held is empty, at up to {full:.0%} of all room"
        said += f"; it filled up and drained {num} times" if num else ""
        return seen.finding("fragmentation", said, "--kv paged")
    if full >= 0.9 and num >= TEETH:
        said = f"occupancy reached {full:.0%} of the room, and fell by a third {num} times"
        return seen.finding("saw-tooth occupancy", said, "more --kv-cache-bytes, or --max-bypass 8")
    return None


def block_size(seen: Seen) -> Answer:
    """Blocks whose last one stays empty too far, for sequences of this length."""
    if not seen.looks or not seen.room_tokens:
        return "occupancy was not recorded"
    size = seen.options("kv").get("block_size")
    empty, full = _empty(seen), _fullest(seen)
    if size is None or full < 0.8 or empty < EMPTY_BLOCKS:
        return None
    smaller = [n for n in (64, 32, 16, 8) if n < size]
    if not smaller:
        return None
    fits = next((n for n in smaller if empty * n / size <= EMPTY_BLOCKS / 2), smaller[-1])
    said = f"blocks of {size} tokens leave {empty:.0%} of the room held empty, at {full:.0%} of it"
    return seen.finding("block size", said, f"--set kv.block_size={fits}")


def storm(seen: Seen) -> Answer:
    """Work that preemption makes: tokens computed twice, bytes to the host and back."""
    done = seen.counters
    computed = done.get("num_prefill_tokens", 0) + done.get("num_decode_tokens", 0)
    if not computed:
        return "what was computed was not recorded"
    num = done.get("num_preemptions", 0)
    if num < FEWEST_PREEMPTIONS:
        return None
    seats = seen.report.get("limits", {}).get("max_num_seqs")
    fewer = f"--max-num-seqs {max(1, seats * 3 // 4)}" if seats else "fewer --max-num-seqs"
    again = done.get("num_recomputed_tokens", 0) / computed
    if again >= STORM:
        said = f"{num:.0f} preemptions, {again:.0%} of the tokens computed were computed before"
        attempt = f"more --kv-cache-bytes, {fewer}, or --preemption swap"
        return seen.finding("recompute storm", said, attempt)
    if swapped := done.get("num_swapped_bytes", 0):
        if not seen.token_bytes:
            return "bytes were swapped, and how many a token has was not recorded"
        carried = swapped / seen.token_bytes
        if carried / computed >= STORM:
            said = f"{num:.0f} preemptions carried {carried:,.0f} tokens, {computed:,.0f} computed"
            attempt = f"more --kv-cache-bytes, {fewer}, or --preemption recompute"
            return seen.finding("swap storm", said, attempt)
    return None


def jitter(seen: Seen) -> Answer:
    """Tokens that come in fits and starts."""
    if seen.num_gaps < FEWEST_GAPS or not len(seen.gaps_ms):
        return f"fewer than {FEWEST_GAPS} gaps between tokens are recorded"
    middle, late = np.percentile(seen.gaps_ms, (50, 99)).tolist()
    if late < JITTER * middle:
        return None
    budget = seen.config.get("max_num_batched_tokens")
    if seen.config.get("enable_chunked_prefill") is False:
        attempt = "--enable-chunked-prefill"
    elif budget and budget > 512 and (seen.config.get("chunk_size") or budget) > 512:
        attempt = "--chunk-size 512"
    else:
        attempt = "--sched aging, or a smaller --chunk-size"
    said = f"gaps between tokens: p50 {middle:.3g} ms, p99 {late:.3g} ms, {late / middle:.1f} x"
    return seen.finding("scheduling jitter", said, attempt)


def host_bound(seen: Seen) -> Answer:
    """A device that waits for the host."""
    if seen.host_share is None:
        return seen.no_host
    share, said = seen.host_share
    if share < HOST:
        return None
    if seen.config.get("graphs") != "full":
        attempt = "--graphs full"
    elif seen.config.get("overlap") is False:
        attempt = "--overlap"
    else:
        attempt = "--fusion triton, or more --max-num-seqs"
    return seen.finding("host-bound steps", said, attempt)


def uncaptured(seen: Seen) -> Answer:
    """Steps that no graph holds."""
    num, eager = (seen.counters.get(name) for name in ("num_steps", "num_eager_steps"))
    if not num or eager is None or not seen.config:
        return "steps were not counted, or the engine is not known"
    if not str(seen.config.get("device", "cpu")).startswith("cuda") or eager / num < EAGER:
        return None
    most, budget = seen.options("graphs").get("max_tokens"), seen.config["max_num_batched_tokens"]
    if seen.config["graphs"] != "full":
        attempt = "--graphs full"
    elif most and most < budget:
        attempt = f"--set graphs.max_tokens={budget}"
    elif seen.options("graphs").get("mixed") is False:
        attempt = "--set graphs.mixed=true"
    else:
        attempt = "--chunk-size, so that steps have a size that is captured"
    said = f"{eager:.0f} of {num:.0f} steps ran eagerly under graphs={seen.config['graphs']}"
    return seen.finding("uncaptured shapes", said, attempt)


def ladder_gaps(seen: Seen) -> Answer:
    """Numbers of decoding sequences for which there is no graph, or one that is far too large."""
    name, limits = seen.config.get("graphs"), seen.report.get("limits")
    if not name or not limits:
        return "the engine is not known"
    try:
        offer: Any = Registry(seen.config.get("plugins", ())).find("graphs", name).load()
    except UserError as error:
        return str(error)
    if not offer.captures:
        return None
    strategy, known = offer(offer.Config(**seen.options("graphs"))), Limits(**limits)
    strategy.shapes(known)
    rows = {
        n: strategy.select(n, n, 1, known.max_model_len, None)
        for n in range(1, known.max_num_seqs + 1)
    }
    if missing := [n for n, shape in rows.items() if shape is None]:
        said = f"no graph holds {len(missing)} of {len(rows)} sizes of a decode step, "
        said += f"{missing[0]} sequences to begin with"
        return seen.finding("ladder gaps", said, f"--max-num-seqs {max(1, missing[0] - 1)}")
    padded = {n: shape.num_seqs - n for n, shape in rows.items()}
    n, more = max(padded.items(), key=lambda item: item[1])
    if more <= FEW_ROWS or more / n <= PADDING:
        return None
    said = f"{n} sequences are padded to {n + more}, by {more / n:.0%}"
    return seen.finding("ladder gaps", said, "--set graphs.fine=8")


CHECKS: dict[str, Callable[[Seen], Answer]] = {
    "fragmentation": fragmentation,
    "block size": block_size,
    "swap or recompute storm": storm,
    "scheduling jitter": jitter,
    "host-bound steps": host_bound,
    "uncaptured shapes": uncaptured,
    "ladder gaps": ladder_gaps,
}


def teeth(held: Seq[float]) -> int:
    """How often a series falls by a third of its maximum, having risen by as much before."""
    step, low, high, num, is_rising = max(held) / 3, held[0], held[0], 0, False
    for value in held if step else ():
        low, high = min(low, value), max(high, value)
        if is_rising and value <= high - step:
            num, is_rising, low = num + 1, False, value
        elif not is_rising and value >= low + step:
            is_rising, high = True, value
    return num


def _fullest(seen: Seen) -> float:
    assert seen.room_tokens
    return max(held for held, _ in seen.looks) / seen.room_tokens


def _empty(seen: Seen) -> float:
    """Mean share of the room held that is empty, while at least half of the peak is held."""
    peak = max(held for held, _ in seen.looks)
    shares = [1 - live / held for held, live in seen.looks if held and held >= peak / 2]
    return float(np.mean(shares)) if shares else 0.0
