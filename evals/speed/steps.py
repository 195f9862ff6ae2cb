"""How long one prefill and one decode step take, through the public Engine API, beside their
physical floor.

    python -m evals.speed.steps --model random:qwen3-0.6b --json steps.json

A prefill is the TTFT of a lone prompt, from `add_request` to its token on the host. A decode step
is the time between two harvests of a full batch whose context passes through `--context`. Prompts
are distinct random ids and prefix sharing is off. Floors: bytes that must be read over
`--bandwidth`, floating-point operations over `--flops`, the larger of the two.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evals import records

if TYPE_CHECKING:
    from core.engine import Engine
    from core.facts import ModelFacts


def weight_bytes(facts: ModelFacts) -> int:
    """Bytes of the weights that a step reads: every block and the head (embeddings are looked
    up)."""
    return int(_weight_count(facts) * facts.dtype.itemsize)


def _weight_count(facts: ModelFacts) -> int:
    width, inner = facts.hidden_size, facts.intermediate_size
    block = sum(facts.qkv_sizes) * width + facts.qkv_sizes[0] * width + 3 * inner * width
    return facts.num_layers * block + facts.vocab_size * width


def decode_floor_ms(facts: ModelFacts, batch: int, context: int, bandwidth: float) -> float:
    """Weights and the context's keys and values, read once, at `bandwidth` bytes a second."""
    return (weight_bytes(facts) + batch * context * facts.kv_bytes_per_token) / bandwidth * 1e3


def prefill_floor_ms(facts: ModelFacts, num_tokens: int, bandwidth: float, flops: float) -> float:
    """The larger of reading the weights and of computing blocks (all tokens), head (one) and causal
    attention."""
    head = facts.vocab_size * facts.hidden_size
    linear = 2 * num_tokens * (_weight_count(facts) - head) + 2 * head
    attention = 2 * num_tokens**2 * facts.qkv_sizes[0] * facts.num_layers
    return max(weight_bytes(facts) / bandwidth, (linear + attention) / flops) * 1e3


def prefill_ms(
    engine: Engine, num_tokens: int, repeats: int, rng: np.random.Generator
) -> list[float]:
    """TTFT in milliseconds, from `add_request` to the token on the host, one lone prompt at a
    time."""
    from core.sampling import SamplingParams

    one = SamplingParams(max_tokens=1, ignore_eos=True)
    times = []
    for _ in range(repeats + 3):
        prompt = rng.integers(0, engine.facts.vocab_size, num_tokens).tolist()
        times.append(engine.generate([prompt], one)[0].metrics.ttft_ms)
    return times[3:]


def decode_ms(
    engine: Engine, batch: int, context: int, steps: int, rng: np.random.Generator
) -> list[float]:
    """Milliseconds between steps of a full batch, the context passing through `context` tokens."""
    from core.sampling import SamplingParams

    warm_up, prompt_len = 8, context - steps // 2
    # The first to decode are ahead by as many tokens as steps are spent on the prompts of the rest;
    # were they to end while steps are timed, the batch would not be full.
    ahead = batch * prompt_len // engine.limits.max_num_batched_tokens + 2
    prompt_len = max(1, prompt_len - ahead // 2 - warm_up)
    params = SamplingParams(max_tokens=steps + warm_up + ahead + 4, ignore_eos=True)
    for _ in range(batch):
        engine.add_request(rng.integers(0, engine.facts.vocab_size, prompt_len).tolist(), params)
    decoding: set[str] = set()
    while len(decoding) < batch:
        decoding.update(event.request_id for event in engine.step())
    for _ in range(warm_up):
        engine.step()
    stamps, ended = [time.perf_counter()], False
    for _ in range(steps):
        ended = any(event.output for event in engine.step()) or ended
        stamps.append(time.perf_counter())
    assert not ended, "a request ended while a full batch was timed"
    while engine.has_unfinished():
        engine.step()
    return [gap * 1e3 for gap in np.diff(stamps)]


def summary(times: list[float], floor: float) -> dict[str, float]:
    """p50, min and spread of `times`, and how far p50 is from the floor."""
    p50 = statistics.median(times)
    return {
        "n": len(times),
        "p50_ms": p50,
        "min_ms": min(times),
        "p90_ms": float(np.quantile(times, 0.9)),
        "floor_ms": floor,
        "x_floor": p50 / floor,
    }


def measure(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Every prefill length and batch size that was asked for."""
    rng = np.random.default_rng(args.seed)
    facts, rates = engine.facts, (args.bandwidth * 1e12, args.flops * 1e12)
    rows: dict[str, Any] = {"prefill": {}, "decode": {}}
    for n in args.prefill:
        times = prefill_ms(engine, n, args.repeats, rng)
        rows["prefill"][n] = summary(times, prefill_floor_ms(facts, n, *rates))
    for batch in args.batch:
        times = decode_ms(engine, batch, args.context, args.steps, rng)
        floor = decode_floor_ms(facts, batch, args.context, rates[0])
        rows["decode"][batch] = summary(times, floor)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m evals.speed.steps", description=__doc__)
    parser.add_argument("--model", default="random:qwen3-0.6b")
    parser.add_argument("--kv", default="paged")
    parser.add_argument("--fusion", default="auto")
    parser.add_argument("--graphs", default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="SEAM.FIELD=VALUE")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--prefill", type=int, nargs="*", default=[128, 512, 1024, 4096])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument(
        "--context", type=int, default=1088, help="tokens, at the middle of the timed steps"
    )
    parser.add_argument("--steps", type=int, default=64, help="decode steps timed")
    parser.add_argument("--repeats", type=int, default=20, help="prefills timed")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument(
        "--bandwidth", type=float, default=4.24, help="TB/s, measured on the device"
    )
    parser.add_argument(
        "--flops", type=float, default=765.0, help="TFLOP/s, measured on the device"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)

    from core.config import parse_setting
    from core.engine import Engine
    from core.errors import RunError, UserError

    try:
        records.check_folder(args.json)
        with Engine(
            model=args.model,
            kv=args.kv,
            fusion=args.fusion,
            graphs=args.graphs,
            settings=dict(parse_setting(text) for text in args.set),
            device=args.device,
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            max_num_seqs=max(args.batch, default=1),
            max_num_batched_tokens=args.max_num_batched_tokens,
            enable_prefix_caching=False,
            seed=args.seed,
        ) as engine:
            rows = measure(engine, args)
            result = {
                "command": " ".join(["python -m evals.speed.steps", *(argv or sys.argv[1:])]),
                "machine": records.machine(),
                "engine": engine.report(),
                **rows,
            }
    except UserError as error:
        print(f"outweigh: error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"outweigh: error: {error}", file=sys.stderr)
        return 1
    _print(rows)
    if args.json:
        records.write(args.json, result)
    return 0


def _print(rows: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("step", "n", "p50 ms", "min ms", "p90 ms", "floor ms", "× floor")
    for kind, unit in (("prefill", "tokens"), ("decode", "sequences")):
        for size, row in rows[kind].items():
            figures = [
                f"{row[k]:.2f}" for k in ("p50_ms", "min_ms", "p90_ms", "floor_ms", "x_floor")
            ]
            table.add_row(f"{kind} {size} {unit}", str(row["n"]), *figures)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
