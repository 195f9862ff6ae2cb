"""How long one prefill and one decode step take, through the public Engine API, beside their
physical floor.

    python -m evals.speed.steps --model random:qwen3-0.6b --json steps.json

A prefill is the TTFT of a lone prompt, from `add_request` to its token on the host; its padding is
what the graphs' shapes add to its tokens. A decode step is the time between two harvests of a full
batch whose context passes through `--context`. Prompts are distinct random ids and prefix sharing
is off. Floors: bytes that must be read over `--bandwidth`, the cache's in its own format,
floating-point operations over `--flops`, the larger of the two.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from core.errors import RunError, UserError
from core.show import print_rows
from evals import records
from evals.arguments import Parser, count, positive, seed

if TYPE_CHECKING:
    from core.engine import Engine, RequestOutput
    from core.facts import ModelFacts


def weight_bytes(facts: ModelFacts) -> int:
    """Bytes of the weights that a step reads: every block and the head (embeddings are looked
    up)."""
    return int(_weight_count(facts) * facts.dtype.itemsize)


def _weight_count(facts: ModelFacts) -> int:
    width, inner = facts.hidden_size, facts.intermediate_size
    block = sum(facts.qkv_sizes) * width + facts.qkv_sizes[0] * width + 3 * inner * width
    return facts.num_layers * block + facts.vocab_size * width


def kv_token_bytes(engine: Engine) -> float:
    """Bytes that the engine's cache stores of one more token, over all layers, in its own format.

    Raises UserError where the room does not depend on the bytes.
    """
    from core.testing.rig import budget_for

    kv, facts = engine.plan.kv.build(), engine.facts
    limits = replace(engine.limits, max_num_seqs=engine.limits.max_num_seqs + 1)
    few, many = (budget_for(kv, facts, limits, num_tokens) for num_tokens in (1, 1 << 40))
    room = [kv.capacity(num_bytes, facts, limits).num_tokens for num_bytes in (few, many)]
    if room[0] == room[1]:
        raise UserError(
            f"kv '{engine.plan.kv.name}' has room for {room[0]} tokens whatever its bytes, which "
            "does not tell what it stores of a token: leave kv.num_blocks out"
        )
    return (many - few) / (room[1] - room[0])


def decode_floor_ms(
    facts: ModelFacts, batch: int, context: int, bandwidth: float, token_bytes: float
) -> float:
    """Weights and the context's keys and values (`token_bytes` a token), read once, at `bandwidth`
    bytes a second."""
    return (weight_bytes(facts) + batch * context * token_bytes) / bandwidth * 1e3


def prefill_floor_ms(facts: ModelFacts, num_tokens: int, bandwidth: float, flops: float) -> float:
    """The larger of reading the weights and of computing blocks (all tokens), head (one) and causal
    attention."""
    head = facts.vocab_size * facts.hidden_size
    linear = 2 * num_tokens * (_weight_count(facts) - head) + 2 * head
    attention = 2 * num_tokens**2 * facts.qkv_sizes[0] * facts.num_layers
    return max(weight_bytes(facts) / bandwidth, (linear + attention) / flops) * 1e3


def prompt_padding(engine: Engine, num_tokens: int) -> float:
    """Padded tokens over tokens, less 1, of a lone prompt; 0 where it runs eagerly."""
    graphs, budget = engine.plan.graphs.build(), engine.limits.max_num_batched_tokens
    graphs.shapes(engine.limits)
    num_padded = 0
    for start in range(0, num_tokens, budget):
        end = min(start + budget, num_tokens)
        # As in the executor: a single token is decoding, which starts nowhere.
        begin = start if end - start > 1 else None
        shape = graphs.select(end - start, 1, end - start, end, begin)
        num_padded += end - start if shape is None else shape.num_tokens
    return num_padded / num_tokens - 1


def prefill_ms(
    engine: Engine, num_tokens: int, repeats: int, rng: np.random.Generator
) -> list[float]:
    """TTFT in milliseconds, from `add_request` to the token on the host, one lone prompt at a time.

    Raises UserError where the engine refuses such a prompt, RunError where a step fails.
    """
    from core.sampling import SamplingParams

    _check_length(engine, num_tokens + 1)
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    times: list[float] = []
    for _ in range(repeats + 3):
        prompt = rng.integers(0, engine.facts.vocab_size, num_tokens).tolist()
        output = engine.generate([prompt], one)[0]
        if output.error is not None:
            raise RunError(f"a prompt of {num_tokens} tokens failed: {output.error}")
        assert output.metrics.ttft_ms is not None, "it ended by length"
        times.append(output.metrics.ttft_ms)
    return times[3:]


def _check_length(engine: Engine, num_tokens: int) -> None:
    """Before prompts are drawn, which may be longer than the memory."""
    if num_tokens > (longest := engine.limits.max_model_len):
        what = f"sequences of {num_tokens} tokens do not fit max_model_len {longest}"
        raise UserError(f"{what}: raise --max-model-len, or give less")


def decode_ms(
    engine: Engine, batch: int, context: int, steps: int, rng: np.random.Generator
) -> list[float]:
    """Milliseconds between steps of a full batch, the context passing through `context` tokens.

    Raises UserError where the cache does not hold the batch, RunError where a step fails.
    """
    from core.sampling import SamplingParams

    if batch > engine.limits.max_num_seqs:
        raise UserError(
            f"a batch of {batch} was asked for and {engine.limits.max_num_seqs} sequences run at "
            "once: raise --kv-cache-bytes"
        )
    warm_up, prompt_len = 8, context - steps // 2
    # The first to decode are ahead by as many tokens as steps are spent on the prompts of the rest;
    # were they to end while steps are timed, the batch would not be full.
    ahead = batch * prompt_len // engine.limits.max_num_batched_tokens + 2
    prompt_len -= ahead // 2 + warm_up
    if prompt_len < 1:
        raise UserError(
            f"{steps} steps cannot be timed with {context} tokens in the middle, {warm_up} others "
            f"come before them: raise --context by {1 - prompt_len} or more, or lower --steps"
        )
    _check_length(engine, prompt_len + steps + warm_up + ahead)
    params = SamplingParams(max_tokens=steps + warm_up + ahead + 4, ignore_eos=True)
    num_preemptions = engine.counters.num_preemptions
    for _ in range(batch):
        engine.add_request(rng.integers(0, engine.facts.vocab_size, prompt_len).tolist(), params)
    decoding: set[str] = set()
    outputs: list[RequestOutput] = []

    def step() -> None:
        for event in engine.step():
            decoding.add(event.request_id)
            if event.output is not None:
                outputs.append(event.output)

    while len(decoding) < batch:
        step()
    for _ in range(warm_up):
        step()
    stamps = [time.perf_counter()]
    for _ in range(steps):
        step()
        stamps.append(time.perf_counter())
    early = list(outputs)  # they were to go on until all had been timed
    while engine.has_unfinished():
        engine.step()
    if failed := [output.error for output in early if output.error]:
        raise RunError(f"{len(failed)} of {batch} sequences failed: {failed[0]}")
    num_preemptions = engine.counters.num_preemptions - num_preemptions
    if early or num_preemptions:
        raise UserError(
            f"the cache does not hold {batch} sequences of {context + steps // 2} tokens at once, "
            f"{len(early)} ended before all were timed and {num_preemptions} were preempted: raise "
            "--kv-cache-bytes, or lower --batch or --context"
        )
    return [gap * 1e3 for gap in np.diff(stamps)]


def step_medians(args: argparse.Namespace, engine: Engine, seed: int) -> dict[str, float]:
    """The median, in ms, of each prefill and decode step that `args` names, prompts by `seed`."""
    rng = np.random.default_rng(seed)
    found = {}
    for n in args.prefill:
        times = prefill_ms(engine, n, args.repeats, rng)
        found[f"prefill {n}"] = statistics.median(times)
    for n in args.batch:
        times = decode_ms(engine, n, args.context, args.steps, rng)
        found[f"decode {n}"] = statistics.median(times)
    return found


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
        "share_of_floor": floor / p50,
    }


def measure(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Every prefill length and batch size that was asked for; of what the engine refuses, its
    sentence."""
    rng = np.random.default_rng(args.seed)
    facts, rates = engine.facts, (args.bandwidth * 1e12, args.flops * 1e12)
    token_bytes = kv_token_bytes(engine)
    rows: dict[str, Any] = {"kv_token_bytes": token_bytes, "prefill": {}, "decode": {}}
    for n in args.prefill:
        try:
            times = prefill_ms(engine, n, args.repeats, rng)
        except UserError as error:
            rows["prefill"][n] = {"refused": str(error)}
            continue
        row = summary(times, prefill_floor_ms(facts, n, *rates))
        rows["prefill"][n] = row | {"padding": prompt_padding(engine, n)}
    for context in args.context:
        of_context = rows["decode"][context] = {}
        for batch in args.batch:
            try:
                times = decode_ms(engine, batch, context, args.steps, rng)
            except UserError as error:
                of_context[batch] = {"refused": str(error)}
                continue
            floor = decode_floor_ms(facts, batch, context, rates[0], token_bytes)
            of_context[batch] = summary(times, floor)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = Parser("evals.speed.steps", __doc__)
    parser.add_argument("--model", default="random:qwen3-0.6b")
    parser.add_argument("--kv", default="paged")
    parser.add_argument("--fusion", default="auto")
    parser.add_argument("--graphs", default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="SEAM.FIELD=VALUE")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument(
        "--prefill",
        type=count,
        nargs="*",
        default=[128, 150, 512, 1024, 1100, 2048, 4096, 4400, 16384],
        help="tokens of lone prompts",
    )
    parser.add_argument("--batch", type=count, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument(
        "--context",
        type=count,
        nargs="+",
        default=[1088],
        help="tokens, at the middle of the timed decode steps",
    )
    parser.add_argument("--steps", type=count, default=64, help="decode steps timed")
    parser.add_argument("--repeats", type=count, default=20, help="prefills timed")
    parser.add_argument("--max-model-len", type=count, default=16640)
    parser.add_argument("--max-num-batched-tokens", type=count)
    parser.add_argument(
        "--bandwidth", type=positive, default=4.24, help="TB/s, measured on the device"
    )
    parser.add_argument(
        "--flops", type=positive, default=765.0, help="TFLOP/s, measured on the device"
    )
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)

    from core.config import parse_setting
    from core.engine import Engine

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
    num_measured = _print(rows)
    if args.json:
        records.write(args.json, result)
    if not num_measured:
        print("outweigh: error: nothing was measured, for the reasons above", file=sys.stderr)
    return 0 if num_measured else 1


def _print(rows: dict[str, Any]) -> int:
    """How many steps were measured."""
    found = [(f"prefill {n} tokens", row) for n, row in rows["prefill"].items()]
    found += [
        (f"decode {batch} sequences at {context}", row)
        for context, of_context in rows["decode"].items()
        for batch, row in of_context.items()
    ]
    measured = [_cells(step, row) for step, row in found if "refused" not in row]
    print_rows(measured, sys.stdout)
    for step, row in found:
        if "refused" in row:
            print(f"{step}: {row['refused']}")
    return len(measured)


def _cells(step: str, row: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": step,
        "n": row["n"],
        "p50 ms": row["p50_ms"],
        "min ms": row["min_ms"],
        "p90 ms": row["p90_ms"],
        "floor ms": row["floor_ms"],
        "× floor": row["x_floor"],
        "% of floor": f"{row['share_of_floor']:.1%}",
        "padding": f"{row['padding']:.1%}" if "padding" in row else None,
    }


if __name__ == "__main__":
    sys.exit(main())
