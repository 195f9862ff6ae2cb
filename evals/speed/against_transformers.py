"""Output tokens a second beside transformers, on the same requests, in one process, interleaved.

    python -m evals.speed.against_transformers --model DIR --device cpu --json result.json

Requests: prompts of 32 to 512 random ids, outputs of 16 to 128 tokens, greedy, EOS ignored. Peers:
`generate` on the padded batch (it runs all rows to the longest output; only the tokens asked for
count) and `generate_batch`, transformers' own continuous batching. Rounds are interleaved, with
ours run twice a round as an A/A control.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import RunError, UserError, explained
from evals import records
from evals.arguments import Parser, count, seed
from evals.tiny import MODEL

Requests = list[tuple[list[int], int]]  # prompt ids, output tokens


def requests(num: int, vocab_size: int, seed: int) -> Requests:
    """Prompts of 32..512 ids and outputs of 16..128 tokens, uniform."""
    rng = np.random.default_rng(seed)
    return [
        (
            rng.integers(0, vocab_size, int(rng.integers(32, 513))).tolist(),
            int(rng.integers(16, 129)),
        )
        for _ in range(num)
    ]


def ours(engine: Any, wanted: Requests) -> list[list[int]]:
    from core.sampling import SamplingParams

    params = [SamplingParams(max_tokens=n, ignore_eos=True) for _, n in wanted]
    outputs = engine.generate([ids for ids, _ in wanted], params)
    if errors := [output.error for output in outputs if output.error]:
        raise RunError(f"{len(errors)} of {len(wanted)} requests failed: {errors[0]}")
    return [output.token_ids for output in outputs]


def padded_batch(model: Any, wanted: Requests) -> list[list[int]]:
    """`generate` on one left-padded batch."""
    import torch

    longest = max(len(ids) for ids, _ in wanted)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p, _ in wanted], device=model.device)
    mask = torch.tensor(
        [[0] * (longest - len(p)) + [1] * len(p) for p, _ in wanted], device=model.device
    )
    most = max(n for _, n in wanted)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False
    )
    return [row[longest : longest + n].tolist() for row, (_, n) in zip(out, wanted, strict=True)]


def continuous_batching(model: Any, wanted: Requests) -> list[list[int]]:
    """`generate_batch`; it takes one output length for all, so requests go in by length."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=max(n for _, n in wanted), do_sample=False, eos_token_id=-1
    )
    results = model.generate_batch(
        inputs=[ids for ids, _ in wanted], generation_config=config, progress_bar=False
    )
    outputs = [results[key].generated_tokens for key in sorted(results, key=_serial)]
    return [tokens[:n] for tokens, (_, n) in zip(outputs, wanted, strict=True)]


def _serial(request_id: str) -> int:
    return int(request_id.rsplit("_", 1)[-1])


def timed(run: Callable[[], list[list[int]]], wanted: Requests) -> float:
    """Seconds. Raises RunError where a request has not all of its tokens: that is no speed."""
    start = time.perf_counter()
    found = run()
    elapsed = time.perf_counter() - start
    short = sum(len(ids) != n for ids, (_, n) in zip(found, wanted, strict=True))
    if short:
        raise RunError(f"{short} of {len(wanted)} requests got fewer tokens than they asked for")
    return elapsed


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("evals.speed.against_transformers", __doc__)
    add = parser.add_argument
    add("--model", default=MODEL, help="a Hugging Face directory; default: the embedded one")
    add("--device", default="cpu")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--num-requests", type=count, default=16)
    add("--rounds", type=count, default=3)
    add("--seed", type=seed, default=0)
    add("--json", type=Path)
    return parser.parse_args(argv)


def theirs(args: argparse.Namespace) -> Any:
    """The model of transformers. Raises UserError where there is none."""
    import torch
    from transformers import AutoModelForCausalLM

    with explained(f"transformers cannot load {args.model} on {args.device}", "give another"):
        model = AutoModelForCausalLM.from_pretrained(
            args.model, dtype=getattr(torch, args.dtype), local_files_only=True
        )
        return model.to(args.device).eval()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of every run, the first to warm up: seconds, rates, ratios."""
    from core.engine import Engine

    model = theirs(args)
    with Engine(
        model=str(args.model),
        device=args.device,
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=args.num_requests,
        enable_prefix_caching=False,
    ) as engine:
        wanted = requests(args.num_requests, engine.facts.vocab_size, args.seed)
        runs: dict[str, Callable[[], list[list[int]]]] = {
            "ours": lambda: ours(engine, wanted),
            "generate": lambda: padded_batch(model, wanted),
            "generate_batch": lambda: continuous_batching(model, wanted),
            "ours again": lambda: ours(engine, wanted),
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for i in range(args.rounds + 1):
            for name in runs if i % 2 else reversed(runs):
                elapsed = timed(runs[name], wanted)
                print(f"round {i} of {args.rounds}: {name} {elapsed:.1f} s", file=sys.stderr)
                if i:
                    seconds[name].append(elapsed)
        report = engine.report()
    num_tokens = sum(n for _, n in wanted)
    rates = {name: num_tokens / statistics.median(times) for name, times in seconds.items()}
    return {
        "machine": records.machine(),
        "output_tokens": num_tokens,
        "prompt_tokens": sum(len(ids) for ids, _ in wanted),
        "seconds": seconds,
        "tokens_per_s": rates,
        "ratio": {name: rates["ours"] / rate for name, rate in rates.items() if name != "ours"},
        "engine": report,
    }


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        records.check_folder(args.json)
        result = measure(args)
    except (UserError, RunError) as error:
        print(f"outweigh: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    for name, rate in result["tokens_per_s"].items():
        ratio = result["ratio"].get(name, 1.0)
        print(f"{name:15} {rate:8.1f} tok/s   ours / it = {ratio:.2f}")
    if args.json:
        command = ["python -m evals.speed.against_transformers", *(argv or sys.argv[1:])]
        records.write(args.json, {"command": " ".join(command), **result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
